"""Runs on a rack's Slurm: submitted as a user does, on the head, and watched through their files."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusterddp.places.staging import make_run
from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.seal import sealed
from clusterddp.system.files import read_json, write_json
from tests.support.launch_runs import plan_script, plan_text
from tests.support.paths import ROOT as CHECKOUT
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

START = """
import sys
from pathlib import Path
from clusterddp.submission.submit import start_attempt
from clusterddp.run.directory import RunDir
print(start_attempt(RunDir(Path(sys.argv[1])), 0).job_id)
"""

TASK = """
import os, signal, sys, time
from pathlib import Path
from clusterddp.run.directory import RunDir
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.record import RankEnd
signalled = []
signal.signal(signal.SIGTERM, lambda *_: signalled.append(1))
run, number, rank = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(os.environ["SLURM_PROCID"])
attempt = run.attempt(number)
(attempt.path / f"up-{rank}").touch()
def end(outcome, **more):
    if rank == 0:
        write_end(attempt, AttemptEnd(outcome=outcome, reason="so the task says", **more))
    sys.exit(0)
def wait(condition):
    while not condition():
        time.sleep(0.02)
"""
COMPLETE_LATER = TASK + "if number: end('COMPLETED')\n"
GO_ON = "end('STOPPED', will_restart=True, needs_job=True)\n"


def environment() -> dict[str, str]:
    """Return what a shell on the head has: this Python and this checkout first, and the key of the tests' seals."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(CHECKOUT), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}


def make_slurm_run(
    rack: Rack,
    name: str,
    code: str | None = None,
    *,
    more: str = "",
    text: str = "",
    resources: str = "{nodes: 2, procs_per_node: 1}",
    environ: Mapping[str, str] | None = None,
) -> RunDir:
    """Make the directory of a run of this script (or of this spec), which is not submitted yet."""
    environ = environment() | dict(environ or {})
    directory = rack.dir / "shared" / name
    directory.mkdir(exist_ok=True)
    if code is not None:
        plan = plan_script(directory, code, more=f"launcher: slurm\n{more}", resources=resources, environ=environ)
    else:
        plan = plan_text(text, directory, environ=environ)
    return RunDir(make_run(plan, environ).run_dir)


def start(rack: Rack, name: str, code: str, *, more: str = "restarts: 2") -> tuple[RunDir, str]:
    """Submit a run of two nodes whose tasks are this program; return it and its job's number."""
    run = make_slurm_run(rack, name, "", more=more)
    stand_in(run, code)
    return run, start_run(rack, run)


def await_up(run: RunDir, attempt: int = 0) -> None:
    """Wait until the stand-ins of an attempt's two tasks are up."""
    wait_until(lambda: all((run.attempt(attempt).path / f"up-{rank}").exists() for rank in (0, 1)), 40)


def claims(run: RunDir) -> list[tuple[str, int]]:
    """List which starts (of which job, the how manieth restart) have claimed attempts."""
    found = [read_json(attempt.claim) for attempt in run.attempts()]
    return [(claim["job_id"], claim["restart_count"]) for claim in found if claim]


def stand_in(run: RunDir, code: str) -> None:
    """Have srun start this program in place of clusterddp's own task, with RUN_DIR and the attempt as arguments."""
    program = run.launcher_dir / "stand_in.py"
    program.write_text(code)
    plan = read_json(run.plan)
    assert plan is not None
    srun = plan["slurm"]["srun"]
    module = srun.index("-m")
    plan["slurm"]["srun"] = [*srun[:module], str(program), *srun[module + 2 :]]
    write_json(run.plan, sealed(plan))


def start_run(rack: Rack, run: RunDir, environ: Mapping[str, str] | None = None) -> str:
    """Submit a run that `make_slurm_run` made; return its job's number."""
    env = environment() | dict(environ or {})
    done = rack.run(HEAD, [sys.executable, "-c", START, str(run.path)], env=env)
    return done.stdout.strip()


def await_final_end(run: RunDir, within_s: float = 60, *, what: Callable[[], object] = str) -> AttemptEnd:
    """Wait until the run has ended; return how, and print it, or `what`, for a test that fails."""

    def look() -> AttemptEnd | None:
        end = read_end(run.attempts()[-1])
        return end if end is not None and not end.will_restart else None

    end = wait_until(look, within_s, what=what)
    assert isinstance(end, AttemptEnd)
    print(end)
    return end


def job_fields(rack: Rack, job: str) -> dict[str, str]:
    """Ask Slurm for a job, as names and values."""
    words = rack.run(HEAD, ["scontrol", "show", "job", "-o", job], check=False).stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def await_job_state(rack: Rack, job: str, state: str, within_s: float = 40) -> dict[str, str]:
    """Wait until Slurm calls the job so; return what it says of it."""
    wait_until(lambda: job_fields(rack, job).get("JobState") == state, within_s)
    return job_fields(rack, job)


@contextlib.contextmanager
def stopped_batch_process(run: RunDir) -> Iterator[None]:
    """Stop the process of a job as soon as it is there: its Python has handled no signal yet."""

    def find() -> int | None:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"clusterddp.places.slurm.batch" in words and os.fsencode(run.path) in words:
                    return int(entry.name)
        return None

    pid = wait_until(find, 60, interval_s=0.002)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)

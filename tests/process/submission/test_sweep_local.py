"""Sweeps on this machine: a queue starts the runs, one after the other; real processes, small scripts, no torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from clusterddp.places.state import read_state
from clusterddp.run.attempts import claim, read_end
from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, read_queue
from clusterddp.system.files import read_jsonl
from tests.support.fake_gpus import FakeGpus
from tests.support.person import Person
from tests.support.waiting import wait_until

SCRIPT = """\
import json, os, pathlib, time
me = os.environ["CLUSTERDDP_RUN"].rpartition(".")[2]
place = pathlib.Path(os.environ["PLACE"])
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
with open(place / "times.jsonl", "a") as file:
    file.write(json.dumps({"run": me, "what": "begin", "gpus": gpus}) + "\\n")
print("run", me, flush=True)
if os.environ.get("FAILS") == me:
    raise ValueError("the loss is nan")
while os.environ.get("HOLDS") == "all" and not (place / f"go{me}").exists():
    time.sleep(0.02)
with open(place / "times.jsonl", "a") as file:
    file.write(json.dumps({"run": me, "what": "end", "gpus": gpus}) + "\\n")
"""
SPEC = "name: job\nresources: {procs_per_node: 1}\nentry: {script: entry.py}\n"
ON_ONE_GPU = "name: job\nresources: {nodes: 1, gpus_per_node: 1}\nentry: {script: entry.py}\n"
COUNT = "env.I=0,1,2"


class SweepPerson(Person):
    """A user of this machine who submits sweeps."""

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.clusterddp(*arguments, check=False, environ=more)

    def let_go(self, *numbers: int) -> None:
        """Let held runs end."""
        for number in numbers:
            (self.path / f"go{number}").touch()

    @property
    def times(self) -> list[tuple[str, str]]:
        return [(str(row["run"]), str(row["what"])) for row in read_jsonl(self.path / "times.jsonl")]

    def sweeps(self) -> list[SweepDir]:
        return [SweepDir(path.parent) for path in (self.path / "runs").glob("*/sweep.json")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[SweepPerson]:
    (tmp_path / "entry.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(SPEC)
    place = SweepPerson(path=tmp_path, environ={"PLACE": str(tmp_path)})
    yield place
    for each in place.sweeps():
        kill_queue(each)
        for run in each.runs():
            end_processes(f"{read_run(run).token}.", timeout_s=5)


def kill_queue(sweep: SweepDir) -> None:
    """Kill the queue alone, and wait until it is gone."""
    queue = read_queue(sweep)
    if queue and queue.process.alive():
        os.kill(queue.process.pid, signal.SIGKILL)
        wait_until(lambda: not queue.process.alive())


@contextmanager
def opens_of(path: Path) -> Iterator[Callable[[], int]]:
    """Count how often any process opens a file, by the kernel's inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened, event_size, num_events = 0x20, 16, 0
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(descriptor, os.fsencode(path), opened) > 0

    def count() -> int:
        nonlocal num_events
        with suppress(BlockingIOError):
            num_events += len(os.read(descriptor, 1 << 16)) // event_size
        return num_events

    try:
        yield count
    finally:
        os.close(descriptor)


def states(sweep: SweepDir) -> list[str]:
    return [read_state(run).state.value for run in sweep.runs()]


def await_states(sweep: SweepDir, *expected: str) -> None:
    wait_until(lambda: states(sweep) == list(expected), 60)


def await_begun(place: SweepPerson, *numbers: int) -> None:
    wait_until(lambda: all((str(number), "begin") in place.times for number in numbers), 60)


def test_runs_go_one_after_the_other_in_their_order(place: SweepPerson) -> None:
    done = place.run("submit", "job.yaml", COUNT, "--sweep", "--wait")
    assert done.returncode == 0
    assert place.times == [(run, what) for run in "012" for what in ("begin", "end")]


def test_submit_comes_back_and_the_queue_outlives_the_terminal(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    queue = read_queue(sweep)
    assert queue is not None
    assert os.getsid(queue.process.pid) == queue.process.pid
    os.kill(queue.process.pid, signal.SIGHUP)
    place.let_go(0, 1, 2)
    await_states(sweep, *["COMPLETED"] * 3)


def test_each_run_is_an_ordinary_one_with_its_own_logs(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT)
    assert place.run("wait", sweep.name).returncode == 0
    assert place.run("logs", f"{sweep.name}.2").stdout == "run 2\n"


def test_the_throttle_says_how_many_run_at_a_time(place: SweepPerson) -> None:
    sweep = place.submit_sweep("env.I=0,1,2,3", "sweep.max_parallel=2", environ={"HOLDS": "all"})
    await_begun(place, 0, 1)
    assert states(sweep) == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    place.let_go(0)
    await_begun(place, 2)
    assert states(sweep)[3] == "PENDING"
    place.let_go(1, 2, 3)
    await_states(sweep, *["COMPLETED"] * 4)


def test_a_run_that_waits_says_so(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    row = place.status(sweep)["runs"][2]
    assert (row["state"], row["reason"]) == ("PENDING", f"waits in the queue of {sweep.name}")


def test_a_run_that_fails_stops_no_other_and_is_reported(place: SweepPerson) -> None:
    done = place.run("submit", "job.yaml", COUNT, "--sweep", "--wait", FAILS="1")
    assert done.returncode == 5
    assert states(place.sweeps()[0]) == ["COMPLETED", "FAILED", "COMPLETED"]
    assert "ValueError: the loss is nan" in done.stderr


def test_a_killed_queue_ends_no_run_and_those_that_waited_are_lost_and_can_be_resumed(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    kill_queue(sweep)
    status = place.status(sweep)
    assert (status["queue"]["state"], status["states"]) == ("GONE", {"RUNNING": 1, "LOST": 2})
    assert status["runs"][1]["reason"].endswith(f"(clusterddp resume {sweep.name} starts it again)")
    place.let_go(0)
    await_states(sweep, "COMPLETED", "LOST", "LOST")


def test_resume_goes_on_with_what_a_killed_queue_left_beside_what_still_runs(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    kill_queue(sweep)
    resumed = json.loads(place.run("resume", sweep.name, "-o", "json", HOLDS="all").stdout)
    assert resumed["runs"] == [f"{sweep.name}.1", f"{sweep.name}.2"]
    with opens_of(sweep.runs()[0].record) as count:
        wait_until(lambda: count() >= 10)  # the new queue looks at the run that goes on, again and again
    assert place.times == [("0", "begin")]
    place.let_go(0, 1, 2)
    await_states(sweep, *["COMPLETED"] * 3)
    assert place.times == [(run, what) for run in "012" for what in ("begin", "end")]


def test_after_a_power_cut_resume_goes_on_with_what_ran_and_what_waited(place: SweepPerson) -> None:
    sweep_dir = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    place.let_go(0)
    await_begun(place, 1)
    kill_queue(sweep_dir)
    end_processes(f"{read_run(sweep_dir.runs()[1]).token}.", timeout_s=5)
    assert states(sweep_dir) == ["COMPLETED", "LOST", "LOST"]
    place.let_go(1, 2)
    assert place.run("resume", sweep_dir.name, "--wait", HOLDS="all").returncode == 0
    assert [[attempt.number for attempt in run.attempts()] for run in sweep_dir.runs()] == [[0], [0, 1], [0]]


def test_a_queue_that_goes_on_is_not_doubled(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    done = place.run("resume", sweep.name)
    assert done.returncode == 2
    assert f"{sweep.name}: its queue still runs" in done.stderr


def test_a_sweep_that_is_done_has_nothing_to_resume(place: SweepPerson) -> None:
    place.run("submit", "job.yaml", COUNT, "--sweep", "--wait", FAILS="1")
    name = place.sweeps()[0].name
    done = place.run("resume", name)
    assert (done.returncode, f"clusterddp resume {name}.1" in done.stderr) == (2, True)
    assert "no run is left to start: 2 COMPLETED, 1 FAILED" in done.stderr


def test_cancel_ends_the_queue_and_all_runs(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    done = place.run("cancel", sweep.name)
    assert (done.returncode, done.stderr) == (0, f"{sweep.name}: ended: 3 CANCELLED\n")
    assert states(sweep) == ["CANCELLED"] * 3
    queue = read_queue(sweep)
    assert queue is not None
    assert (queue.state, queue.process.alive()) == ("ENDED", False)
    tokens = [f"{read_run(run).token}." for run in sweep.runs()]
    wait_until(lambda: not find_processes(*tokens))


def test_a_run_that_was_cancelled_in_the_queue_says_so(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    place.run("cancel", sweep.name)
    end = read_end(sweep.runs()[2].attempt(0))
    assert end is not None
    assert end.reason == "cancelled with its sweep before it was started"


def test_a_cancelled_sweep_is_resumed_whole(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    place.run("cancel", sweep.name)
    place.let_go(0, 1, 2)
    assert place.run("resume", sweep.name, "--wait", HOLDS="all").returncode == 0
    assert states(sweep) == ["COMPLETED"] * 3


def test_cancel_of_one_run_that_waits_leaves_the_others(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    done = place.run("cancel", f"{sweep.name}.1")
    assert done.stderr == f"{sweep.name}.1: cancelled before it was started\n"
    place.let_go(0, 2)
    await_states(sweep, "COMPLETED", "CANCELLED", "COMPLETED")
    assert ("1", "begin") not in place.times


def test_a_run_whose_queue_is_gone_is_resumed_by_itself(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    await_begun(place, 0)
    kill_queue(sweep)
    place.let_go(2)
    assert place.run("resume", f"{sweep.name}.2", "--wait", HOLDS="all").returncode == 0
    assert [attempt.number for attempt in sweep.runs()[2].attempts()] == [0]


def test_of_those_who_want_a_run_out_of_the_queue_one_gets_it(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    attempt = sweep.runs()[2].attempt(0)
    assert [claim(attempt), claim(attempt)] == [True, False]


def test_runs_never_share_a_gpu_and_use_all_there_are(place: SweepPerson, tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "bin")
    place.environ["PATH"] = gpus.path
    (tmp_path / "job.yaml").write_text(ON_ONE_GPU)
    sweep = place.submit_sweep("env.I=0,1,2", environ={"HOLDS": "all"})
    await_begun(place, 0, 1)
    wait_until(lambda: place.status(sweep)["queue"]["waits_for"], 60)
    assert {row["gpus"] for row in read_jsonl(tmp_path / "times.jsonl")} == {"0", "1"}
    assert states(sweep) == ["RUNNING", "RUNNING", "PENDING"]
    assert "0 of 2 on this machine are free" in place.status(sweep)["queue"]["waits_for"]
    place.let_go(1)
    await_begun(place, 2)
    assert [row["gpus"] for row in read_jsonl(tmp_path / "times.jsonl")][-1] == "1"
    place.let_go(0, 2)
    await_states(sweep, *["COMPLETED"] * 3)


def test_a_sweep_is_submitted_though_others_use_the_gpus(place: SweepPerson, tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "bin", count=1)
    place.environ["PATH"] = gpus.path
    (tmp_path / "job.yaml").write_text(ON_ONE_GPU)
    gpus.compute({0: os.getpid()})
    sweep = place.submit_sweep("env.I=0,1")
    wait_until(lambda: place.status(sweep)["queue"]["waits_for"], 60)
    assert states(sweep) == ["PENDING"] * 2
    gpus.compute({})
    await_states(sweep, *["COMPLETED"] * 2)


def test_cores_are_shared_among_the_runs_of_a_time(place: SweepPerson) -> None:
    plan = json.loads(place.run("submit", "job.yaml", COUNT, "sweep.throttle=64", "--sweep", "-n", "-o", "json").stdout)
    assert plan["plan"]["gang"]["threads_per_rank"] == 1


def test_the_dry_run_names_the_queue_and_writes_nothing(place: SweepPerson) -> None:
    done = place.run("submit", "job.yaml", COUNT, "--sweep", "-n")
    assert done.returncode == 0
    assert "3 runs, started in turn by a queue on this machine" in done.stdout
    assert not (place.path / "runs").exists()


def test_a_queue_that_cannot_start_any_run_gives_up_and_says_why(place: SweepPerson) -> None:
    """Their tasks do not start: a file is in the way."""
    sweep = place.submit_sweep("env.I=0,1,2,3,4", environ={"HOLDS": "all"})
    await_begun(place, 0)
    for run in sweep.runs()[1:]:
        (run.launcher_dir / "submitit").write_text("in the way")
    place.let_go(0)
    await_states(sweep, "COMPLETED", "FAILED", "FAILED", "FAILED", "LOST")
    assert "3 runs in a row could not be started" in place.status(sweep)["runs"][4]["reason"]
    for run in sweep.runs()[1:]:
        (run.launcher_dir / "submitit").unlink()
    place.let_go(1, 2, 3, 4)
    assert place.run("resume", sweep.name, "--wait", HOLDS="all").returncode == 0


def test_a_queue_that_does_not_start_leaves_no_sweep(place: SweepPerson) -> None:
    (place.path / "sitecustomize.py").write_text(
        "import sys\nif 'sweep_queue' in ' '.join(sys.orig_argv): sys.exit(9)\n"
    )
    done = place.run(
        "submit", "job.yaml", COUNT, "--sweep", PYTHONPATH=f"{place.path}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert (done.returncode, "its queue did not start" in done.stderr) == (1, True)
    assert place.sweeps() == []


def test_a_resume_whose_queue_does_not_start_loses_nothing(place: SweepPerson) -> None:
    sweep = place.submit_sweep(COUNT, environ={"HOLDS": "all"})
    place.run("cancel", sweep.name)
    (place.path / "sitecustomize.py").write_text(
        "import sys\nif 'sweep_queue' in ' '.join(sys.orig_argv): sys.exit(9)\n"
    )
    place.run("resume", sweep.name, PYTHONPATH=f"{place.path}:{os.environ.get('PYTHONPATH', '')}")
    assert states(sweep) == ["LOST"] * 3
    place.let_go(0, 1, 2)
    assert place.run("resume", sweep.name, "--wait", HOLDS="all").returncode == 0

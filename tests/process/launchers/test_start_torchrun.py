"""`start: torchrun` on this machine: the real agents start the ranks, and everything else is as without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click import unstyle

import clusterddp
from clusterddp.cli.text.plan import plan_lines
from clusterddp.look.log_file import read_log_tail
from clusterddp.run.cleanup import find_processes, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import read_end
from clusterddp.run.record import read_run
from clusterddp.system.files import read_jsonl
from clusterddp.system.processes import Process, read_command
from tests.support.launch_runs import STOPPABLE
from tests.support.waiting import PATIENCE, wait_until

SPEC = "name: job\ndevice: cpu\nstart: torchrun\nresources: {{nodes: {nodes}, procs_per_node: 2}}\n"
FALLING = """\
import os, pathlib, signal, time
if os.environ["CLUSTERDDP_ATTEMPT"] == "0" and os.environ["RANK"] == "3":
    os.kill(os.getpid(), signal.SIGKILL)
holder = os.getppid()
agent = int(pathlib.Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()[1])
started_by = pathlib.Path(f"/proc/{agent}/cmdline").read_text().split("\\0")
names = "RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
print(*(os.environ[name] for name in names.split()), "torch.distributed.run" in started_by, flush=True)
time.sleep(0 if os.environ["CLUSTERDDP_ATTEMPT"] == "1" else 600)
"""
TRAIN = """
restarts: 1
train:
  {dataset: shapes, samples: 256, model: fastnet, width: 0.125, precision: fp32, epochs: 16, batch_size: 16,
   eval_every: 16, log_every: 4}
"""


@pytest.fixture(autouse=True)
def _in_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)


def submit(code: str, *, nodes: int = 1, more: str = "") -> clusterddp.Run:
    Path("entry.py").write_text(code)
    return clusterddp.submit(SPEC.format(nodes=nodes) + f"entry: {{script: entry.py}}\n{more}\n")


def processes(run: clusterddp.Run, role: str = "") -> list[Process]:
    found = find_processes(f"{read_run(RunDir(run.path)).token}.")
    return [process for process in found if read_cookie(process).rpartition(".")[2].startswith(role)]


def agents(run: clusterddp.Run) -> list[Process]:
    return [each for each in processes(run, "a") if "torch.distributed.run" in read_command(each.pid)]


def await_ranks(run: clusterddp.Run, count: int) -> None:
    logs = RunDir(run.path).attempt(0).logs
    wait_until(lambda: sum(path.stat().st_size > 0 for path in logs.glob("*.out")) == count, 60)


def await_nothing_left(run: clusterddp.Run) -> None:
    wait_until(lambda: not processes(run), 15)


def ended(run: clusterddp.Run, attempt: int = 0) -> Any:
    return read_end(RunDir(run.path).attempt(attempt))


def test_a_killed_rank_is_named_and_torchrun_starts_the_ranks_of_all_nodes_again() -> None:
    run = submit(FALLING, nodes=2, more="restarts: 1")
    assert run.wait(PATIENCE * 60) == "COMPLETED", (run.status(), run.logs())
    first, status = ended(run), run.status()
    assert (first.root_cause.rank, first.root_cause.exit_code, first.will_restart) == (3, 137, True)
    assert (status["attempt"], status["world_size"]) == (1, 4)
    assert [(rank["rank"], rank["node_rank"], rank["state"], "owns" in rank) for rank in status["ranks"]] == [
        (rank, rank // 2, "COMPLETED", False) for rank in range(4)
    ]
    assert [run.logs(rank).split() for rank in range(4)] == [
        [str(rank), str(rank % 2), str(rank // 2), "4", "2", "1", "True"] for rank in range(4)
    ]
    await_nothing_left(run)


def test_an_exception_is_the_root_cause_when_no_restart_is_left() -> None:
    run = submit(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('the loss is nan')\ntime.sleep(600)\n"
    )
    assert run.wait(PATIENCE * 60) == "FAILED"
    cause = run.status()["root_cause"]
    assert (cause["rank"], cause["log"]) == (1, "attempts/0/logs/rank-001.err")
    assert cause["error"].endswith(": ValueError: the loss is nan")
    await_nothing_left(run)


def test_cancel_save_reaches_the_ranks_under_torchrun() -> None:
    run = submit(STOPPABLE)
    await_ranks(run, 2)
    (agent,) = agents(run)
    agent.send_signal(signal.SIGTERM)  # as Slurm sends it to every process: it is not torchrun's to hear
    run.cancel(save=True)
    assert run.wait(PATIENCE * 60) == "CANCELLED"
    assert [run.logs(rank).splitlines()[-1] for rank in range(2)] == ["stopped", "stopped"]
    assert ended(run).outcome == "STOPPED"
    await_nothing_left(run)


@pytest.mark.parametrize("whose", ["agent", "supervisor"])
def test_nothing_is_left_when_what_starts_the_ranks_is_killed(whose: str) -> None:
    run = submit(STOPPABLE, more="restarts: 1")
    await_ranks(run, 2)
    (victim,) = agents(run) if whose == "agent" else processes(run, "s")
    os.kill(victim.pid, signal.SIGKILL)
    assert run.wait(PATIENCE * 60) == "FAILED"
    error = ended(run).root_cause.error
    assert f"(pid {victim.pid})" in error
    assert error.endswith("was killed by SIGKILL; its ranks 0-1 ended with it" if whose == "agent" else "with it")
    await_nothing_left(run)


def test_torchrun_that_cannot_start_says_why() -> None:
    Path("torch").mkdir()
    Path("torch/__init__.py").write_text("raise ImportError('this torch is broken')\n")
    run = submit("", more=f"env: {{PYTHONPATH: {Path.cwd()}}}")
    assert run.wait(PATIENCE * 60) == "FAILED"
    assert "its last line: ImportError: this torch is broken" in run.status()["root_cause"]["error"]


@pytest.mark.slow
def test_the_trainer_comes_to_the_same_parameters_though_torchrun_had_to_start_it_again() -> None:
    plain = clusterddp.submit(SPEC.format(nodes=1).replace("start: torchrun\n", "") + TRAIN)
    assert plain.wait(PATIENCE * 120) == "COMPLETED", plain.logs()
    run = clusterddp.submit(SPEC.format(nodes=1) + TRAIN)
    directory = RunDir(run.path)
    wait_until(lambda: list(directory.checkpoints.glob("*.json")), 120)
    os.kill(run.status()["ranks"][1]["pid"], signal.SIGKILL)
    assert run.wait(PATIENCE * 120) == "COMPLETED", run.logs()
    sums = [json.loads((each.path / "summary.json").read_text())["params_sha256"] for each in (plain, run)]
    assert sums[0] == sums[1]
    rows = [(row["attempt"], row["step"]) for row in read_jsonl(directory.metrics) if row["kind"] == "train"]
    assert rows == sorted(rows)
    assert {attempt for attempt, _ in rows} == {0, 1}
    assert (ended(run).root_cause.rank, ended(run).will_restart) == (1, True)
    assert read_log_tail(directory.launcher_dir / "torchrun-0.log")


def test_the_plan_shows_torchrun_on_each_node() -> None:
    plan = clusterddp.plan(SPEC.format(nodes=2) + "restarts: 2\n")
    agents = [command for command in plan.commands if "torch.distributed.run" in command]
    shown = [
        [word for word in command if word.startswith(("--nnodes", "--node-r", "--nproc", "--max"))]
        for command in agents
    ]
    assert shown == [
        ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--max-restarts=2"] for node in range(2)
    ]
    assert "torchrun on each node, which starts the node's ranks" in unstyle("\n".join(plan_lines(plan, verbose=False)))

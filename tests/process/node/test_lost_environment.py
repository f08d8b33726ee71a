"""Children of ranks that have lost the run's variable: no kill leaves them, and gc finds them where nobody is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.record import RunRecord, write_run
from tests.support.gang_runs import GangRun, running
from tests.support.lost_children import KINDS, LostChildren
from tests.support.waiting import wait_until


@contextlib.contextmanager
def losing(tmp_path: Path, program: str = "", **options: object) -> Iterator[tuple[GangRun, LostChildren]]:
    """Run a gang whose ranks have such children until it is ended."""
    children = LostChildren()
    with running(tmp_path, children.program + program + "\nforever()", **options) as gang:
        record = RunRecord(run="brisk-otter-3", token=gang.gang.token, name="job", launcher="local", created_ns=1)
        write_run(gang.run, record)
        try:
            gang.await_up()
            wait_until(lambda: len(children.alive()) == gang.gang.world_size * KINDS, what=children.alive)
            yield gang, children
        finally:
            children.end()


def await_none_left(gang: GangRun, children: LostChildren) -> None:
    wait_until(lambda: not gang.left() and not children.alive(), 8.0, what=lambda: f"{gang.left()}, {children.alive()}")


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_all_that_clean_up(gang: GangRun) -> None:
    """Kill the task, the supervisors and the guards of a gang, so that none of them can see to the others' end."""
    guards = [pid for node in gang.gang.nodes for pid in gang.pids(f"g{node.node_rank}")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (gang.task.pid, *gang.supervisors, *guards):
            os.kill(pid, number)
    wait_until(lambda: not gang.left(), what=gang.left)


def clusterddp(*arguments: str | Path, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clusterddp", *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, cwd=cwd
    )


def test_a_killed_rank_leaves_no_child_that_lost_its_environment(tmp_path):
    with losing(tmp_path) as (gang, children):
        kill(gang.ranks()[1].pid)
        gang.await_end()
        await_none_left(gang, children)


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_supervisor_leaves_no_child_that_lost_its_environment(tmp_path, node):
    with losing(tmp_path) as (gang, children):
        kill(gang.supervisors[node])
        await_none_left(gang, children)


def test_a_supervisor_and_its_guard_killed_together_leave_no_child_that_lost_its_environment(tmp_path):
    with losing(tmp_path) as (gang, children):
        kill(*gang.pids("g1"), gang.supervisors[1])
        await_none_left(gang, children)


def test_gc_lists_and_ends_children_that_lost_their_environment(tmp_path):
    with losing(tmp_path, nodes=1) as (gang, children):
        kill_all_that_clean_up(gang)
        left = children.alive()
        assert len(left) == 2 * KINDS
        (here,) = json.loads(clusterddp("ps", gang.run.path, "-o", "json").stdout)["hosts"]
        (found,) = here["runs"]
        assert (found["run"], found["left_over"]) == ("brisk-otter-3", True)
        assert {(process["pid"], process["role"]) for process in found["processes"]} == {(pid, "n0") for pid in left}
        done = clusterddp("gc", gang.run.path, "--yes")
        assert (done.returncode, children.alive()) == (0, [])
        assert done.stdout.splitlines()[-1].startswith(f"{len(left)} processes of brisk-otter-3 ended on ")


def test_ps_lists_children_that_lost_their_environment_of_a_run_that_has_no_record_here(tmp_path):
    with losing(tmp_path, nodes=1) as (gang, children):
        kill_all_that_clean_up(gang)
        (here,) = json.loads(clusterddp("ps", "--runs", tmp_path / "elsewhere", "-o", "json").stdout)["hosts"]
        (found,) = [run for run in here["runs"] if {each["pid"] for each in run["processes"]} == set(children.alive())]
        assert (found["run"], found["left_over"]) == (None, True)


def test_a_live_run_keeps_the_children_that_lost_their_environment(tmp_path):
    with losing(tmp_path, nodes=1) as (gang, children):
        done = clusterddp("gc", gang.run.path, "--yes")
        assert (done.stderr, len(children.alive())) == ("no orphaned processes\n", 2 * KINDS)


def test_children_that_lost_their_environment_survive_the_end_of_another_run(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    with losing(tmp_path / "mine") as (gang, children), losing(tmp_path / "other") as (_, others):
        kill(*gang.supervisors)
        await_none_left(gang, children)
        assert len(others.alive()) == 4 * KINDS


def test_the_end_of_one_node_leaves_the_children_of_the_others(tmp_path):
    with losing(tmp_path) as (gang, children):
        kill_all_that_clean_up(gang)
        for node in ("n1", "n0"):
            before = len(children.alive())
            assert end_processes(f"{gang.gang.token}.{node}", timeout_s=5) == []
            assert before - len(children.alive()) == 2 * KINDS


def test_what_a_rank_submits_is_a_run_of_its_own_that_the_end_of_the_outer_one_spares(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "entry.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    (inner / "job.yaml").write_text(f"name: inner\nentry: {{script: entry.py}}\nenv: {{PLACE: {inner}}}\n")
    submit = [sys.executable, "-m", "clusterddp", "submit", "job.yaml", "env.I=0,1", "--sweep"]
    program = f"if rank == 0: subprocess.run({submit!r}, cwd={str(inner)!r}, check=True)\n"
    with losing(tmp_path, program, nodes=1) as (gang, children):
        (record,) = (inner / "runs").glob("*/sweep.json")
        try:
            kill(*gang.supervisors)
            await_none_left(gang, children)
            assert find_processes(f"{gang.gang.token}.") == []
            (inner / "go").touch()
            assert clusterddp("wait", record.parent.name, cwd=inner).returncode == 0
        finally:
            clusterddp("cancel", record.parent.name, cwd=inner)

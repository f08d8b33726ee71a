"""The first node is lost, and another one's head takes its place; hosts that lose each other never have two runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_gang
from clusterddp.system.files import read_jsonl
from tests.process.node.test_node_elastic import make_elastic
from tests.support.gang_runs import GangRun, started
from tests.support.waiting import wait_until

QUICK = {"host_silence_s": 4.0, "heartbeat_timeout_s": 4.0}


@pytest.fixture
def places(tmp_path: Path) -> dict[int, RunDir]:
    """The directory of the run on each node, as on hosts without shared storage."""
    paths = {node: tmp_path / f"host{node}" / "run" for node in (1, 2)}
    for path in paths.values():
        path.mkdir(parents=True)
    return {0: RunDir(tmp_path / "run")} | {node: RunDir(path) for node, path in paths.items()}


def start(tmp_path: Path, places: dict[int, RunDir], **options: float) -> GangRun:
    gang = make_elastic(tmp_path, nodes=2, spares=1, min_nodes=1, **(QUICK | options))
    for node in (1, 2):
        shutil.copy(places[0].plan, places[node].plan)
    return started(tmp_path, gang, run_dirs={node: places[node].path for node in (1, 2)}, over_ssh=True)


def logs(places: dict[int, RunDir]) -> Callable[[], str]:
    def read() -> str:
        files = [file for place in places.values() for file in place.launcher_dir.glob("supervisor-*.log")]
        return "\n".join(f"{file}\n{file.read_text()}" for file in files)

    return read


def await_start(places: dict[int, RunDir], node: int, attempt: int) -> None:
    wait_until(places[node].attempt(attempt).start.exists, 30, what=logs(places))


def begun(places: dict[int, RunDir]) -> dict[int, list[int]]:
    """Return which attempts each node's head has started."""
    return {
        node: [attempt.number for attempt in place.attempts() if attempt.start.exists()]
        for node, place in places.items()
    }


def test_the_others_go_on_without_the_first_node_which_follows_when_it_is_back(
    tmp_path: Path, places: dict[int, RunDir]
) -> None:
    with start(tmp_path, places) as gang:
        await_start(places, 0, 0)
        os.kill(gang.supervisors[0], signal.SIGSTOP)
        await_start(places, 1, 1)
        members = [node.node_rank for node in read_gang(places[1], places[1].attempt(1)).nodes]
        assert members == [1, 2]
        end = read_end(places[1].attempt(0))
        assert end is not None
        assert (end.outcome, end.will_restart) == ("FAILED", True)
        assert "node 0 on host0 is lost" in end.reason
        changes = [row["text"] for row in read_jsonl(places[1].events) if row["event"] == "nodes_changed"]
        assert changes == [
            "node 0 on host0 was lost (no heartbeat for 4 s); node 2 on host2, a spare, took its place; "
            "no host that is left has a checkpoint: it begins anew",
        ]
        os.kill(gang.supervisors[0], signal.SIGCONT)
        wait_until(lambda: "node 1's supervisor is at" in logs({0: places[0]})(), 30, what=logs(places))
        assert begun(places) == {0: [0], 1: [1], 2: []}
        for node in (1, 2):
            (places[node].path / "go-1").touch()
        assert gang.await_end(timeout_s=30) == [0, 0, 0]
        last = read_end(places[1].attempt(1))
        assert last is not None
        assert last.outcome == "COMPLETED"
        assert begun(places) == {0: [0], 1: [1], 2: []}


def test_the_last_of_three_nodes_does_not_go_on_alone(tmp_path: Path, places: dict[int, RunDir]) -> None:
    with start(tmp_path, places, start_timeout_s=8.0) as gang:
        await_start(places, 0, 0)
        for node in (0, 1):
            os.kill(gang.supervisors[node], signal.SIGSTOP)
        wait_until(places[2].attempt(1).end.exists, 40, what=logs(places))
        end = read_end(places[2].attempt(1))
        assert end is not None
        assert end.reason == (
            "node 0 on host0 and node 1 on host1 did not come back within 8 s; 1 node is there, and min_nodes is 1; "
            "of 3 nodes only more than half go on without the others"
        )
        assert not end.will_restart
        assert begun(places) == {0: [0], 1: [], 2: []}


def test_the_first_node_ends_its_ranks_where_it_reaches_less_than_half(
    tmp_path: Path, places: dict[int, RunDir]
) -> None:
    with start(tmp_path, places, start_timeout_s=60.0) as gang:
        await_start(places, 0, 0)
        for node in (1, 2):
            os.kill(gang.supervisors[node], signal.SIGSTOP)
        wait_until(places[0].attempt(0).end.exists, 40, what=logs(places))
        end = read_end(places[0].attempt(0))
        assert end is not None
        assert (end.outcome, end.will_restart) == ("FAILED", True)
        for node in (1, 2):
            os.kill(gang.supervisors[node], signal.SIGCONT)
        wait_until(lambda: sum(map(len, begun(places).values())) > 1, 40, what=logs(places))
        numbers = sorted(number for of_node in begun(places).values() for number in of_node)
        assert numbers == list(range(len(numbers)))
        for place in places.values():
            (place.path / "CANCEL").write_text("{}")
        gang.await_end(timeout_s=30)


def test_a_node_whose_supervisor_was_killed_gets_another_one_and_is_taken_in_again(
    tmp_path: Path, places: dict[int, RunDir]
) -> None:
    """Twice the node beside the first loses its supervisor, and neither loss leaves the run smaller."""
    with start(tmp_path, places) as gang:
        members, kills = [0, 1], [0, 0, 0]
        for attempt in range(2):
            killed = members[1]
            kills[killed] += 1
            await_start(places, 0, attempt)
            newest = wait_until(lambda node=killed: supervisor_of(gang, node), 20, what=logs(places))
            os.kill(newest, signal.SIGKILL)
            await_start(places, 0, attempt + 1)
            members = [node.node_rank for node in read_gang(places[0], places[0].attempt(attempt + 1)).nodes]
            assert members in ([0, 1], [0, 2])  # the other node, unless the killed one is back before it is taken
            wait_until(lambda node=killed, old=newest: supervisor_of(gang, node) not in (0, old), 20, what=logs(places))
            joined = f"node {killed} on host{killed} has joined"
            times = 1 + kills[killed]
            wait_until(lambda text=joined, n=times: logs({0: places[0]})().count(text) == n, 20, what=logs(places))
        for node in members:
            (places[node].path / "go-2").touch()
        wait_until(places[0].attempt(2).end.exists, 30, what=logs(places))
        last = read_end(places[0].attempt(2))
        assert last is not None
        assert last.outcome == "COMPLETED"
        wait_until(lambda: not find_processes(f"{gang.gang.token}."), 20, what=logs(places))


def test_a_node_whose_supervisor_was_killed_gets_none_once_the_run_is_cancelled(
    tmp_path: Path, places: dict[int, RunDir]
) -> None:
    with start(tmp_path, places) as gang:
        await_start(places, 0, 0)
        (places[1].path / "CANCEL").write_text("{}")
        os.kill(gang.supervisors[1], signal.SIGKILL)
        await_start(places, 0, 1)
        assert supervisor_of(gang, 1) == 0


def supervisor_of(gang: GangRun, node: int) -> int:
    """Return the pid of the supervisor that a node has now; 0: none."""
    return next((process.pid for process in find_processes(f"{gang.gang.token}.s{node}")), 0)

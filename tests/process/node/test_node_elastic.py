"""Nodes are lost, replaced and taken in again: each attempt has the nodes that are there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.node.copies import Transfer, receive, send
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import read_gang
from clusterddp.run.seal import sealed
from clusterddp.system.files import read_jsonl
from clusterddp.train.checkpoint import Store, commit
from tests.support.gang_runs import GangRun, make_gang, started
from tests.support.waiting import wait_until

PROGRAM = """
names = ("RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
(run_dir / f"seen-{attempt}-{rank}").write_text(" ".join(os.environ[name] for name in names))
(run_dir / "attempts" / str(attempt) / "ASKED").touch()
up()
while not (run_dir / f"go-{attempt}").exists() and not stop_file.exists():
    time.sleep(0.02)
"""
QUICK = {"host_silence_s": 1.5, "heartbeat_timeout_s": 1.5}


def make_elastic(
    tmp_path: Path, *, nodes: int, spares: int = 0, min_nodes: int, restarts: int = 3, **options: Any
) -> Gang:
    """Make a gang of nodes with two ranks each, and spares that stand in for them."""
    gang = make_gang(tmp_path, PROGRAM, nodes=nodes + spares, min_nodes=min_nodes, restarts=restarts, **options)
    places = [node if node.node_rank < nodes else dataclasses.replace(node, ranks=(), spare=2) for node in gang.nodes]
    gang = dataclasses.replace(gang, nodes=tuple(places))
    (tmp_path / "run" / "plan.json").write_text(json.dumps(sealed({"gang": gang.to_json()})))
    return gang


def await_up(gang: GangRun, attempt: int, ranks: int) -> None:
    wait_until(lambda: len(list(gang.run.path.glob(f"up-{attempt}-*"))) == ranks, 20, what=gang.logs)
    wait_until(gang.attempt(attempt).start.exists, 10, what=gang.logs)


def seen(gang: GangRun, attempt: int) -> list[str]:
    return [path.read_text() for path in sorted(gang.run.path.glob(f"seen-{attempt}-*"))]


def reasons(gang: GangRun) -> dict[int, str]:
    """Return why each attempt had other nodes than the one before."""
    return {row["attempt"]: row["text"] for row in read_jsonl(gang.run.events) if row["event"] == "nodes_changed"}


def finish(gang: GangRun, attempt: int) -> None:
    (gang.run.path / f"go-{attempt}").touch()
    wait_until(gang.attempt(attempt).end.exists, 20, what=gang.logs)


def test_a_spare_takes_the_place_of_a_node_whose_supervisor_was_killed(tmp_path):
    with started(tmp_path, make_elastic(tmp_path, nodes=2, spares=1, min_nodes=2)) as gang:
        await_up(gang, 0, 4)
        assert seen(gang, 0) == ["0 4 0 2 0", "1 4 0 2 0", "2 4 1 2 0", "3 4 1 2 0"]
        os.kill(gang.supervisors[1], signal.SIGKILL)
        await_up(gang, 1, 4)
        assert seen(gang, 1) == ["0 4 0 2 1", "1 4 0 2 1", "2 4 1 2 1", "3 4 1 2 1"]
        assert [(each.rank, each.node_rank, each.host) for each in gang.ranks(1)] == [
            (0, 0, "host0"),
            (1, 0, "host0"),
            (2, 2, "host2"),
            (3, 2, "host2"),
        ]
        was = "its process has ended"
        assert reasons(gang) == {1: f"node 1 on host1 was lost ({was}); node 2 on host2, a spare, took its place"}
        assert gang.end(0).will_restart
        finish(gang, 1)
        assert gang.end(1).outcome == "COMPLETED"
        assert [node.node_rank for node in read_gang(gang.run, gang.attempt(1)).nodes] == [0, 2]
        assert [each.exit_code for each in gang.ranks(0)] == [137] * 4 or gang.ranks(0)[2].exit_code is not None


def test_a_run_goes_on_with_fewer_nodes_down_to_the_least_and_no_further(tmp_path):
    gang = make_elastic(tmp_path, nodes=3, min_nodes=2, start_timeout_s=4.0)
    with started(tmp_path, gang) as gang:
        await_up(gang, 0, 6)
        os.kill(gang.supervisors[1], signal.SIGKILL)
        await_up(gang, 1, 4)
        assert seen(gang, 1) == ["0 4 0 2 1", "1 4 0 2 1", "2 4 1 2 1", "3 4 1 2 1"]
        assert reasons(gang)[1].endswith("; the run goes on with 2 of 3 nodes")
        os.kill(gang.supervisors[2], signal.SIGKILL)
        gang.await_end(timeout_s=20, after_kill=True)
        error = "node 1 on host1 and node 2 on host2 did not come back within 4 s; 1 node is there, and min_nodes is 2"
        assert (gang.end(2).outcome, gang.end(2).root_cause.error) == ("FAILED", error)
        assert not gang.end(2).will_restart


def test_the_loss_of_a_spare_changes_nothing(tmp_path):
    with started(tmp_path, make_elastic(tmp_path, nodes=2, spares=1, min_nodes=2)) as gang:
        await_up(gang, 0, 4)
        os.kill(gang.supervisors[2], signal.SIGKILL)
        wait_until(lambda: not gang.pids("s2") and not gang.pids("g2"))
        finish(gang, 0)
        assert (gang.end(0).outcome, gang.end(0).will_restart) == ("COMPLETED", False)


def test_a_node_that_comes_back_is_taken_in_at_a_checkpoint_and_that_counts_as_no_restart(tmp_path):
    gang = make_elastic(tmp_path, nodes=2, min_nodes=1, restarts=1, **QUICK)
    with started(tmp_path, gang) as gang:
        await_up(gang, 0, 4)
        os.kill(gang.supervisors[1], signal.SIGSTOP)
        await_up(gang, 1, 2)
        assert seen(gang, 1) == ["0 2 0 1 1", "1 2 0 1 1"]
        os.kill(gang.supervisors[1], signal.SIGCONT)
        await_up(gang, 2, 4)
        assert seen(gang, 2) == ["0 4 0 2 1", "1 4 0 2 1", "2 4 1 2 1", "3 4 1 2 1"]
        stopped = "node 1 on host1 can take part again; the run goes on with 2 of 2 nodes"
        assert (gang.end(1).outcome, gang.end(1).reason, reasons(gang)[2]) == ("STOPPED", stopped, stopped)
        assert [row["outcome"] for row in read_jsonl(gang.run.events) if row["event"] == "attempt_ended"] == [
            "FAILED",
            "STOPPED",
        ]
        finish(gang, 2)
        assert gang.end(2).outcome == "COMPLETED"
        wait_until(lambda: not gang.left(), 10, what=gang.left)


def test_a_lost_node_uses_up_a_restart(tmp_path):
    with started(tmp_path, make_elastic(tmp_path, nodes=2, spares=2, min_nodes=2, restarts=1)) as gang:
        await_up(gang, 0, 4)
        os.kill(gang.supervisors[1], signal.SIGKILL)
        await_up(gang, 1, 4)
        os.kill(gang.supervisors[2], signal.SIGKILL)
        gang.await_end(timeout_s=20, after_kill=True)
        assert (gang.end(1).outcome, gang.end(1).will_restart) == ("FAILED", False)
        assert gang.end(1).root_cause.host == "host2"


def test_a_rank_that_fails_is_started_again_on_the_same_nodes(tmp_path):
    with started(tmp_path, make_elastic(tmp_path, nodes=2, spares=1, min_nodes=2)) as gang:
        await_up(gang, 0, 4)
        os.kill(gang.ranks(0)[3].pid, signal.SIGKILL)
        await_up(gang, 1, 4)
        assert [each.node_rank for each in gang.ranks(1)] == [0, 0, 1, 1]
        assert reasons(gang) == {}
        finish(gang, 1)


def test_a_stop_that_a_user_asks_for_while_a_node_is_taken_in_ends_the_run(tmp_path):
    program_waits = make_elastic(tmp_path, nodes=2, min_nodes=1, **QUICK)
    script = Path(program_waits.entry.target)
    script.write_text(script.read_text() + "while not (run_dir / 'leave').exists(): time.sleep(0.02)\n")
    with started(tmp_path, program_waits) as gang:
        await_up(gang, 0, 4)
        os.kill(gang.supervisors[1], signal.SIGSTOP)
        await_up(gang, 1, 2)
        os.kill(gang.supervisors[1], signal.SIGCONT)
        wait_until(gang.attempt(1).stop_file.exists, 20, what=gang.logs)
        os.kill(gang.supervisors[0], signal.SIGUSR2)
        wait_until(lambda: "SIGUSR2" in gang.logs(), 10)
        (gang.run.path / "leave").touch()
        gang.await_end(timeout_s=20)
        assert (gang.end(1).outcome, gang.end(1).will_restart) == ("STOPPED", False)
        assert "SIGUSR2" in gang.end(1).reason


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        ((0, 1, 2, 3), (0, 1)),
        ((0, 2, 3), (0, 2)),
        ((0, 3, 1), (0, 3)),
        ((2, 1, 3), (2, 1)),
        ((0,), None),
        ((), None),
    ],
)
def test_the_first_nodes_that_are_there_are_chosen(tmp_path, present, chosen):
    gang = make_elastic(tmp_path, nodes=2, spares=2, min_nodes=2)
    assert gang.choose_nodes(present) == chosen


SAVES = """
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, commit
have = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*.json"))
(run_dir / f"have-{attempt}-{rank}").write_text(" ".join(have))
if rank == 0:
    for step in (10, 20, 30):
        commit(Store(run=RunDir(run_dir), attempt=attempt, keep=2), os.urandom(300_000), step=step)
        while not (run_dir / f"go-{step}").exists():
            time.sleep(0.02)
until_stop()
"""


@pytest.fixture
def apart(tmp_path: Path) -> dict[int, Path]:
    """Give each node but the first a directory of its own for the run, as on hosts without shared storage."""
    places = {node: tmp_path / f"host{node}" / "run" for node in (1, 2)}
    for place in places.values():
        place.mkdir(parents=True)
    return places


def start_apart(
    tmp_path: Path, apart: dict[int, Path], *, attempt: int = 0
) -> contextlib.AbstractContextManager[GangRun]:
    """Start three nodes with a rank each, whose program writes checkpoints."""
    gang = make_gang(tmp_path, SAVES, nodes=3, ranks_per_node=1)
    for place in apart.values():
        shutil.copy(tmp_path / "run" / "plan.json", place)
    return started(tmp_path, gang, run_dirs=apart, attempt=attempt)


def files(run_dir: Path) -> dict[str, bytes]:
    """Return the files of checkpoints."""
    return {path.name: path.read_bytes() for path in sorted((run_dir / "checkpoints").glob("*"))}


def has_copy(run_dir: Path, name: str) -> bool:
    return (run_dir / "checkpoints" / f"{name}.json").exists()


def test_the_newest_checkpoint_is_copied_to_one_other_node_which_keeps_two(tmp_path, apart):
    with start_apart(tmp_path, apart) as gang:
        here = gang.run.path
        for step in (10, 20, 30):
            name = f"step-{step:08d}-a0"
            wait_until(lambda: has_copy(apart[1], name), 20, what=gang.logs)  # noqa: B023
            copy = {file: data for file, data in files(here).items() if file.startswith(name)}
            assert copy.items() <= files(apart[1]).items()
            (here / f"go-{step}").touch()
        kept = [f"step-000000{step}-a0.{kind}" for step in (20, 30) for kind in ("json", "pt")]
        wait_until(lambda: sorted(files(apart[1])) == kept, 10)
        assert not files(apart[2])
        os.kill(gang.supervisors[0], signal.SIGUSR2)
        gang.await_end()


def test_a_newer_checkpoint_of_another_node_is_there_before_the_ranks_start(tmp_path, apart):
    apart[2].joinpath("checkpoints").mkdir()
    here = tmp_path / "run"
    (here / "checkpoints").mkdir(parents=True)
    for place, step in ((here, 5), (apart[2], 7)):
        commit(Store(run=RunDir(place), attempt=0, keep=2), os.urandom(300_000), step=step)
    with start_apart(tmp_path, apart, attempt=1) as gang:
        wait_until((here / "have-1-0").exists, 20, what=gang.logs)
        assert (here / "have-1-0").read_text() == "step-00000005-a0.json step-00000007-a0.json"
        assert (here / "checkpoints/step-00000007-a0.pt").read_bytes() == (
            apart[2] / "checkpoints/step-00000007-a0.pt"
        ).read_bytes()


def test_a_damaged_checkpoint_of_another_node_does_not_count_and_keeps_nobody_waiting(tmp_path, apart):
    apart[1].joinpath("checkpoints").mkdir()
    commit(Store(run=RunDir(apart[1]), attempt=0, keep=2), os.urandom(300_000), step=7)
    (apart[1] / "checkpoints/step-00000007-a0.pt").write_bytes(bytes(300_000))
    with start_apart(tmp_path, apart, attempt=1) as gang:
        wait_until((gang.run.path / "have-1-0").exists, 20, what=gang.logs)
        assert (gang.run.path / "have-1-0").read_text() == ""
        said = [row["text"] for row in read_jsonl(gang.run.events) if row["event"] == "checkpoint_not_copied"]
        what = "step-00000007-a0.pt has come damaged: its sha256 is not the manifest's"
        assert said == [f"step-00000007-a0: {what}, from host1 to host0"]


def test_on_storage_that_all_nodes_share_nothing_is_sent(tmp_path):
    with started(tmp_path, make_gang(tmp_path, SAVES, nodes=3, ranks_per_node=1)) as gang:
        for step in (10, 20, 30):
            wait_until(lambda: has_copy(gang.run.path, f"step-{step:08d}-a0"), 20)  # noqa: B023
            (gang.run.path / f"go-{step}").touch()
        time.sleep(5)
        assert not [row for row in read_jsonl(gang.run.events) if row["event"].startswith("checkpoint_")]
        assert len(files(gang.run.path)) == 4


def test_who_does_not_know_the_token_gets_no_checkpoint(tmp_path):
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    commit(Store(run=run, attempt=0, keep=2), b"x" * 1000, step=7)
    other = tmp_path / "other"
    (other / "run").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        what = Transfer(run_dir=run.path, name="step-00000007-a0", key="a" * 32, listener=listener.fileno())
        sender = threading.Thread(target=send, args=(what, listener))
        sender.start()
        port = listener.getsockname()[1]
        theirs = dataclasses.replace(what, run_dir=other / "run", listener=None, host="127.0.0.1", port=port)
        with pytest.raises(ClusterddpError, match="does not know the same token"):
            receive(dataclasses.replace(theirs, key="b" * 32))
        assert receive(theirs) == 1000  # the sender has waited for the right one
        sender.join()
    assert files(other / "run") == files(run.path)

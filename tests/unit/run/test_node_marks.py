"""Bad nodes are remembered by the records of runs, and nothing else is held against them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from clusterddp.run.attempts import AttemptEnd, cancelled, failed_by, loss_of_nodes, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.node_marks import Mark, clear, learn, read_marks, remember, suspects
from clusterddp.run.record import RankEnd, log_event
from clusterddp.system.files import write_json
from tests.support.handmade_runs import make_gang
from tests.support.handmade_slurm_runs import make_slurm_run

NOW = 1_000_000.0
GANG = dataclasses.replace(
    make_gang(nodes=2, per_node=1),
    nodes=tuple(dataclasses.replace(node, host=f"node{node.node_rank}") for node in make_gang(2, 1).nodes),
)


@pytest.fixture(autouse=True)
def own_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def found(end: AttemptEnd | None, events: list[dict] = (), start: dict | None = None) -> list[tuple[str, float]]:
    end = end and dataclasses.replace(end, ended=NOW)
    return [(each.node, each.lasts_s / 3600) for each in suspects(end, start, events, now=NOW)]


def end_of(**facts: object) -> AttemptEnd:
    return failed_by(RankEnd(rank=1, host="node1", **facts))


def test_a_lost_node_is_left_out_for_a_day() -> None:
    cause = loss_of_nodes(GANG, GANG.nodes[1:], "node 1 on node1 is lost: its host is silent", attempt=None)
    assert found(failed_by(cause)) == [("node1", 24)]


def test_the_loss_of_what_carries_the_run_is_no_node_s_fault() -> None:
    cause = loss_of_nodes(GANG, GANG.nodes, "the task that carries the run was killed", attempt=None, whose="")
    assert found(failed_by(cause)) == []


@pytest.mark.parametrize(
    ("end", "hours"),
    [
        (end_of(error="rank 1 on node1: RuntimeError: CUDA error: uncorrectable ECC error encountered"), 24),
        (end_of(error="rank 1 on node1: RuntimeError: x", traceback="CUDA error: the GPU is lost\nGPU is lost"), 24),
        (end_of(error="rank 1 on node1 was killed by SIGKILL", signal="SIGKILL"), 2),
        (end_of(error="rank 1 on node1 was killed by SIGKILL (the kernel: lack of memory)", signal="SIGKILL"), None),
        (end_of(error="rank 1 on node1 was killed by SIGSEGV", signal="SIGSEGV"), None),
        (end_of(error="rank 1 on node1: ValueError: the loss is nan"), None),
        (end_of(error="rank 1 on node1: OutOfMemoryError: CUDA out of memory"), None),
        (cancelled("the job was cancelled (scancel)"), None),
        (AttemptEnd(outcome="STOPPED", reason="the time limit approaches"), None),
        (None, None),
    ],
)
def test_an_end_speaks_against_a_node_only_where_the_program_has_no_cause(
    end: AttemptEnd | None, hours: float | None
) -> None:
    assert found(end) == ([("node1", hours)] if hours else [])


def test_what_the_preflight_has_found_counts_also_while_the_run_goes_on() -> None:
    marked = {"event": "node_marked", "time": NOW - 60, "host": "node1", "why": "core 0 is slow", "failed": False}
    assert found(None, [marked, marked | {"host": "node0", "failed": True}]) == [("node1", 2), ("node0", 24)]


def test_an_attempt_that_completes_clears_its_nodes_but_those_that_it_marks() -> None:
    start = {"started": NOW - 50, "nodes": [{"node_rank": 0, "host": "node0"}, {"node_rank": 1, "host": "node1"}]}
    marked = {"event": "node_marked", "time": NOW - 60, "host": "node1", "why": "core 0 is slow", "failed": False}
    end = AttemptEnd(outcome="COMPLETED", reason="")
    assert found(end, [marked], start) == [("node1", 2), ("node0", 0)]


@pytest.mark.parametrize(("seconds", "rank", "hours"), [(899, 3, None), (901, 3, 2), (901, 0, None)])
def test_a_straggler_over_many_windows_makes_its_node_slow(seconds: float, rank: int, hours: float | None) -> None:
    begun = {"event": "straggler", "time": NOW - seconds, "rank": rank, "host": "node1", "text": ""}
    over = {"event": "straggler_over", "time": NOW, "rank": rank}
    expected = [("node1", hours)] if hours else []
    assert found(None, [begun]) == expected
    assert found(None, [begun, over]) == expected
    assert found(None, [begun, over | {"time": NOW - seconds + 1}]) == []


def make_run(tmp_path: Path, name: str, end: AttemptEnd, *, ended: float, began: float | None = None) -> RunDir:
    run = make_slurm_run(tmp_path / "runs", name)
    if began is not None:
        nodes = [{"node_rank": 0, "host": "node1", "ranks": [0]}]
        write_json(run.attempt(0).start, {"started": began, "nodes": nodes})
    write_end(run.attempt(0), dataclasses.replace(end, ended=ended))
    return run


def test_a_mark_ends_by_time_by_a_user_or_by_a_later_run_that_completes(tmp_path: Path) -> None:
    now = time.time()
    lost = loss_of_nodes(GANG, GANG.nodes[1:], "node 1 on node1 is lost", attempt=None)
    bad = make_run(tmp_path, "bad", failed_by(lost), ended=now - 600)
    learn(bad)
    assert [(mark.node, mark.run, mark.launcher) for mark in read_marks()] == [("node1", "bad", "slurm")]
    assert read_marks("ssh") == []
    earlier = make_run(tmp_path, "earlier", AttemptEnd(outcome="COMPLETED", reason=""), ended=now, began=now - 900)
    learn(earlier)
    assert len(read_marks()) == 1
    assert clear(["node1"]) == ["node1"]
    learn(bad)
    assert read_marks() == []
    later = make_run(tmp_path, "later", failed_by(lost), ended=time.time())
    learn(later)
    assert [mark.run for mark in read_marks()] == ["later"]
    began = time.time()
    learn(make_run(tmp_path, "good", AttemptEnd(outcome="COMPLETED", reason=""), ended=began + 9, began=began))
    learn(later)
    assert read_marks() == []


def test_a_mark_that_is_over_does_not_hold_and_is_dropped_a_day_later() -> None:
    now = time.time()
    old = Mark(node="n1", launcher="slurm", why="x", run="r", since=now - 9000, until=now - 1800)
    remember([old, dataclasses.replace(old, node="n2", since=now - 200_000, until=now - 100_000)])
    assert read_marks() == []
    remember([dataclasses.replace(old, node="n3", since=now, until=now + 60)])
    assert [mark.node for mark in read_marks("slurm")] == ["n3"]


def test_the_history_of_a_run_is_read_by_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path, "slow", end_of(error="rank 1 on node1: ValueError"), ended=time.time())
    log_event(run, "node_marked", attempt=0, host="node1", why="core 0 is slow", failed=False)
    learn(run)
    (mark,) = read_marks()
    assert mark.spell().startswith("node1 left out until ")
    assert mark.spell().endswith(": core 0 is slow (run slow)")
    assert 7100 < mark.until - time.time() <= 7200


def test_marks_that_cannot_be_read_or_written_stop_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, "bad", end_of(error="rank 1 on node1 was killed by SIGKILL", signal="SIGKILL"), ended=1e10)
    (tmp_path / "state/clusterddp/nodes.json").mkdir()
    learn(run)
    assert read_marks() == []

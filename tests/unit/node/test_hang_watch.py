"""When the head takes a run for hung: what it asks, what it judges, and what is no hang."""

from __future__ import annotations

import dataclasses
import json

import pytest

from clusterddp.node.hang_watch import HangWatch, failure_of_hang, limit_by_rows
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.stacks import Frame, RankStack, read_report, request_stacks

REDUCE = (
    Frame(file="/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line=1, function="all_reduce"),
    Frame(file="/home/ana/train.py", line=20, function="step"),
)
EVALUATES = (Frame(file="/home/ana/train.py", line=50, function="evaluate"),)


class Watched:
    """A head's watch over two nodes of one rank each, and a clock."""

    def __init__(self, tmp_path, **gang) -> None:
        self.run = RunDir(tmp_path)
        self.attempt = self.run.attempt(0)
        self.attempt.path.mkdir(parents=True)
        nodes = tuple(Node(node_rank=each, host=f"host{each}", ranks=(each,)) for each in range(2))
        entry = Entry(kind="script", target="train.py", working_dir="/")
        self.gang = Gang(
            run="r", token="t", nodes=nodes, entry=entry, threads_per_rank=1, backend="gloo", master_addr="x", **gang
        )
        self.asked: list[tuple[int, str]] = []
        self.watch = HangWatch(
            self.run, self.gang, self.attempt, lambda node, order: self.asked.append((node, order["id"]))
        )
        self.now = 1000.0

    def stack(self, rank: int, frames=REDUCE, **facts) -> RankStack:
        return RankStack(rank=rank, host=f"host{rank}", pid=1, frames=frames, **({"state": "S", "cpu": 0.0} | facts))

    def answer(self, *ranks: RankStack) -> None:
        """Answer the newest question, for all nodes."""
        asked = self.asked[-1][1]
        for each in ranks:
            self.watch.on_report(each.rank, {"kind": "stack", "id": asked, "stack": dataclasses.asdict(each)}, self.now)
        for node in range(2):
            self.watch.on_report(node, {"kind": "stacks_done", "id": asked}, self.now)

    def silent(self, *ranks: RankStack, until_s: float):
        """Let both nodes be silent; answer whenever they are asked. Return the first hang, and after how long."""
        for second in range(int(until_s)):
            self.now += 1.0
            for node in range(2):
                self.watch.on_report(node, {"kind": "silent", "silent_s": float(second)}, self.now)
            before = len(self.asked)
            if (hang := self.tick()) is not None:
                return second, hang
            if len(self.asked) > before:
                self.answer(*ranks)
        return None

    def tick(self):
        return self.watch.tick({0, 1}, {0, 1}, self.now, judges=True)


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_ranks_that_wait_for_one_that_sleeps_are_a_hang_after_a_minute(watched):
    second, hang = watched.silent(watched.stack(0), watched.stack(1, EVALUATES), until_s=100)
    assert 60 <= second <= 70
    assert hang.text.startswith("no progress for 6")
    assert hang.folded.suspects == (1,)
    assert read_report(watched.attempt, hang.report.id) == hang.report


def test_a_rank_that_evaluates_for_four_minutes_is_no_hang_and_after_five_it_is_named(watched):
    busy = watched.stack(1, EVALUATES, cpu=1.0, answers=True)
    second, hang = watched.silent(watched.stack(0), busy, until_s=400)
    assert 300 <= second <= 310
    assert hang.text.endswith(
        "rank 1 on host1 computes in evaluate (train.py:50); 1 rank waits in all_reduce (called from train.py:20 step)"
    )


def test_a_rank_that_holds_the_gil_is_a_hang_though_it_computes(watched):
    stuck = watched.stack(1, EVALUATES, cpu=1.0, answers=False)
    second, hang = watched.silent(watched.stack(0), stuck, until_s=100)
    assert 60 <= second <= 70
    assert "rank 1 on host1 holds the GIL in evaluate" in hang.text


def test_a_node_that_sees_progress_is_enough(watched):
    for _ in range(200):
        watched.now += 1.0
        watched.watch.on_report(0, {"kind": "silent", "silent_s": 300.0}, watched.now)
        watched.watch.on_report(1, {"kind": "silent", "silent_s": 0.0}, watched.now)
        assert watched.tick() is None
    assert watched.asked == []


def test_a_row_of_metrics_is_progress(watched):
    watched.run.metrics.write_text("{}\n")
    ranks = watched.stack(0), watched.stack(1, EVALUATES)
    assert watched.silent(*ranks, until_s=50) is None
    watched.run.metrics.write_text("{}\n{}\n")
    assert watched.silent(*ranks, until_s=50) is None


def test_a_hang_is_reported_once_and_its_end_as_well(watched):
    ranks = watched.stack(0), watched.stack(1, EVALUATES)
    assert watched.silent(*ranks, until_s=100) is not None
    num_asked = len(watched.asked)
    for _ in range(100):
        watched.now += 1.0
        assert watched.tick() is None
    assert len(watched.asked) == num_asked
    for node in range(2):
        watched.watch.on_report(node, {"kind": "silent", "silent_s": 0.0}, watched.now)
    watched.tick()
    watched.tick()
    events = [json.loads(line)["event"] for line in watched.run.events.read_text().splitlines()]
    assert events == ["hang", "hang_over"]


def test_the_time_of_the_spec_holds(tmp_path):
    watched = Watched(tmp_path, hang_after_s=20.0)
    second, _ = watched.silent(watched.stack(0), watched.stack(1, EVALUATES), until_s=100)
    assert 20 <= second <= 30


def test_a_hang_as_the_end_names_the_rank_the_others_wait_for_and_has_its_stack(watched):
    _, hang = watched.silent(watched.stack(0), watched.stack(1, EVALUATES, raw="its stack"), until_s=100)
    failure = failure_of_hang(hang, watched.gang)
    assert (failure.rank, failure.host, failure.traceback) == (1, "host1", "its stack")
    assert failure.error.startswith("hang: no progress for 6")
    assert failure.restart == "here"


def test_what_a_command_asks_is_written_though_the_run_makes_progress(watched):
    wanted = request_stacks(watched.attempt)
    watched.tick()
    assert watched.asked == [(0, wanted), (1, wanted)]
    watched.answer(watched.stack(0), watched.stack(1))
    assert watched.tick() is None
    assert [each.rank for each in read_report(watched.attempt, wanted).ranks] == [0, 1]


def test_a_node_that_does_not_answer_is_named_in_the_report(watched):
    wanted = request_stacks(watched.attempt)
    watched.tick()
    watched.watch.on_report(0, {"kind": "stacks_done", "id": wanted}, watched.now)
    watched.now += 10.0
    watched.tick()
    assert read_report(watched.attempt, wanted).missing == ("node 1 on host1",)


def test_nodes_that_do_not_answer_are_asked_again_and_end_nothing(watched):
    assert watched.silent(until_s=400) is None
    assert len(watched.asked) > 2


def test_long_steps_and_rare_rows_make_the_watch_patient():
    def rows(step: int, seconds: float) -> list[dict[str, object]]:
        return [json.loads(json.dumps({"step": step * each, "time": seconds * each})) for each in range(5)]

    assert limit_by_rows([]) == 60.0
    assert limit_by_rows(rows(10, 1.0)) == 60.0
    assert limit_by_rows(rows(1, 9.0)) == 180.0
    assert limit_by_rows(rows(1000, 50.0)) == 150.0

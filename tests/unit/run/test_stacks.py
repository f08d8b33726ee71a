"""Stacks of ranks: how they are asked for, read, and folded into who waits for whom."""

from __future__ import annotations

import json
import os

from clusterddp.run.directory import AttemptDir
from clusterddp.run.stacks import (
    Collectives,
    Frame,
    RankStack,
    StackReport,
    fold,
    parse_answer,
    parse_stacks,
    request_stacks,
    take_request,
    unmoved_ranks,
)

TORCH = "/venv/lib/python3.11/site-packages/torch"
MAIN = Frame(file="/home/ana/train.py", line=91, function="<module>", source="main()")
STEP = Frame(file="/home/ana/train.py", line=20, function="step", source="dist.all_reduce(ones)")
REDUCE = (
    Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=3252, function="all_reduce"),
    Frame(file=f"{TORCH}/distributed/c10d_logger.py", line=83, function="_exception_logger.<locals>.wrapper"),
    STEP,
    MAIN,
)
INIT = (
    Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=2169, function="_new_process_group_helper"),
    Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=1899, function="init_process_group"),
    Frame(file=f"{TORCH}/distributed/c10d_logger.py", line=97, function="_time_logger.<locals>.wrapper"),
    MAIN,
)
LOADS = (
    Frame(file="/usr/lib/python3.11/multiprocessing/connection.py", line=930, function="wait"),
    Frame(file=f"{TORCH}/utils/data/dataloader.py", line=700, function="_BaseDataLoaderIter.__next__"),
    Frame(file="/home/ana/train.py", line=88, function="train", source="for images in loader:"),
    MAIN,
)
SLEEPS = (Frame(file="/home/ana/train.py", line=12, function="main", source="time.sleep(600)"), MAIN)
ENTERED, BEHIND = Collectives(enqueued=812, completed=811, name="all_reduce"), Collectives(enqueued=811, completed=811)


def rank(number, frames=REDUCE, **facts) -> RankStack:
    facts = {"cpu": 0.0, "state": "S", "answers": True} | facts
    return RankStack(rank=number, host=f"gpu{number // 8:02}", pid=100 + number, frames=frames, **facts)


def report(*ranks: RankStack, world_size: int | None = None) -> StackReport:
    return StackReport(id="1-a", attempt=0, time=0.0, world_size=world_size or len(ranks), ranks=ranks)


def texts(*ranks: RankStack) -> list[str]:
    return [group.text for group in fold(report(*ranks)).groups]


def test_the_rank_that_has_not_entered_the_collective_is_named_first():
    waiting = [rank(each, collectives={"0": ENTERED}) for each in range(15) if each != 9]
    assert texts(*waiting, rank(9, LOADS, collectives={"0": BEHIND})) == [
        "rank 9 on gpu01 is in _BaseDataLoaderIter.__next__ (called from train.py:88 train), and has not entered "
        "all_reduce #812",
        "14 ranks wait in all_reduce #812 (called from train.py:20 step)",
    ]


def test_a_rank_that_sleeps_is_named_by_the_line_of_its_code():
    assert texts(rank(0), rank(1, SLEEPS))[0] == "rank 1 on gpu00 is in main (train.py:12: time.sleep(600))"


def test_ranks_that_all_wait_in_init_process_group_are_no_suspects_and_get_the_usual_reasons():
    folded = fold(report(rank(0, INIT), rank(1, INIT)))
    assert folded.text == "2 ranks wait in init_process_group (called from train.py:91)"
    assert (folded.verdict, folded.suspects) == ("hang", ())
    assert "its world_size is not 2" in folded.hint


def test_a_rank_that_has_not_come_to_init_process_group_is_the_suspect():
    assert fold(report(rank(0, INIT), rank(1, SLEEPS), rank(2, INIT))).suspects == (1,)


def test_a_rank_that_a_signal_has_stopped_is_the_suspect_wherever_it_is():
    folded = fold(report(rank(0), rank(1, (), state="T", missing="it is stopped by a signal"), rank(2, SLEEPS)))
    assert folded.groups[0].text == "rank 1 on gpu00 is stopped by a signal"
    assert folded.suspects == (1,)


def test_a_rank_that_has_left_is_the_suspect_of_those_that_wait_for_it():
    assert texts(rank(0), rank(1, (), state="")) == [
        "rank 1 on gpu00 has ended",
        "1 rank waits in all_reduce (called from train.py:20 step)",
    ]


def test_of_ranks_that_all_wait_those_that_are_behind_are_the_suspects():
    behind = Collectives(enqueued=810, completed=809, name="all_gather")
    ranks = [rank(0, collectives={"0": ENTERED}), rank(1, collectives={"0": ENTERED})]
    assert fold(report(*ranks, rank(2, collectives={"0": behind}))).suspects == (2,)


def test_of_ranks_that_wait_in_different_places_the_few_are_the_suspects():
    barrier = (Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=5000, function="barrier"), MAIN)
    assert fold(report(rank(0), rank(1), rank(2, barrier))).suspects == (2,)
    assert fold(report(rank(0), rank(1, barrier))).suspects == ()


def test_a_rank_that_computes_is_no_hang_and_one_that_waits_for_a_disk_neither():
    assert fold(report(rank(0), rank(1, SLEEPS, cpu=1.0))).verdict == "works"
    assert fold(report(rank(0), rank(1, SLEEPS, state="D"))).verdict == "works"


def test_a_rank_that_holds_the_gil_is_stuck_once_it_has_not_moved():
    before = report(rank(0), rank(1, SLEEPS, cpu=1.0, answers=False))
    assert fold(before).verdict == "works"
    assert fold(before, stuck=unmoved_ranks(before, before)).verdict == "hang"
    moved = report(rank(0), rank(1, LOADS, cpu=1.0, answers=False))
    assert unmoved_ranks(before, moved) == {0}


def test_ranks_that_only_sleep_wait_for_none_of_the_others():
    assert fold(report(rank(0, SLEEPS), rank(1, SLEEPS))).verdict == "idle"


def test_a_backward_pass_waits_for_gradients_unless_it_computes():
    backward = (Frame(file=f"{TORCH}/autograd/graph.py", line=800, function="_engine_run_backward"), MAIN)
    assert fold(report(rank(0, backward), rank(1, SLEEPS))).suspects == (1,)
    assert fold(report(rank(0, backward, cpu=0.9), rank(1, SLEEPS))).verdict == "works"


def test_a_command_is_shown_as_the_process_that_it_runs():
    waits = Frame(file="/venv/lib/python3.11/site-packages/clusterddp/node/command.py", line=40, function="_wait")
    shown = rank(0, (waits,), children=("pid 7 (S): bash run.sh", "pid 8 (S): python x.py"))
    assert texts(shown) == ["1 rank runs pid 8 (S): python x.py"]


def test_a_report_survives_the_way_through_a_file():
    from clusterddp.wire import build

    before = report(rank(0, collectives={"0": ENTERED}), rank(1, LOADS, children=("pid 7 (S): sleep 1",)))
    assert build(StackReport, json.loads(json.dumps(before.to_json()))) == before


def test_what_faulthandler_writes_is_read_frame_by_frame():
    text = (
        "Current thread 0x00007f09 (most recent call first):\n"
        '  File "/home/ana/a, b.py", line 12 in main\n'
        '  File "<frozen runpy>", line 88 in _run_code\n'
    )
    assert [(frame.file, frame.line, frame.function) for frame in parse_stacks(text)] == [
        ("/home/ana/a, b.py", 12, "main"),
        ("<frozen runpy>", 88, "_run_code"),
    ]


def test_an_answer_has_the_main_threads_frames_and_what_is_no_answer_has_none():
    threads = [
        {"main": False, "name": "pin", "frames": [["/a.py", 1, "pin"]]},
        {"main": True, "name": "MainThread", "frames": [["/b.py", 2, "Trainer.step"]]},
    ]
    answer = parse_answer(json.dumps({"threads": threads, "collectives": {}}).encode())
    assert answer is not None
    assert answer.frames == (Frame(file="/b.py", line=2, function="Trainer.step"),)
    assert answer.threads[1].text == 'Main thread (most recent call first):\n  File "/b.py", line 2 in Trainer.step'
    assert [parse_answer(data) for data in (b"", b"[]", b'{"threads": 3}')] == [None] * 3


def test_the_second_of_two_that_ask_gets_the_first_ones_report(tmp_path):
    attempt = AttemptDir(tmp_path)
    first = request_stacks(attempt)
    assert request_stacks(attempt) == first
    assert take_request(attempt) == first
    assert take_request(attempt) is None


def test_a_request_that_no_supervisor_has_seen_does_not_hold_up_the_next(tmp_path):
    attempt = AttemptDir(tmp_path)
    first = request_stacks(attempt)
    os.utime(attempt.stacks_request, (1, 1))
    assert request_stacks(attempt) != first


def test_a_request_that_is_none_is_removed(tmp_path):
    attempt = AttemptDir(tmp_path)
    attempt.stacks_request.write_text('{"id": "../../x"}')
    assert take_request(attempt) is None
    assert not attempt.stacks_request.exists()

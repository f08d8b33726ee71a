"""The command stacks of a run whose files have them, and what status says of a hang."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from clusterddp.cli.main import main
from clusterddp.cli.text.status import status_lines
from clusterddp.run.record import log_event, read_events
from clusterddp.run.stacks import Collectives, Frame, RankStack, StackReport, write_report
from clusterddp.view.events import HangEvent, find_hang
from clusterddp.view.status import read_status
from tests.support.handmade_runs import fail, make_run, start_attempt

REDUCE = (
    Frame(file="/x/site-packages/torch/distributed/distributed_c10d.py", line=3252, function="all_reduce"),
    Frame(file="/home/ana/train.py", line=20, function="step"),
)
SLEEPS = (Frame(file="/home/ana/train.py", line=12, function="main", source="time.sleep(600)\x1b[31m"),)
HANG = {"since": 1000.0, "text": "rank 1 on gpu01 sleeps", "hint": "look", "ranks": [1], "stacks": "hang-0"}


def hung_run(tmp_path: Path) -> Path:
    """Make a run that has ended, and has the stacks of a hang."""
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    waits = [
        RankStack(
            rank=rank,
            host="gpu01",
            pid=7,
            state="S",
            cpu=0.0,
            frames=SLEEPS if rank == 1 else REDUCE,
            raw="Main thread (most recent call first):",
            collectives={"0": Collectives(enqueued=4 - (rank == 1), completed=3, name="all_reduce")},
        )
        for rank in range(3)
    ]
    report = StackReport(
        id="hang-0", attempt=0, time=time.time() - 600, world_size=4, ranks=tuple(waits), missing=("node 1 on gpu02",)
    )
    write_report(attempt, report)
    fail(attempt)
    return run.path


def test_stacks_shows_the_rank_that_the_others_wait_for_and_the_node_that_is_silent(tmp_path, capsys):
    run = hung_run(tmp_path)
    assert main(["stacks", run.name, "--runs", str(tmp_path), "--no-color"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run.name}  attempt 0, 10m ")
    assert lines == [
        "  rank 1 on gpu01 is in main (train.py:12: time.sleep(600)\\x1b[31m), and has not entered all_reduce #4",
        "  2 ranks wait in all_reduce #4 (called from train.py:20 step): ranks 0, 2",
        "  node 1 on gpu02 did not answer",
    ]


def test_stacks_has_the_whole_stacks_where_they_are_asked_for(tmp_path, capsys):
    run = hung_run(tmp_path)
    assert main(["stacks", run.name, "--runs", str(tmp_path), "--no-color", "--raw"]) == 0
    out = capsys.readouterr().out
    assert "rank 2 on gpu01  pid 7, state S, 0.00 cores\n  Main thread (most recent call first):" in out


def test_stacks_as_json_names_the_suspects(tmp_path, capsys):
    run = hung_run(tmp_path)
    assert main(["stacks", run.name, "--runs", str(tmp_path), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verdict"], found["suspects"]) == (1, "hang", [1])
    assert [group["ranks"] for group in found["groups"]] == [[1], [0, 2]]
    assert found["ranks"][0]["frames"][1]["function"] == "step"


def test_a_run_that_has_ended_and_never_hung_has_no_stacks(tmp_path, capsys):
    run = make_run(tmp_path)
    fail(start_attempt(run))
    assert main(["stacks", run.name, "--runs", str(tmp_path)]) == 2
    assert f"{run.name} has no ranks to ask: it is FAILED" in capsys.readouterr().err


def test_a_hang_counts_until_the_ranks_go_on(tmp_path):
    run = make_run(tmp_path)
    start_attempt(run)
    log_event(run, "hang", attempt=0, **HANG)
    found = find_hang(read_events(run), 0)
    assert found == HangEvent(since=1000.0, text="rank 1 on gpu01 sleeps", hint="look", ranks=(1,), stacks="hang-0")
    assert find_hang(read_events(run), 1) is None
    log_event(run, "hang_over", attempt=0)
    assert find_hang(read_events(run), 0) is None


def test_a_hang_of_another_form_is_passed_over(tmp_path):
    run = make_run(tmp_path)
    log_event(run, "hang", attempt=0, since="long ago")
    assert find_hang(read_events(run), 0) is None


def test_status_says_since_when_which_ranks_wait_and_where_the_stacks_are(tmp_path):
    run = make_run(tmp_path)
    start_attempt(run)
    hang = HangEvent(since=time.time() - 75, text="rank 1 on gpu01 sleeps", hint="look", ranks=(1,), stacks="hang-0")
    lines = status_lines(dataclasses.replace(read_status(run), hang=hang), run, address=run.name)
    at = next(number for number, line in enumerate(lines) if "hang" in line)
    assert "no progress for 1m " in lines[at]
    assert lines[at].endswith("s: rank 1 on gpu01 sleeps")
    assert lines[at + 1 : at + 3] == ["    look", f"    its stacks: clusterddp stacks {run.name}"]

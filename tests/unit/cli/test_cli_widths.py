"""`list` and `status` on terminals of 40, 80 and 140 columns, through a real pty."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pexpect
import pytest

from clusterddp.cli.ps import stored_lines
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.removal import Storage, Stored
from clusterddp.system.files import write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt, train

LONG = "plucky-pelican-48"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def rewrite(run: RunDir, **facts: object) -> None:
    write_json(run.record, json.loads(run.record.read_text()) | facts)


def began(run: RunDir, seconds_ago: float) -> None:
    """Let the newest attempt have started so long ago."""
    start = run.newest_attempt().start
    write_json(start, json.loads(start.read_text()) | {"started": time.time() - seconds_ago})


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Four runs: completed, failed, running, and one that waits in a queue."""
    runs = tmp_path / "runs"
    done = make_run(runs, "hardy-otter-7", created_ns=time.time_ns() - 10 * 86400 * 10**9)
    train(done, steps=100)
    attempt = start_attempt(done)
    began(done, 10 * 86400)
    complete(done, attempt)
    failed = make_run(runs, LONG, created_ns=time.time_ns() - 7200 * 10**9)
    train(failed, steps=60)
    attempt = start_attempt(failed)
    began(failed, 7100)
    fail(attempt)
    running = make_run(runs, "bold-crane-12", created_ns=time.time_ns() - 4000 * 10**9)
    train(running, steps=25)
    start_attempt(running)
    began(running, 3725)
    waiting = make_run(runs, "calm-lynx-3", created_ns=time.time_ns() - 605 * 10**9)
    waiting.attempt(0).path.mkdir(parents=True)
    return runs


def on_terminal(runs_dir: Path, columns: int, *arguments: str) -> list[str]:
    """Run the command on a terminal of so many columns; return what it writes, without colour."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "clusterddp", *arguments],
        cwd=str(runs_dir.parent),
        dimensions=(50, columns),
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"},
        encoding="utf-8",
        timeout=60,
    )
    text = str(child.read())
    child.close()
    return [COLOUR.sub("", line) for line in text.splitlines()]


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_lines_of_list_fit_and_keep_names_states_and_times(runs_dir: Path, columns: int) -> None:
    lines = on_terminal(runs_dir, columns, "list")
    assert len(lines) == 5
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines] == ["RUN", "calm-lynx-3", "bold-crane-12", LONG, "hardy-otter-7"]
    assert lines[0].split()[1] == "STATE"
    for line, words in zip(
        lines[1:], ["PENDING waits 10m", "RUNNING 1h 02m", "FAILED 1h 58m", "COMPLETED 10d 0h"], strict=True
    ):
        for word in words.split(" ", 1):
            assert word in line


def test_columns_give_way_in_the_order_of_their_use(runs_dir: Path) -> None:
    headings = {columns: on_terminal(runs_dir, columns, "list")[0].split() for columns in (40, 80, 140)}
    assert headings[40] == ["RUN", "STATE", "TIME"]
    assert headings[80] == ["RUN", "STATE", "PROGRESS", "ACCURACY", "TIME", "WHY"]
    assert headings[140] == ["RUN", "STATE", "LAUNCHER", "PROGRESS", "ACCURACY", "SUBMITTED", "TIME", "WHY"]


def test_a_reason_that_is_cut_begins_with_the_error(runs_dir: Path) -> None:
    (line,) = [line for line in on_terminal(runs_dir, 80, "list") if line.startswith(LONG)]
    assert "  ValueError" in line


def test_names_of_specs_are_shown_where_they_differ(runs_dir: Path) -> None:
    assert "NAME" not in on_terminal(runs_dir, 140, "list")[0]
    assert "NAME" in on_terminal(runs_dir, 40, "list", "--wide")[0]
    rewrite(RunDir(runs_dir / LONG), name="my-experiment")
    lines = on_terminal(runs_dir, 80, "list")
    assert lines[0].split()[:3] == ["RUN", "NAME", "STATE"]
    assert "my-experiment" in lines[3]


def test_a_wide_list_is_not_cut(runs_dir: Path) -> None:
    lines = on_terminal(runs_dir, 40, "list", "--wide")
    assert lines[0].split() == [
        "RUN",
        "NAME",
        "STATE",
        "LAUNCHER",
        "PROGRESS",
        "ACCURACY",
        "SUBMITTED",
        "TIME",
        "SIZE",
        "WHY",
    ]
    assert lines[3].endswith("ValueError: the loss is nan")


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", ["bold-crane-12", LONG, "calm-lynx-3"])
def test_lines_of_status_fit_except_what_is_copied(runs_dir: Path, columns: int, name: str) -> None:
    lines = on_terminal(runs_dir, columns, "status", name)
    copied = re.compile(r"  (runs/|\||the end of |(follow|cancel|go on|its log|try again|once fixed) )")
    assert not [line for line in lines if len(line) > columns and not copied.match(line)]
    state = {"bold-crane-12": "RUNNING", LONG: "FAILED", "calm-lynx-3": "PENDING"}[name]
    assert state in "\n".join(lines[:2])
    (heading,) = [line for line in lines if "RANK" in line]
    assert "STATE" in heading
    assert ("MASTER" in heading) == (columns == 80)


def test_a_sweep_of_long_values_fits(runs_dir: Path) -> None:
    for number, run in enumerate(sorted(runs_dir.iterdir())):
        rewrite(RunDir(run), variant=f"optimizer=adamw lr=0.{number} weight_decay=0.0{number}")
    lines = on_terminal(runs_dir, 40, "list")
    assert max(map(len, lines)) <= 40
    assert lines[0].split() == ["RUN", "VARIANT", "STATE"]


def test_an_end_with_a_long_reason_is_wrapped_in_status(runs_dir: Path) -> None:
    run = make_run(runs_dir, "cold-fox-1")
    attempt = start_attempt(run)
    write_end(attempt, AttemptEnd(outcome="CANCELLED", reason=" ".join(["because"] * 30)))
    lines = on_terminal(runs_dir, 40, "status", "cold-fox-1")
    assert " ".join(" ".join(lines).split()).count("because because") >= 14
    assert max(len(line) for line in lines if "because" in line) <= 40


@pytest.mark.parametrize(("columns", "titles"), [(None, "HOST WHAT PLACE AGE SIZE"), (60, "HOST PLACE SIZE")])
def test_the_place_of_what_gc_removes_is_never_cut(columns: int | None, titles: str) -> None:
    stored = Stored(place="runs/brisk-otter-3.3f9a12bc", kind="run", age_s=40 * 86400, size=2**20, checkpoints=2**19)
    storage = Storage(root="/home/her/.clusterddp", removable=(stored,))
    heading, row = stored_lines({"gpu01": storage}, columns=columns)
    assert COLOUR.sub("", heading).split() == titles.split()
    assert "/home/her/.clusterddp/runs/brisk-otter-3.3f9a12bc" in row
    assert ("with 512 KiB of checkpoints" in row) == (columns is None)

"""The three times of a run: queued, running, stopped."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord
from clusterddp.system.files import append_jsonl
from clusterddp.view.timeline import Times, read_timeline

RECORD = RunRecord(run="brisk-otter-3", token="0" * 32, name="mine", launcher="local", created_ns=100 * 10**9)


def attempt(run: Path, number: int, *, started: float | None = None, ended: float | None = None) -> None:
    directory = run / "attempts" / str(number)
    directory.mkdir(parents=True)
    if started is not None:
        (directory / "start.json").write_text(json.dumps({"started": started}))
    if ended is not None:
        (directory / "end.json").write_text(json.dumps({"outcome": "FAILED", "reason": "x", "ended": ended}))


def times(run: Path, *, finished: bool, now: float) -> Times:
    return read_timeline(RunDir(run), RECORD, is_finished=finished, now=now).times


def test_times_add_up_over_a_queue_a_restart_and_a_resume(tmp_path: Path) -> None:
    attempt(tmp_path, 0, started=110.0, ended=130.0)
    attempt(tmp_path, 1, started=135.0, ended=145.0)
    attempt(tmp_path, 2, started=1145.0)
    append_jsonl(RunDir(tmp_path).events, {"event": "resumed", "attempt": 2, "time": 1140.0})
    expected = Times(queued_s=10.0 + 5.0 + 5.0, running_s=20.0 + 10.0 + 5.0, stopped_s=995.0)
    assert times(tmp_path, finished=False, now=1150.0) == expected


def test_a_run_that_waits_has_only_waited_and_one_that_ended_goes_on_with_nothing(tmp_path: Path) -> None:
    attempt(tmp_path, 0)
    assert times(tmp_path, finished=False, now=160.0) == Times(queued_s=60.0, running_s=0.0, stopped_s=0.0)
    (tmp_path / "attempts" / "0").rmdir()
    attempt(tmp_path, 0, started=110.0, ended=130.0)
    assert times(tmp_path, finished=True, now=9000.0) == Times(queued_s=10.0, running_s=20.0, stopped_s=0.0)


def test_an_end_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    attempt(tmp_path, 0, started=110.0)
    (tmp_path / "attempts" / "0" / "end.json").write_text("[")
    assert times(tmp_path, finished=False, now=120.0).running_s == 10.0

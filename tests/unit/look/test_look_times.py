"""The three times of a run: queued, running, stopped."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.look.times import Times, read_times
from clusterddp.run.directory import RunDir


def attempt(run: Path, number: int, *, started: float, ended: float | None = None, restarts: bool = False) -> None:
    directory = run / "attempts" / str(number)
    directory.mkdir(parents=True)
    (directory / "start.json").write_text(json.dumps({"started": started}))
    if ended is not None:
        end = {"outcome": "FAILED", "reason": "x", "will_restart": restarts, "ended": ended}
        (directory / "end.json").write_text(json.dumps(end))


def test_times_add_up_over_a_queue_a_restart_and_a_resume(tmp_path: Path) -> None:
    attempt(tmp_path, 0, started=110.0, ended=130.0, restarts=True)
    attempt(tmp_path, 1, started=135.0, ended=145.0)
    attempt(tmp_path, 2, started=1145.0)
    times = read_times(RunDir(tmp_path), created=100.0, finished=False, now=1150.0)
    assert times == Times(queued_s=10.0 + 5.0, running_s=20.0 + 10.0 + 5.0, stopped_s=1000.0)


def test_a_run_that_waits_has_only_waited_and_one_that_ended_goes_on_with_nothing(tmp_path: Path) -> None:
    assert read_times(RunDir(tmp_path), created=100.0, finished=False, now=160.0).queued_s == 60.0
    attempt(tmp_path, 0, started=110.0, ended=130.0)
    times = read_times(RunDir(tmp_path), created=100.0, finished=True, now=9000.0)
    assert times == Times(queued_s=10.0, running_s=20.0, stopped_s=0.0)

"""Where the time of a run went since its first step: the parts add up to the whole, over all attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click import unstyle

from clusterddp.cli.text.status import status_lines
from clusterddp.run.attempts import AttemptEnd, AttemptOutcome, write_end
from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl, read_json, write_json
from clusterddp.view.effective import Effective
from clusterddp.view.status import read_status
from tests.support.handmade_runs import make_run, start_attempt

BEGAN = 1_000_000.0
PHASES = {"import": 1, "rendezvous": 2, "data": 3, "first_step": 4}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, created_ns=int(BEGAN) * 10**9)


def start(run: RunDir, number: int, at: float) -> None:
    attempt = start_attempt(run, number)
    facts = read_json(attempt.start)
    assert isinstance(facts, dict)
    write_json(attempt.start, facts | {"started": BEGAN + at})


def end(run: RunDir, number: int, at: float, outcome: AttemptOutcome) -> None:
    write_end(run.attempt(number), AttemptEnd(outcome=outcome, reason="a test", ended=BEGAN + at))


def event(run: RunDir, name: str, attempt: int, at: float, **facts: Any) -> None:
    append_jsonl(run.events, {"event": name, "time": BEGAN + at, "attempt": attempt, **facts})


def row(run: RunDir, kind: str, attempt: int, at: float, **values: Any) -> None:
    append_jsonl(run.metrics, {"kind": kind, "time": BEGAN + at, "attempt": attempt, **values})


def effective_of(run: RunDir) -> Effective:
    effective = read_status(run).effective
    assert effective is not None
    assert sum(effective.parts.values()) == pytest.approx(effective.seconds)
    assert effective.ratio == pytest.approx(effective.parts["steps"] / effective.seconds)
    return effective


def parts_of(run: RunDir) -> dict[str, float]:
    return {part: round(seconds, 3) for part, seconds in effective_of(run).parts.items() if seconds}


def lose_a_node_and_restart(run: RunDir) -> None:
    """Write a run of the trainer: node 1 falls silent after 54 s and is missed after 58 s; the run ends after 97 s."""
    start(run, 0, 10)
    event(run, "first_step", 0, 20, phases=PHASES)
    row(run, "train", 0, 30, step=10, train_seconds=14.0, checkpoint_seconds=0.0)
    row(run, "eval", 0, 35, step=10, train_seconds=14.0)
    row(run, "train", 0, 47, step=20, train_seconds=24.0, checkpoint_seconds=1.5)
    event(run, "rank_failed", 0, 60, rank=1, error="lost", noticed=BEGAN + 58, silent_s=4)
    end(run, 0, 60, "FAILED")
    event(run, "attempt_started", 1, 62)
    start(run, 1, 65)
    event(run, "first_step", 1, 75, phases=PHASES)
    row(run, "train", 1, 85, step=20, train_seconds=24.0, checkpoint_seconds=0.0)
    row(run, "train", 1, 95, step=30, train_seconds=34.0, checkpoint_seconds=0.0)
    end(run, 1, 97, "COMPLETED")


def test_each_second_since_the_first_step_is_in_one_part(run: RunDir) -> None:
    lose_a_node_and_restart(run)
    expected = {"steps": 10 + 10 + 10, "repeated": (54 - 47) + 10, "noticed": 4, "ended": 2 + 2, "waited": 2}
    expected |= {"started": 3, "imported": 3, "loaded": 7, "evaluated": 5, "checkpointed": 1.5, "other": 0.5}
    assert parts_of(run) == expected


def test_the_time_from_a_fault_to_the_next_step_has_its_parts(run: RunDir) -> None:
    lose_a_node_and_restart(run)
    effective = effective_of(run)
    expected = {"noticed": 4, "ended": 2, "waited": 2, "started": 3, "imported": 3, "loaded": 7}
    assert effective.faults == 1
    assert effective.median_s == effective.worst_s == {"total": 75 - 54} | expected


def test_two_faults_before_the_next_step_are_one(run: RunDir) -> None:
    start(run, 0, 10)
    row(run, "progress", 0, 20, step=1)
    event(run, "rank_failed", 0, 31, noticed=BEGAN + 30)
    end(run, 0, 31, "FAILED")
    start(run, 1, 33)
    end(run, 1, 40, "FAILED")
    start(run, 2, 42)
    row(run, "progress", 2, 50, step=2)
    end(run, 2, 51, "COMPLETED")
    effective = effective_of(run)
    assert (effective.faults, effective.worst_s["total"]) == (1, pytest.approx(50 - 30))


def test_status_names_the_parts_of_several_attempts_the_longest_first(run: RunDir) -> None:
    lose_a_node_and_restart(run)
    text = unstyle("\n".join(status_lines(read_status(run), run, address="x")))
    assert "\n  effective 39.0% of 1m 17s since the first step (repeated steps 22.1%, loaded 9.1%, ev" in text


def test_a_resume_by_hand_was_waited_for_and_steps_of_an_epoch_are_repeated(run: RunDir) -> None:
    start(run, 0, 10)
    for at, epoch, step in ((20, 1, 10), (30, 2, 1), (40, 2, 5)):
        row(run, "log", 0, at, step=7, epoch=epoch, steps_done=step)
    end(run, 0, 41, "STOPPED")
    event(run, "resumed", 1, 141)
    start(run, 1, 150)
    for at, epoch, step in ((160, 2, 3), (170, 2, 7), (180, 3, 1)):
        row(run, "progress", 1, at, step=step, epoch=epoch)
    end(run, 1, 181, "COMPLETED")
    expected = {"waited": 100, "started": 9, "loaded": 10, "ended": 2}
    assert parts_of(run) == expected | {"repeated": 10 * 2 / 4, "steps": 20 + 5 + 10}
    assert effective_of(run).faults == 0


def test_what_a_script_repeats_is_not_guessed_where_it_counts_anew(run: RunDir) -> None:
    start(run, 0, 10)
    for at, step in ((20, 1), (30, 90), (40, 1), (50, 80)):
        row(run, "log", 0, at, step=step)
    end(run, 0, 50, "FAILED")
    start(run, 1, 50)
    for at, step in ((50, 1), (60, 90)):
        row(run, "log", 1, at, step=step)
    end(run, 1, 60, "COMPLETED")
    assert parts_of(run) == {"steps": 40}


def test_a_run_that_trains_is_measured_to_its_newest_row_and_one_that_hangs_to_now(run: RunDir) -> None:
    start(run, 0, 10)
    for at, step in ((20, 1), (30, 90)):
        row(run, "log", 0, at, step=step)
    assert parts_of(run) == {"steps": 10}
    event(run, "hang", 0, 95, since=BEGAN + 35)
    assert effective_of(run).parts["steps"] == 15
    assert effective_of(run).parts["noticed"] > 1e6


def test_a_run_without_a_step_has_no_ratio(run: RunDir) -> None:
    assert read_status(run).effective is None
    start(run, 0, 10)
    end(run, 0, 20, "FAILED")
    assert read_status(run).effective is None


def test_records_that_are_none_are_passed_over(run: RunDir) -> None:
    start(run, 0, 10)
    event(run, "rank_failed", 0, 30, noticed="soon", silent_s=[])
    event(run, "first_step", 0, 20, phases={"data": "x", "first_step": None})
    run.metrics.write_bytes(b'{"time": "x"}\n{"time": 1e400, "attempt": 0}\n{"time": 1000025, "attempt": []}\n[1]\nx\n')
    row(run, "train", 0, 30, step=None, train_seconds="x", epoch=True)
    end(run, 0, 30, "FAILED")
    assert parts_of(run) == {"steps": 10}

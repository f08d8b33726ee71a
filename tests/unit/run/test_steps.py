"""The steps of a batch script: their directories, also those that several tasks make together."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.steps import StepRecord, new_step, next_round, read_step, steps_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    return RunDir(tmp_path)


def record() -> StepRecord:
    return StepRecord(command=("srun", "-n4"), program=("python", "train.py"), line=7)


def test_each_command_that_starts_ranks_is_a_step_of_its_own(run: RunDir) -> None:
    steps = [new_step(run, 2, record()) for _ in range(3)]
    assert [step.step for step in steps] == ["0", "1", "2"]
    assert read_step(steps[1].attempt(2)) == record()
    assert steps_of(run, 2) == steps


def test_a_later_round_of_a_step_follows_it(run: RunDir) -> None:
    first, second = new_step(run, 2, record()), new_step(run, 2, record())
    again = next_round(first, 2, 1)
    assert again.step == "0.1"
    assert read_step(again.attempt(2)) == record()
    assert steps_of(run, 2) == [first, again, second]


def test_the_files_of_a_step_take_the_place_of_the_attempt_s(run: RunDir) -> None:
    step = new_step(run, 2, record())
    attempt = step.newest_attempt()
    assert (attempt.number, attempt.path) == (2, run.path / "attempts/2/steps/0")
    assert attempt.run_path == run.path
    assert step.metrics == run.metrics
    assert [each.number for each in step.attempts()] == [2]

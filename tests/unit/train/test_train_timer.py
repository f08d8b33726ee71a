"""When a checkpoint is due by time."""

from __future__ import annotations

import math

import pytest

from clusterddp.spec.train import TrainSpec
from clusterddp.train.checkpoint import Timer


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


def timer(clock: list[float], every_s: float | None) -> Timer:
    return Timer(every_s, lambda: clock[0])


@pytest.mark.parametrize(("minutes", "every_s"), [(None, None), (0, math.inf), (0.5, 30), (10, 600)])
def test_the_spec_says_minutes_or_never_or_leaves_it_to_what_they_cost(
    minutes: float | None, every_s: float | None
) -> None:
    assert TrainSpec(checkpoint_minutes=minutes).checkpoint_interval_s == every_s


def test_so_many_seconds_after_the_one_before_began(clock: list[float]) -> None:
    own = timer(clock, 30)
    clock[0] += 29
    assert not own.is_due()
    clock[0] += 2
    assert own.is_due()
    assert own.saved(1) == ""
    clock[0] += 28.5
    assert not own.is_due()
    clock[0] += 0.5
    assert own.is_due()


def test_never(clock: list[float]) -> None:
    own = timer(clock, math.inf)
    clock[0] += 1e9
    assert not own.is_due()


def test_without_a_time_they_take_one_percent_of_it_and_are_a_minute_apart_at_least(clock: list[float]) -> None:
    own = timer(clock, None)
    said, began, spent = [], clock[0], 0.0
    for cost_s in (0.1, 3.0, 3.0, 0.2, 3.0):
        while not own.is_due():
            clock[0] += 1
        clock[0] += cost_s
        spent += cost_s
        said.append(own.saved(cost_s))
    assert said == ["", sentence("3.0 s", "5.0 min"), "", "", sentence("3.0 s", "5.0 min")]
    while not own.is_due():
        clock[0] += 1
    assert clock[0] - began == pytest.approx(60 + 60 + 300 + 300 + 60 + 300, abs=6)
    assert spent / (clock[0] - began) <= 0.01


def sentence(cost: str, apart: str) -> str:
    return f"a checkpoint takes {cost} from the steps: the next ones are {apart} apart, to take 1%"


def test_one_that_was_put_off_is_due_at_once_and_once(clock: list[float]) -> None:
    own = timer(clock, math.inf)
    own.is_owed = True
    assert own.is_due()
    own.saved(0)
    assert not own.is_due()

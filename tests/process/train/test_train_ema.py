"""The running mean of the weights: what it is, that it changes nothing, and that a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clusterddp.train.evaluate import Ema
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.state import tensors_sha256
from tests.support.train_gang import Gang, make_run, metrics_rows, outcome, settle


def test_it_is_the_mean_of_the_weights_in_which_old_ones_fade() -> None:
    model = nn.BatchNorm1d(1)
    ema = Ema(model, 0.75)
    expected = 1.0
    for step in range(100, 104):  # past the first steps, which count for more
        with torch.no_grad():
            model.weight.fill_(step)
        ema.update(step=step)
        expected = 0.75 * expected + 0.25 * step
    assert ema.model.weight.item() == pytest.approx(expected)


def test_early_steps_count_for_more() -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.999)
    with torch.no_grad():
        model.weight.add_(11)
    ema.update(step=1)
    assert (model.weight - ema.model.weight).item() == pytest.approx(2)


def test_batch_norms_statistics_are_averaged_and_its_counter_is_not() -> None:
    model = nn.BatchNorm1d(1)
    ema = Ema(model, 0.5)
    model(torch.full((4, 1), 80.0))
    ema.update(step=1000)
    assert ema.model.running_mean is not None
    assert ema.model.running_mean.item() == pytest.approx(4)
    assert ema.model.num_batches_tracked is not None
    assert ema.model.num_batches_tracked.item() == 0


def trained(group: Group, path: Path, stops: list[int | None], options: dict[str, Any]) -> dict[str, Any]:
    """Train with a stop at each of `stops`, one attempt after the other; return the last one's outcome."""
    for attempt, stop_after in enumerate(stops):
        if group.is_first:
            (path / "attempts" / str(attempt)).mkdir(parents=True)
        setting = settle(group, path, attempt=attempt, stop_after=stop_after, **options)
        state = train(setting)
        setting.reporter.close()
    average = None if state.ema is None else tensors_sha256(state.ema.model.state_dict().items())
    return outcome(state) | {"ema": average, "evaluation": state.evaluation}


def test_it_changes_nothing_in_the_training(gang: Gang, tmp_path: Path) -> None:
    plain = gang.run(2, trained, make_run(tmp_path / "plain"), [None], {})
    averaged = gang.run(2, trained, make_run(tmp_path / "averaged"), [None], {"ema": 0.9})
    for key in ("params", "buffers", "momentum", "accuracy"):
        assert [result[key] for result in averaged] == [result[key] for result in plain]


@pytest.mark.parametrize("comm", ["exact", "local:4"])
def test_a_stopped_run_goes_on_to_the_same_average(gang: Gang, tmp_path: Path, comm: str) -> None:
    options = {"ema": 0.9, "comm": comm}
    whole = gang.run(2, trained, make_run(tmp_path / "whole"), [None], options)
    cut = gang.run(2, trained, make_run(tmp_path / "cut"), [3, 5, None], options)
    assert cut == whole


def test_its_accuracy_is_reported_beside_the_plain_one(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    result = gang.run(2, trained, path, [None], {"ema": 0.9})[0]["evaluation"]
    rows = metrics_rows(path, "eval")
    assert [sorted(key for key in row if key.startswith("accuracy")) for row in rows] == [
        ["accuracy", "accuracy_ema"]
    ] * 2
    assert rows[-1]["accuracy_ema"] == result.correct_ema / result.samples


def test_a_run_that_is_resumed_with_one_begins_it_at_its_weights(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(1, trained, path, [5], {})
    (path / "attempts" / "0").rmdir()
    assert gang.run(1, trained, path, [None], {"ema": 0.9})[0]["ema"] is not None

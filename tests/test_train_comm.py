"""What each way of exchanging does to the weights, and that a stop and a resume change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_gang import Gang, make_run, open_gang, outcome, settle, train_once

from clusterddp.train.begin import begin
from clusterddp.train.group import Group
from clusterddp.train.loop import train

MODES = ["exact", "bf16", "powersgd:2", "local:4"]
PLAIN = {"momentum": 0.0, "nesterov": False, "max_steps": 6}


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with open_gang() as gang:
        yield gang


def trained(group: Group, path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    return {name: value.detach().clone() for name, value in state.model.named_parameters()}


def stop_and_resume(group: Group, path: Path, stops: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a stop at each of `stops`, one attempt after the other, then to the end."""
    results = []
    for attempt, stop_after in enumerate([*stops, None]):
        if group.is_first:
            (path / "attempts" / str(attempt)).mkdir(parents=True)
        results.append(train_once(group, path, attempt=attempt, stop_after=stop_after, **options))
    return results


def relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far two trainings are from each other, as a share of the weights' norm."""
    apart = sum((one[name] - other[name]).square().sum() for name in one)
    return float((apart / sum(value.square().sum() for value in one.values())).sqrt())


# -- stop, resume, look


@pytest.mark.parametrize("comm", MODES)
@pytest.mark.parametrize("optimizer", ["sgd"])
def test_a_run_stopped_again_and_again_goes_on_to_the_same_bits(
    gang: Gang, tmp_path: Path, comm: str, optimizer: str
) -> None:
    options = {"comm": comm, "optimizer": optimizer}
    whole = [each[-1] for each in gang.run(2, stop_and_resume, make_run(tmp_path / "whole"), [], options)]
    # Stops at steps 2 and 7 lie between two means of local:4; the last one is asked for in an evaluation.
    cut = gang.run(2, stop_and_resume, make_run(tmp_path / "cut"), [2, 5, 4], options)
    assert [result["step"] for result in cut[0]][:2] == [2, 7]
    assert [each[-1] for each in cut] == whole


def changed_by_looking(group: Group, path: Path, options: dict[str, Any]) -> tuple[list[str], float]:
    """Stop in the middle of an epoch; return what looking at the mean changed, and how far this rank is from it."""
    setting = settle(group, path, stop_after=6, **options)
    state = train(setting)
    before = outcome(state)
    with state.exchange.averaged(state.model):
        inside = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    after = outcome(state)
    setting.reporter.close()
    mine = dict(state.model.named_parameters())
    return [key for key in before if before[key] != after[key]], relative_difference(inside, mine)


@pytest.mark.parametrize("comm", MODES)
def test_looking_at_the_mean_changes_nothing(gang: Gang, tmp_path: Path, comm: str) -> None:
    results = gang.run(2, changed_by_looking, make_run(tmp_path / "run"), {"comm": comm})
    assert [changed for changed, _ in results] == [[], []]
    assert all((distance > 0) == comm.startswith("local") for _, distance in results)


@pytest.mark.parametrize("comm", MODES)
def test_all_ranks_end_with_the_same_weights_and_momentum(gang: Gang, tmp_path: Path, comm: str) -> None:
    results = gang.run(
        3,
        train_once,
        make_run(tmp_path / "run"),
    )
    assert len({(result["params"], result["momentum"]) for result in results}) == 1


def resume_with(group: Group, path: Path, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Begin a second attempt; return how far its weights are from the checkpoint's mean, then its end."""
    setting = settle(group, path, attempt=1, **options)
    state = begin(setting)
    setting.reporter.close()
    (file,) = (path / "checkpoints").glob("*-a0.pt")
    saved = torch.load(file, weights_only=True)["model"]
    distance = relative_difference(dict(state.model.named_parameters()), saved)
    return distance, train_once(group, path, attempt=1, **options)


@pytest.mark.parametrize("comm", ["powersgd:2", "local:4"])
def test_another_number_of_ranks_starts_from_the_mean(gang: Gang, tmp_path: Path, comm: str) -> None:
    path = make_run(tmp_path / "run", comm=comm, batch_size=8)
    gang.run(2, stop_and_resume_once, path, 8, {"comm": comm, "batch_size": 8})
    results = gang.run(1, resume_with, path, {"comm": comm, "batch_size": 16})
    assert [distance for distance, _ in results] == [0.0]
    assert results[0][1]["finished"]


def stop_and_resume_once(group: Group, path: Path, stop_after: int, options: dict[str, Any]) -> dict[str, Any]:
    return train_once(group, path, stop_after=stop_after, **options)


@pytest.mark.parametrize(
    ("before", "after"), [("local:4", "exact"), ("exact", "local:4"), ("powersgd:2", "powersgd:1")]
)
def test_another_mode_starts_from_the_mean(gang: Gang, tmp_path: Path, before: str, after: str) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, stop_and_resume_once, path, 7, {"comm": before})
    results = gang.run(2, resume_with, path, {"comm": after})
    assert [distance for distance, _ in results] == [0.0, 0.0]
    assert results[0][1]["params"] == results[1][1]["params"]

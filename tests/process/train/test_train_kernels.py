"""How convolutions are computed is timed once in a run, is the same on all ranks, and stays so when it resumes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.train import begin
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.models.convolution import NATIVE, PASSES, Shape, Ways
from tests.support.train_gang import Gang, make_run, one_rank, outcome, settle

LONG: dict[str, Any] = {"samples": 800, "batch_size": 8, "epochs": 1}
"""100 steps of one rank, 50 of two."""


def timings(ways: Ways, *, gain: float) -> list[float]:
    """What is timed where `ways` are faster than native by `gain`."""
    return [1 / gain if name == way else 1.0 for way, names in zip(ways, PASSES, strict=True) for name in names]


def trained(group: Group, path: Path, ways: list[Ways], gains: list[float], options: dict[str, Any]) -> Any:
    """Train where each rank times `ways` as that much faster than native; return the outcome and what was chosen."""

    def time_ways(shapes: Iterable[Shape], dtype: torch.dtype, *, seconds: float) -> list[list[float]]:
        assert dtype == torch.float32
        assert seconds == 2.5
        return [timings(ways[group.rank], gain=gains[group.rank]) for _ in shapes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(begin, "time_ways", time_ways)
        apart = Group(
            rank=group.rank, world_size=group.world_size, device=group.device, control=group.control
        )  # each rank has a processor of its own
        setting = settle(apart, path, **options)
        state = train(setting)
        setting.reporter.close()
    return outcome(state), state.kernels


COLUMNS: Ways = ("columns", "columns", "columns")
PLACES: Ways = ("channels first", "channels first", "places")


def test_ranks_take_what_is_fastest_on_the_slowest_host(gang: Gang, tmp_path: Path) -> None:
    options = LONG | {"samples": 1600}
    agreed = gang.run(2, trained, make_run(tmp_path / "one"), [COLUMNS, COLUMNS], [3.0, 2.0], options)
    assert agreed[0][0]["params"] == agreed[1][0]["params"]
    assert [set(kernels.values()) for _, kernels in agreed] == [{COLUMNS}] * 2
    apart = gang.run(2, trained, make_run(tmp_path / "two"), [COLUMNS, PLACES], [3.0, 2.0], options)
    assert [kernels for _, kernels in apart] == [{}, {}]


@pytest.mark.parametrize("options", [{"max_steps": 99}, {"deterministic": True}, {"kernels": "native"}])
def test_a_run_of_few_steps_or_with_deterministic_or_native_times_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    stopped = LONG | options | {"stop_after": 1}
    assert trained(one_rank(), make_run(tmp_path / "run"), [COLUMNS], [3.0], stopped)[1] == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_stopped_keeps_its_kernels_and_resumes_to_the_bit(gang: Gang, tmp_path: Path, ranks: int) -> None:
    options = LONG | {"samples": 800 * ranks, "epochs": 2}
    whole = gang.run(ranks, trained, make_run(tmp_path / "whole"), [COLUMNS] * 2, [3.0] * 2, options)
    assert set(whole[0][1].values()) == {COLUMNS}
    other = gang.run(ranks, trained, make_run(tmp_path / "other"), [PLACES] * 2, [3.0] * 2, options)
    assert other[0][0]["params"] != whole[0][0]["params"]

    run = make_run(tmp_path / "run")
    gang.run(ranks, trained, run, [COLUMNS] * 2, [3.0] * 2, options | {"stop_after": 130})
    resumed = gang.run(ranks, trained, run, [PLACES] * 2, [3.0] * 2, options | {"attempt": 1})
    assert resumed == whole


def test_what_was_chosen_is_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = trained(one_rank(), make_run(tmp_path / "run"), [PLACES], [2.0], LONG)[1]
    assert set(chosen.values()) == {PLACES}
    text = capfd.readouterr().err
    assert "kernels auto" in text
    assert "group3.conv2 channels first, channels first, places" in text


def test_real_timing_ends_within_its_time_and_leaves_a_run_that_trains(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"), **LONG)
    state = train(setting)
    setting.reporter.close()
    assert state.step == 100
    assert outcome(state)["accuracy"] > 0.15  # ten classes
    assert all(set(ways) <= {name for names in PASSES for name in names} for ways in state.kernels.values())
    assert NATIVE not in state.kernels.values()

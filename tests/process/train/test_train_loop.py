"""Training is the same whatever way it is cut: over ranks, over micro-batches, by stops and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from tests.support.train_gang import Gang, make_run, metrics_rows, one_rank, outcome, settle, train_once


def trained_parameters(group: Group, path: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    return {name: value.detach().clone() for name, value in state.model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# -- the same over ranks and over micro-batches


@pytest.mark.parametrize("model", ["fastnet", "resnet18"])
def test_two_ranks_equal_one_rank_that_accumulates_twice_to_the_last_bit(
    either_gang: Gang, tmp_path: Path, model: str
) -> None:
    options = {"model": model, "batch_size": 8, "max_steps": 4, "samples": 80}
    two = either_gang.run(2, trained_parameters, make_run(tmp_path / "two"), options)
    one = either_gang.run(1, trained_parameters, make_run(tmp_path / "one"), options | {"accumulate": 2})
    assert largest_difference(two[0], two[1]) == 0.0
    assert largest_difference(two[0], one[0]) == 0.0


def test_three_ranks_equal_one_rank_that_accumulates_thrice(either_gang: Gang, tmp_path: Path) -> None:
    three = either_gang.run(3, trained_parameters, make_run(tmp_path / "three"), {"max_steps": 4})
    one = either_gang.run(1, trained_parameters, make_run(tmp_path / "one"), {"max_steps": 4, "accumulate": 3})
    assert largest_difference(three[0], three[2]) == 0.0
    assert largest_difference(three[0], one[0]) <= 1e-6


def test_ranks_that_accumulate_too_equal_one_rank(either_gang: Gang, tmp_path: Path) -> None:
    options = {"max_steps": 4, "accumulate": 2}
    two = either_gang.run(2, trained_parameters, make_run(tmp_path / "two"), options)
    one = either_gang.run(1, trained_parameters, make_run(tmp_path / "one"), options | {"accumulate": 4})
    assert largest_difference(two[0], one[0]) <= 1e-6


def test_the_same_spec_trained_twice_is_the_same_to_the_last_bit(gang: Gang, tmp_path: Path) -> None:
    first = gang.run(2, train_once, make_run(tmp_path / "first"))
    second = gang.run(2, train_once, make_run(tmp_path / "second"))
    assert first == second


# -- stop and resume


def stop_and_resume(group: Group, path: Path, stops: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a stop at each of `stops`, one attempt after the other, then to the end."""
    results = []
    for attempt, stop_after in enumerate([*stops, None]):
        if group.is_first:
            (path / "attempts" / str(attempt)).mkdir(parents=True)
        setting = settle(group, path, attempt=attempt, stop_after=stop_after, **options)
        state = train(setting)
        setting.reporter.close()
        results.append(outcome(state) | {"finished": state.finished(setting.schedule)})
    return results


def last_of_each_rank(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [result[-1] for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(gang: Gang, tmp_path: Path, accumulate: int) -> None:
    options = {"accumulate": accumulate, "keep_checkpoints": 1, "samples": 160}
    whole = last_of_each_rank(gang.run(2, stop_and_resume, make_run(tmp_path / "whole"), [], options))
    questions = 2 * (160 // (32 * accumulate)) + 4  # one for each step and evaluation batch, one before the first
    where = set()
    for stop_after in range(questions):
        path = make_run(tmp_path / f"{stop_after}")
        results = gang.run(2, stop_and_resume, path, [stop_after], options)
        stopped_at = results[0][0]["step"]
        assert last_of_each_rank(results) == whole, f"stopped at step {stopped_at}"
        assert metrics_rows(path, "eval")[-1]["accuracy"] == whole[0]["accuracy"]
        where.add(stopped_at)
    assert where == set(range(whole[0]["step"] + 1))


def test_a_run_stopped_again_and_again_goes_on_to_the_same_bits(either_gang: Gang, tmp_path: Path) -> None:
    (whole,), _ = either_gang.run(2, stop_and_resume, make_run(tmp_path / "whole"), [], {})
    *stopped, last = either_gang.run(2, stop_and_resume, make_run(tmp_path / "cut"), [0, 3, 4, 4], {})[0]
    assert [result["finished"] for result in stopped] == [False] * 4
    assert [result["step"] for result in stopped] == sorted(result["step"] for result in stopped)
    assert last == whole


def train_apart(group: Group, paths: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    return train_once(group, paths[group.rank], **options)


def test_ranks_that_share_no_directory_go_on_from_rank_zeros_checkpoint_to_the_same_bits(
    gang: Gang, tmp_path: Path
) -> None:
    whole = gang.run(2, train_once, make_run(tmp_path / "whole"))
    paths = [make_run(tmp_path / "first"), make_run(tmp_path / "second")]
    stopped = gang.run(2, train_apart, paths, {"stop_after": 5})
    assert [each["finished"] for each in stopped] == [False, False]
    assert gang.run(2, train_apart, paths, {"attempt": 1}) == whole
    assert [path.name for path in paths[1].iterdir()] == ["plan.json"]


def test_all_ranks_stop_at_the_same_step_when_one_of_them_sees_the_request(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(3, stop_and_resume, make_run(tmp_path / "run"), [3], {"batch_size": 8})
    assert [result[0]["step"] for result in results] == [3] * 3


def test_a_stop_before_the_first_step_leaves_a_checkpoint_of_step_zero(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    first, last = gang.run(2, stop_and_resume, path, [0], {})[0]
    assert (first["step"], first["finished"]) == (0, False)
    assert (last["step"], last["finished"]) == (18, True)


def test_a_stop_in_the_last_evaluation_is_made_up_for_by_the_next_attempt(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    # Asked before the first step, at each of 18 steps, in the first epoch's evaluation; the next is the last one's.
    first, last = gang.run(2, stop_and_resume, path, [19], {})[0]
    assert (first["step"], first["finished"]) == (18, False)
    assert (last["step"], last["finished"]) == (18, True)
    assert [row["epoch"] for row in metrics_rows(path, "eval")] == [1, 2]


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_resumed_run_trains_by_what_the_spec_says_now(tmp_path: Path, optimizer: str) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, stop_after=4, optimizer=optimizer)
    now = {"momentum": 0.5, "nesterov": False, "weight_decay": 0.02}
    setting = settle(one_rank(), path, attempt=1, optimizer=optimizer, **now)
    state = train(setting)
    setting.reporter.close()
    first = state.optimizer.param_groups[0]
    assert state.resumed_from is not None
    assert {key: first[key] for key in now} == now
    kept = state.optimizer.state[first["params"][0]]["momentum_buffer"]
    assert kept.abs().sum() > 0


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    first = train_once(one_rank(), path)
    size = (path / "metrics.jsonl").stat().st_size
    assert train_once(one_rank(), path, attempt=1) == first
    assert (path / "metrics.jsonl").stat().st_size == size


# -- another number of ranks


def test_more_ranks_resume_at_the_samples_seen(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (first,) = gang.run(1, train_once, path)  # both epochs, 36 steps of 16
    assert first["samples"] == 576
    path = make_run(tmp_path / "cut")
    (stopped, _) = gang.run(1, cut, path, 7)[0]
    assert stopped["samples"] == 96
    results = gang.run(2, resumed, path)
    assert [result["samples"] for result in results] == [576, 576]
    assert [result["step"] for result in results] == [18, 18]


def cut(group: Group, path: Path, stop_after: int) -> tuple[dict[str, Any], None]:
    return train_once(group, path, stop_after=stop_after), None


def resumed(group: Group, path: Path) -> dict[str, Any]:
    return train_once(group, path, attempt=1)


def test_ranks_whose_step_does_not_divide_the_samples_seen_are_refused_in_words(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(1, cut, path, 8)  # 7 steps of 16
    with pytest.raises(AssertionError, match=r"between two steps: it was 112 samples into epoch 1, 1 ranks, 16 a step"):
        gang.run(2, resumed, path)


# -- what makes no sense


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    with pytest.raises(ClusterddpError, match=r"another training: train.width was 0.125, is 0.25"):
        train_once(one_rank(), path, attempt=1, width=0.25)


def test_another_train_set_is_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    with pytest.raises(ClusterddpError, match=r"the train set had 288 samples, has 320"):
        train_once(one_rank(), path, attempt=1, samples=320)


def test_a_longer_run_goes_on_from_a_finished_one_and_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    assert train_once(one_rank(), path, attempt=1, epochs=2)["step"] == 36
    assert "changed since the checkpoint: train.epochs 1 -> 2" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"), lr=1e6, weight_decay=1e6, warmup=0)
    with pytest.raises(ClusterddpError, match=r"diverged: the loss of step [2-9] is (nan|inf)"):
        train(setting)


def test_gradients_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"), max_steps=1)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, given, taken: Overflowing.apply(taken))
    try:
        with pytest.raises(ClusterddpError, match=r"the gradients of step 1 have the norm (nan|inf)"):
            train(setting)
    finally:
        hook.remove()


class Overflowing(torch.autograd.Function):
    """Changes nothing on the way forth and makes gradients infinite on the way back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        return gradients * math.inf

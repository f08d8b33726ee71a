"""Evaluation counts every sample once, whatever the number of ranks, and changes nothing in the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.evaluate import Evaluation, evaluate, mean_logits
from clusterddp.train.group import Group, averaged_tensors
from clusterddp.train.models import build_model
from tests.support.train_gang import TINY, Gang, one_rank


def tiny_dataset(test_samples: int = 101) -> Dataset:
    spec = TrainSpec.from_json(TINY | {"samples": 10 * test_samples})
    whole = load_dataset(spec)
    return replace(whole, test_images=whole.test_images[:test_samples], test_labels=whole.test_labels[:test_samples])


def tiny_model(dataset: Dataset) -> torch.nn.Module:
    model = build_model(TrainSpec.from_json(TINY), dataset)
    for batch in dataset.train_images[:192].split(64):
        model(normalize(batch, mean=dataset.mean, std=dataset.std))  # moves batch norm's statistics
    return model


def evaluated(group: Group, test_samples: int) -> Evaluation | None:
    dataset = tiny_dataset(test_samples)
    return evaluate(tiny_model(dataset), dataset, group, step=7)


def test_one_rank_agrees_with_a_plain_forward_pass() -> None:
    dataset = tiny_dataset()
    model = tiny_model(dataset)
    result = evaluate(model, dataset, one_rank(), step=7)
    with torch.no_grad():
        logits = model.eval()(normalize(dataset.test_images, mean=dataset.mean, std=dataset.std))
    assert result is not None
    assert result.correct == (logits.argmax(1) == dataset.test_labels).sum().item()
    assert result.loss == pytest.approx(cross_entropy(logits, dataset.test_labels).item(), rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7])
def test_every_sample_is_counted_once_by_any_number_of_ranks(gang: Gang, world_size: int) -> None:
    (alone,) = gang.run(1, evaluated, 101)
    results = gang.run(world_size, evaluated, 101)
    assert [result.samples for result in results] == [101] * world_size
    assert [result.correct for result in results] == [alone.correct] * world_size
    assert results[0].loss == pytest.approx(alone.loss, rel=1e-6)


def test_more_ranks_than_samples_count_right(gang: Gang) -> None:
    assert [result.samples for result in gang.run(5, evaluated, 3)] == [3] * 5


def test_evaluation_leaves_the_model_in_training_mode_and_its_buffers_alone() -> None:
    dataset = tiny_dataset()
    model = tiny_model(dataset)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    evaluate(model, dataset, one_rank(), step=0)
    assert model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_evaluation_that_is_asked_to_stop_gives_no_result() -> None:
    dataset = tiny_dataset()
    model = tiny_model(dataset)
    assert evaluate(model, dataset, one_rank(), step=0, stop=lambda: True) is None
    assert model.training


def buffers_inside_and_after(group: Group) -> tuple[float, float]:
    norm = torch.nn.BatchNorm2d(1)
    assert norm.running_mean is not None
    norm.running_mean.fill_(group.rank)
    with averaged_tensors(norm.buffers(), group):
        inside = norm.running_mean.item()
    return inside, norm.running_mean.item()


def test_buffers_are_the_mean_over_the_ranks_inside_and_each_ranks_own_outside(gang: Gang) -> None:
    assert gang.run(3, buffers_inside_and_after) == [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]


# -- test-time augmentation


def test_views_are_mirrored_and_moved_and_weighted_as_airbench_does() -> None:
    seen: list[torch.Tensor] = []

    def answer(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return torch.full((1, 1), 2.0 ** len(seen))

    image = torch.arange(9.0).view(1, 1, 3, 3)
    mean = mean_logits(answer, image, torch.ones(1, 1), tta="mirror_translate")
    up_left, down_right = [[4, 3, 4], [1, 0, 1], [4, 3, 4]], [[4, 5, 4], [7, 8, 7], [4, 5, 4]]
    assert [view[0, 0].tolist() for view in seen[1::2]] == [up_left, down_right]
    assert all(torch.equal(seen[index + 1], seen[index].flip(3)) for index in (1, 3))
    assert mean.item() == pytest.approx((1 + 2) / 4 + (4 + 8) / 8 + (16 + 32) / 8)


@pytest.mark.parametrize("tta", ["mirror", "mirror_translate"])
def test_accuracy_with_augmentation_is_reported_separately_and_the_plain_one_is_as_without(tta: str) -> None:
    dataset = tiny_dataset()
    model = tiny_model(dataset)
    plain, augmented = (evaluate(model, dataset, one_rank(), step=0, tta=name) for name in ("none", tta))
    assert plain is not None
    assert augmented is not None
    assert replace(augmented, correct_tta=None) == plain
    assert plain.accuracies_apart == {}
    assert set(augmented.accuracies_apart) == {"accuracy_tta"}


def test_a_model_that_sees_no_difference_between_views_gains_nothing() -> None:
    dataset = tiny_dataset()
    model = torch.nn.Sequential(torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))
    result = evaluate(model, dataset, one_rank(), step=0, tta="mirror")
    assert result is not None
    assert result.correct_tta == result.correct


def counted_with_views(group: Group) -> Evaluation | None:
    dataset = tiny_dataset()
    return evaluate(tiny_model(dataset), dataset, group, step=0, tta="mirror_translate")


def test_any_number_of_ranks_finds_the_same_with_augmentation(gang: Gang) -> None:
    (alone,) = gang.run(1, counted_with_views)
    assert {result.correct_tta for result in gang.run(3, counted_with_views)} == {alone.correct_tta}

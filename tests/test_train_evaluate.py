"""Evaluation counts every sample once, whatever the number of ranks, and changes nothing in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from train_gang import TINY, Gang, one_rank, open_gang

from clusterddp.train.augment import normalize
from clusterddp.train.data import Dataset, load_dataset
from clusterddp.train.evaluate import Evaluation, evaluate
from clusterddp.train.group import Group, averaged_buffers
from clusterddp.train.models import build_model
from clusterddp.train.spec import TrainSpec


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with open_gang() as gang:
        yield gang


def tiny_dataset(test_samples: int = 101) -> Dataset:
    spec = TrainSpec.from_json(TINY | {"samples": 10 * test_samples})
    whole = load_dataset(spec, device=torch.device("cpu"), prepare=True)
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


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
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


def test_evaluation_that_is_told_to_stop_gives_no_result() -> None:
    dataset = tiny_dataset()
    model = tiny_model(dataset)
    assert evaluate(model, dataset, one_rank(), step=0, stop=lambda: True) is None
    assert model.training


def buffers_inside_and_after(group: Group) -> tuple[float, float]:
    norm = torch.nn.BatchNorm2d(1)
    assert norm.running_mean is not None
    norm.running_mean.fill_(group.rank)
    with averaged_buffers(norm, group):
        inside = norm.running_mean.item()
    return inside, norm.running_mean.item()


def test_buffers_are_the_mean_over_the_ranks_inside_and_each_ranks_own_outside(gang: Gang) -> None:
    assert gang.run(3, buffers_inside_and_after) == [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]

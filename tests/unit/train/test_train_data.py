from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.dataset import Dataset, batch_indices, epoch_order, load_dataset
from clusterddp.train.data.shapes import generate_shapes

CPU = torch.device("cpu")


def load(**train: Any) -> Dataset:
    return load_dataset(TrainSpec(**train))


def test_an_epochs_order_is_a_permutation_that_only_seed_and_epoch_change() -> None:
    order = epoch_order(1000, 7, 2)
    torch.manual_seed(99)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(epoch_order(1000, 7, 2), order)
    assert not torch.equal(epoch_order(1000, 7, 3), order)
    assert not torch.equal(epoch_order(1000, 8, 2), order)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_all_ranks_and_micro_batches_of_a_step_cover_its_samples_once(world: int, accumulate: int) -> None:
    order = epoch_order(100, 0, 0)
    per_step = world * accumulate * 5
    for seen in range(7, 100 - per_step, per_step):
        parts = [
            batch_indices(order, seen, world=world, rank=rank, batch_size=5, micro=micro)
            for rank in range(world)
            for micro in range(accumulate)
        ]
        assert torch.cat(parts).sort().values.tolist() == order[seen : seen + per_step].sort().values.tolist()


def test_n_ranks_and_one_rank_that_accumulates_n_times_see_the_same_chunks() -> None:
    order = epoch_order(60, 1, 0)
    for seen in range(0, 60, 12):
        ranks = [batch_indices(order, seen, world=4, rank=rank, batch_size=3, micro=0) for rank in range(4)]
        micros = [batch_indices(order, seen, world=1, rank=0, batch_size=3, micro=micro) for micro in range(4)]
        assert torch.equal(torch.stack(ranks), torch.stack(micros))


def test_shapes_are_the_same_for_a_seed_and_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (load(dataset="shapes", samples=50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.train_images, again.train_images)
    assert torch.equal(first.test_labels, again.test_labels)
    assert not torch.equal(first.train_images, other.train_images)


def test_shapes_have_a_fifth_as_test_images_and_none_of_them_twice() -> None:
    dataset = load(dataset="shapes", samples=1000)
    images = torch.cat((dataset.train_images, dataset.test_images)).flatten(1)
    assert (len(dataset.train_images), len(dataset.test_images)) == (1000, 200)
    assert len(images.unique(dim=0)) == 1200


def test_shapes_have_all_classes_in_equal_shares_and_random_order() -> None:
    images, labels = generate_shapes(1000, seed=0)
    assert labels.bincount().tolist() == [100] * 10
    assert not torch.equal(labels, torch.arange(1000) % 10)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (1000, 3, 32, 32))


def test_generated_sets_have_ten_thousand_images_by_default() -> None:
    assert [len(load(dataset=name).train_images) for name in ("shapes", "random")] == [10_000, 10_000]


def test_mean_and_deviation_of_shapes_are_those_of_the_train_images() -> None:
    dataset = load(dataset="shapes", samples=200)
    pixels = dataset.train_images.double() / 255
    torch.testing.assert_close(torch.tensor(dataset.mean).double(), pixels.mean((0, 2, 3)), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(dataset.std).double(), pixels.std((0, 2, 3)), atol=1e-4, rtol=0)


def test_random_data_carries_the_warning_that_its_accuracy_means_nothing() -> None:
    dataset = load(dataset="random", samples=20)
    assert dataset.label == "random noise"
    assert "mean nothing" in str(dataset.warning)
    assert load(dataset="shapes", samples=20).warning is None


def test_the_trainers_data_rooms_do_not_import_torchvision() -> None:
    code = """
import sys, torch
from clusterddp.spec.train import TrainSpec
from clusterddp.train import models
from clusterddp.train.data import augment, dataset
spec = TrainSpec(model="fastnet", dataset="shapes", samples=10)
models.build_model(spec, dataset.load_dataset(spec))
print([name for name in ("torchvision", "PIL", "tensorboard") if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.strip() == "[]"

"""The data of a run: each set as uint8 tensors on the device, and which samples a rank sees at which step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.train import cifar10, fashion_mnist
from clusterddp.train.download import default_data_dir
from clusterddp.train.hashing import derive_seed
from clusterddp.train.shapes import CLASSES, generate_shapes

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec

_GENERATED_SAMPLES = 10_000
_TRAIN, _TEST, _ORDER = 1, 2, 3  # what a seed derived from the spec's is for


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """A whole data set on one device.

    Images are uint8 [n, channel, 32, 32], labels int64 [n]. `mean` and `std` are per channel, of pixels in 0..1.
    `label` is how to call a figure that was got on it; `warning` says what such a figure does not mean.
    """

    name: str
    label: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    warning: str | None = None


def load_dataset(spec: TrainSpec, *, device: torch.device, prepare: bool) -> Dataset:
    """Read or generate the data set of `spec`, wholly onto `device`.

    With `prepare` (and `spec.download`) a set that is missing is downloaded, once per host. Every rank of the host may
    pass it: the first takes the lock, the others wait for it and then read. Without it a missing set is an error.

    Raises:
        ClusterddpError: the files are missing, damaged or unsafe, or there are fewer images than `spec.samples`.
    """
    if spec.dataset == "shapes":
        return _generated_shapes(spec, device)
    if spec.dataset == "random":
        return _random_noise(spec, device)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_dir = Path(spec.data_dir).expanduser() if spec.data_dir else default_data_dir()
    download = prepare and spec.download
    if spec.dataset == "cifar10":
        train, test, label = cifar10.read_cifar10(data_dir, download=download)
        mean, std = cifar10.MEAN, cifar10.STD
    else:
        train, test, label = fashion_mnist.read_fashion_mnist(data_dir, download=download)
        mean, std = fashion_mnist.MEAN, fashion_mnist.STD
    images, labels = train
    count = spec.samples or len(images)
    if count > len(images):
        raise ClusterddpError(
            f"train.samples is {count:,}, but {label} has {len(images):,} train images",
            hint="leave train.samples out to use all of them",
        )
    return Dataset(
        name=spec.dataset,
        label=label if count == len(images) else f"{label}, first {count:,} train images",
        train_images=images[:count].to(device),
        train_labels=labels[:count].to(device),
        test_images=test[0].to(device),
        test_labels=test[1].to(device),
        num_classes=10,
        mean=mean,
        std=std,
    )


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the `n` train samples in `epoch` (int64, on the CPU), the same on every rank."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, _ORDER, epoch)))


def steps_per_epoch(n: int, *, world: int, batch_size: int, accumulate: int) -> int:
    """Return the number of optimizer steps in an epoch; the last, incomplete global batch is dropped.

    Raises:
        ClusterddpError: not even one global batch can be filled.
    """
    per_step = world * batch_size * accumulate
    if n < per_step:
        raise ClusterddpError(
            f"a global batch of {per_step:,} ({world} ranks x batch {batch_size} x accumulate {accumulate}) "
            f"is more than the {n:,} train images",
            hint="lower train.batch_size or train.accumulate, or raise train.samples",
        )
    return n // per_step


def batch_indices(
    order: Tensor, step: int, *, world: int, rank: int, batch_size: int, accumulate: int, micro: int
) -> Tensor:
    """Return the sample indices (int64, [batch_size]) of micro-batch `micro` of `rank` in the epoch's step `step`.

    A step covers the next world x batch_size x accumulate samples of `order`, cut into chunks of `batch_size`; chunk
    micro x world + rank is the one. So N ranks and one rank that accumulates N times see the same chunks.
    """
    first_chunk = step * world * accumulate
    start = (first_chunk + micro * world + rank) * batch_size
    indices = order[start : start + batch_size]
    assert len(indices) == batch_size, f"step {step} lies beyond the epoch"
    return indices


def _generated_shapes(spec: TrainSpec, device: torch.device) -> Dataset:
    count = spec.samples or _GENERATED_SAMPLES
    train = generate_shapes(count, derive_seed(spec.seed, _TRAIN))
    test = generate_shapes(_test_count(count), derive_seed(spec.seed, _TEST))
    return _generated(spec, device, train, test, num_classes=len(CLASSES), label="shapes (generated)")


def _random_noise(spec: TrainSpec, device: torch.device) -> Dataset:
    """Return custom data that has the right form and no content, to try machines without any file."""
    count = spec.samples or _GENERATED_SAMPLES
    train = _noise(count, derive_seed(spec.seed, _TRAIN))
    test = _noise(_test_count(count), derive_seed(spec.seed, _TEST))
    warning = "dataset random is noise with random labels: its speed is real, its loss and accuracy mean nothing"
    return _generated(spec, device, train, test, num_classes=10, label="random noise", warning=warning)


def _test_count(train_count: int) -> int:
    return max(1, train_count // 5)


def _noise(count: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=random)


def _generated(
    spec: TrainSpec,
    device: torch.device,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    label: str,
    warning: str | None = None,
) -> Dataset:
    std, mean = torch.std_mean(train[0].float().div_(255), dim=(0, 2, 3))
    return Dataset(
        name=spec.dataset,
        label=label,
        train_images=train[0].to(device),
        train_labels=train[1].to(device),
        test_images=test[0].to(device),
        test_labels=test[1].to(device),
        num_classes=num_classes,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        warning=warning,
    )

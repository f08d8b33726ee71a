"""The data of a run: each set as uint8 tensors on the device, and which samples a rank sees at which step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data import cifar10, fashion_mnist
from clusterddp.train.data.augment import derive_seed
from clusterddp.train.data.download import default_data_dir
from clusterddp.train.data.image_files import demand_memory, mean_and_std, read_images
from clusterddp.train.data.shapes import CLASSES, generate_shapes

Split = tuple[Tensor, Tensor]

_GENERATED_SAMPLES = 10_000
_TRAIN, _TEST, _ORDER = 1, 2, 3  # what a seed derived from the spec's is for


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """A whole data set on one device.

    Images are uint8 [n, channel, side, side], as they are kept; the model sees them enlarged to `image_size`. Labels
    are int64 [n]. `mean` and `std` are per channel, of pixels in 0..1. `label` is how to call a figure that was got on
    it; `warning` limits what such a figure means.
    """

    name: str
    label: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    warning: str | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of an image that the model sees: channel, height, width."""
        return self.train_images.shape[1], self.image_size, self.image_size

    def to(self, device: torch.device) -> Dataset:
        """Return the set on `device`.

        Raises: ClusterddpError: a GPU has no memory for it.
        """
        if device.type == "cuda":
            demand_memory(self.label, self.train_images.numel() + self.test_images.numel(), device=device)
        return replace(
            self,
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )


def load_dataset(spec: TrainSpec) -> Dataset:
    """Read or generate the data set of `spec`, wholly into memory.

    A set that is missing is downloaded, once per host, unless `spec.download` is false: the first rank takes the lock,
    the others wait for it and then read.
    Raises: ClusterddpError: the files are missing, damaged or unsafe, or there are fewer images than `spec.samples`.
    """
    if spec.dataset == "shapes":
        count = spec.samples or _GENERATED_SAMPLES
        train = generate_shapes(count, derive_seed(spec.seed, _TRAIN))
        test = generate_shapes(_test_count(count), derive_seed(spec.seed, _TEST))
        return _generated(spec, train, test, num_classes=len(CLASSES), label="shapes (generated)")
    if spec.dataset == "random":
        return _random_noise(spec)
    data_dir = Path(spec.data_dir).expanduser() if spec.data_dir else default_data_dir()
    if spec.dataset == "cifar10":
        train, test, label = cifar10.read_cifar10(data_dir, download=spec.download)
        train, label = _first_samples(spec, train, label)
        return _dataset(spec, train, test, label=label, num_classes=10, mean=cifar10.MEAN, std=cifar10.STD)
    if spec.dataset == "fashion_mnist":
        train, test, label = fashion_mnist.read_fashion_mnist(data_dir, download=spec.download)
        train, label = _first_samples(spec, train, label)
        grey = fashion_mnist
        return _dataset(spec, train, test, label=label, num_classes=10, mean=grey.MEAN, std=grey.STD)
    read = read_images(spec.dataset, data_dir, image_size=spec.image_size, samples=spec.samples, download=spec.download)
    mean, std = mean_and_std(read.train[0])
    return _dataset(spec, read.train, read.test, label=read.label, num_classes=read.num_classes, mean=mean, std=std)


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


def _first_samples(spec: TrainSpec, train: Split, label: str) -> tuple[Split, str]:
    """Cut training images to the first `spec.samples`. Raises ClusterddpError: there are fewer."""
    count, there = spec.samples or len(train[1]), len(train[1])
    if count > there:
        raise ClusterddpError(
            f"train.samples is {count:,}, but {label} has {there:,} train images",
            hint="leave train.samples out to use all of them",
        )
    if count == there:
        return train, label
    return (train[0][:count], train[1][:count]), f"{label}, first {count:,} train images"


def _random_noise(spec: TrainSpec) -> Dataset:
    """Return custom data that has the right form and no content, to try machines without any file."""
    count = spec.samples or _GENERATED_SAMPLES
    train = _noise(count, derive_seed(spec.seed, _TRAIN))
    test = _noise(_test_count(count), derive_seed(spec.seed, _TEST))
    warning = "dataset random is noise with random labels: its speed is real, its loss and accuracy mean nothing"
    return _generated(spec, train, test, num_classes=10, label="random noise", warning=warning)


def _test_count(train_count: int) -> int:
    return max(1, train_count // 5)


def _noise(count: int, seed: int) -> Split:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=random)


def _generated(
    spec: TrainSpec, train: Split, test: Split, *, num_classes: int, label: str, warning: str | None = None
) -> Dataset:
    deviations, means = torch.std_mean(train[0].float().div_(255), dim=(0, 2, 3))
    mean, std = tuple(means.tolist()), tuple(deviations.tolist())
    return _dataset(spec, train, test, label=label, num_classes=num_classes, mean=mean, std=std, warning=warning)


def _dataset(
    spec: TrainSpec,
    train: Split,
    test: Split,
    *,
    label: str,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    warning: str | None = None,
) -> Dataset:
    """Raise ClusterddpError where images are too small for their augmentation; for most sets the spec's rules do."""
    side = train[0].shape[2]
    for name, pixels in (("translate", spec.translate), ("cutout", spec.cutout)):
        if pixels >= side:
            raise ClusterddpError(f"train.{name} is {pixels}, expected less than {side}, the side of the images")
    return Dataset(
        name=spec.dataset,
        label=label,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        num_classes=num_classes,
        image_size=max(spec.image_size or 0, side),
        mean=mean,
        std=std,
        warning=warning,
    )

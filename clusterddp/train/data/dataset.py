"""The data of a run: each set as uint8 tensors on the device, and which samples a rank sees at which step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import GENERATED, TrainSpec
from clusterddp.train.data import cifar10
from clusterddp.train.data.augment import derive_seed
from clusterddp.train.data.download import default_data_dir
from clusterddp.train.data.image_files import Split, demand_memory, demand_samples, mean_and_std, read_images
from clusterddp.train.data.shapes import CLASSES, generate_shapes

_GENERATED_SAMPLES = 10_000
_TRAIN, _TEST, _ORDER = 1, 2, 3  # what a seed derived from the spec's is for


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """A whole data set on one device.

    Images are uint8 [n, channel, side, side], as they are kept; the model sees them enlarged to `image_size`. Labels
    are int64 [n]. `mean` and `std` are per channel, of pixels in 0..1. `label` is how to call a figure that was got on
    it; `warning` limits what such a figure means.
    """

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
        """Return the set on `device`."""
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
    """
    if spec.dataset in GENERATED:
        return _generate(spec)
    data_dir = Path(spec.data_dir).expanduser() if spec.data_dir else default_data_dir()
    if spec.dataset != "cifar10":
        train, test, label, num_classes = read_images(spec, data_dir)
        mean, std = mean_and_std(train[0])
        return _dataset(spec, train, test, label=label, num_classes=num_classes, mean=mean, std=std)
    train, test, label = cifar10.read_cifar10(data_dir, download=spec.download)
    count, there = spec.samples or len(train[1]), len(train[1])
    demand_samples(count, there, label)
    if count < there:
        train, label = (train[0][:count], train[1][:count]), f"{label}, first {count:,} train images"
    return _dataset(spec, train, test, label=label, num_classes=10, mean=cifar10.MEAN, std=cifar10.STD)


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the `n` train samples in `epoch` (int64, on the CPU), the same on every rank."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, _ORDER, epoch)))


def batch_indices(order: Tensor, seen: int, *, world: int, rank: int, batch_size: int, micro: int) -> Tensor:
    """Return the sample indices (int64, [batch_size]) of micro-batch `micro` of `rank` in a step.

    The step covers the samples of `order` after the first `seen`, cut into chunks of `batch_size`; chunk
    micro x world + rank is the one. So N ranks and one rank that accumulates N times see the same chunks.
    """
    start = seen + (micro * world + rank) * batch_size
    indices = order[start : start + batch_size]
    assert len(indices) == batch_size, f"a step after {seen} samples lies beyond the epoch"
    return indices


def _generate(spec: TrainSpec) -> Dataset:
    count = spec.samples or _GENERATED_SAMPLES
    draw = generate_shapes if spec.dataset == "shapes" else _noise
    train = draw(count, derive_seed(spec.seed, _TRAIN))
    test = draw(max(1, count // 5), derive_seed(spec.seed, _TEST))
    deviations, means = torch.std_mean(train[0].float().div_(255), dim=(0, 2, 3))
    mean, std = tuple(means.tolist()), tuple(deviations.tolist())
    if spec.dataset == "shapes":
        return _dataset(spec, train, test, label="shapes (generated)", num_classes=len(CLASSES), mean=mean, std=std)
    warning = "dataset random is noise with random labels: its speed is real, its loss and accuracy mean nothing"
    return _dataset(spec, train, test, label="random noise", num_classes=10, mean=mean, std=std, warning=warning)


def _noise(count: int, seed: int) -> Split:
    """Draw data of the right form without content, to try machines without any file."""
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=random)


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

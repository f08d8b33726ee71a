"""The models by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import fits_fastnet
from clusterddp.train.data.augment import normalize
from clusterddp.train.models.fastnet import FastNet
from clusterddp.train.models.resnet import ResNet18, has_large_stem

if TYPE_CHECKING:
    from clusterddp.spec.train import TrainSpec
    from clusterddp.train.data.dataset import Dataset

_WHITENING_IMAGES = 2000  # 1.9 million patches of 2x2 pixels: far more than a 12x12 covariance needs


def build_model(spec: TrainSpec, dataset: Dataset, *, is_restored: bool = False) -> nn.Module:
    """Build the model of `spec` for `dataset` on the CPU, with weights that depend only on `spec.seed` and the data.

    Every rank computes the same start; where hosts round differently, DDP's construction makes rank 0's the one that
    counts (it broadcasts parameters and buffers, frozen ones too). The global random state is left as it was.
    `is_restored`: the weights will come from a checkpoint, so none is computed from the data.
    """
    channels = dataset.train_images.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        if spec.model == "resnet18":
            large = has_large_stem(dataset.image_size)
            return ResNet18(channels=channels, num_classes=dataset.num_classes, large_stem=large)
        side = dataset.image_size
        if not fits_fastnet(side):
            raise ClusterddpError(
                f"fastnet is for images of 32x32 pixels (25 to 48 will do), and these have {side}x{side}",
                hint="train.model=resnet18 takes any size, train.image_size=32 makes them fit",
            )
        model = FastNet(channels=channels, num_classes=dataset.num_classes, width=spec.width)
    if not is_restored:
        images = _some_images(dataset).cpu()
        model.whiten_patches(normalize(images, mean=dataset.mean, std=dataset.std, size=dataset.image_size))
    return model


def _some_images(dataset: Dataset) -> Tensor:
    """Return the first images; of a data set ordered by class, such as a folder, evenly spaced ones."""
    images, labels = dataset.train_images, dataset.train_labels
    if len(labels) <= _WHITENING_IMAGES or bool((labels[1:] < labels[:-1]).any()):
        return images[:_WHITENING_IMAGES]
    return images[torch.arange(_WHITENING_IMAGES, device=images.device) * len(images) // _WHITENING_IMAGES]

"""Augmentation in batches on the device, where a sample's look depends on (seed, epoch, sample index) alone.

All randomness is a hash of those three numbers, in integer tensor arithmetic: the world size, the batch size and the
device cannot change what a sample looks like, and nothing of it has to be kept in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from clusterddp.train.data.hashing import random_bits

_CUTOUT_STREAMS = 1 << 32  # the first of its streams, one an epoch; flips have stream 0, shifts those from 1 on


def augment(
    images: Tensor,
    indices: Tensor,
    *,
    mode: str,
    seed: int,
    epoch: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    max_shift: int = 2,
    cutout: int = 0,
    size: int | None = None,
) -> Tensor:
    """Augment (`mode`: none, flip, flip_translate) and normalise a batch.

    Flips alternate: the hash decides whether a sample is mirrored in the even or in the odd epochs, so that two epochs
    show both sides, which beats a coin per epoch (Source: arXiv:2404.00498, "alternating flip"). Translation is by up
    to `max_shift` pixels each way; pixels from outside are reflected. `cutout` is the side of a square, somewhere in
    each image, that is blanked to the channels' means. After all that, images smaller than `size` are enlarged to it.

    images: uint8, [batch, channel, height, width]; indices: int64, [batch], the samples' places in the train set.
    """
    if mode not in ("none", "flip", "flip_translate"):
        raise ValueError(f"augment: {mode!r} is none of none, flip, flip_translate")
    indices = indices.to(images.device)
    if mode != "none":
        flip = (random_bits(indices, seed=seed, stream=0) + epoch) % 2 == 1
        shift = max_shift if mode == "flip_translate" else 0
        images = _flip_and_shift(images, flip, *_shifts(indices, seed, epoch, shift))
    images = normalize(images, mean=mean, std=std, dtype=dtype, channels_last=channels_last)
    if cutout:
        images = _cut_out(images, indices, cutout, seed, epoch)
    return _enlarge(images, size)


def normalize(
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    size: int | None = None,
) -> Tensor:
    """Bring uint8 images [batch, channel, height, width] to mean 0 and deviation 1 per channel, then to `size`."""
    center, scale = _center_and_scale(tuple(mean), tuple(std), images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _enlarge(images.to(torch.float32, memory_format=layout).sub_(center).mul_(scale).to(dtype), size)


def _enlarge(images: Tensor, size: int | None) -> Tensor:
    """Enlarge square images [batch, channel, side, side] to `size` x `size`, bilinearly, as torchvision's resize does.

    Weights sum up to one, so it is the same before and after the pixels are normalised.
    """
    if size is None or size == images.shape[-1]:
        return images
    return functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)


@lru_cache(maxsize=8)  # a copy to a GPU in every step would wait for the GPU
def _center_and_scale(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for pixels in 0..255, what to subtract and what to multiply by (float32, [1, channel, 1, 1])."""
    center = torch.tensor(mean, dtype=torch.float32).mul_(255).view(1, -1, 1, 1)
    scale = torch.tensor(std, dtype=torch.float32).mul_(255).reciprocal_().view(1, -1, 1, 1)
    return center.to(device), scale.to(device)


def _shifts(indices: Tensor, seed: int, epoch: int, max_shift: int) -> tuple[Tensor, Tensor]:
    """Draw the vertical and the horizontal shift of each sample, uniform in -max_shift..max_shift (int64, [batch])."""
    bits = random_bits(indices, seed=seed, stream=epoch + 1)
    choices = 2 * max_shift + 1
    return ((bits & 0xFFFF) * choices >> 16) - max_shift, ((bits >> 16) * choices >> 16) - max_shift


def _flip_and_shift(images: Tensor, flip: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Gather each output pixel from where it lay: mirrored where `flip` is set, then shifted, reflected at the edge."""
    batch, channels, height, width = images.shape
    rows = _reflect(torch.arange(height, device=images.device) - down[:, None], height)
    columns = _reflect(torch.arange(width, device=images.device) - right[:, None], width)
    columns = torch.where(flip[:, None], width - 1 - columns, columns)
    source = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, height * width)
    pixels = images.reshape(batch, channels, height * width).gather(2, source.expand(-1, channels, -1))
    return pixels.view(batch, channels, height, width)


def _cut_out(images: Tensor, indices: Tensor, side: int, seed: int, epoch: int) -> Tensor:
    """Zero a square in each normalised image, in place; every place inside is as likely (Source: airbench96)."""
    height, width = images.shape[2:]
    bits = random_bits(indices, seed=seed, stream=_CUTOUT_STREAMS + epoch)
    top = (bits & 0xFFFF) * (height - side + 1) >> 16
    left = (bits >> 16) * (width - side + 1) >> 16
    rows = torch.arange(height, device=images.device) - top[:, None]
    columns = torch.arange(width, device=images.device) - left[:, None]
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.masked_fill_(inside[:, None], 0)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Map positions just outside 0..size-1 to their mirror image inside; the edge itself is not repeated."""
    return size - 1 - (size - 1 - position.abs()).abs()

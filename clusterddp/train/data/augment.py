"""Augmentation in batches on the device; a sample's transform depends only on (seed, epoch, sample index).

All randomness is a hash of those three numbers, in integer tensor arithmetic: it does not depend on the world size, the
batch size or the device, and a checkpoint holds none of it. It is drawn for all samples once an epoch; a batch looks up
its own, in few operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

_Number = TypeVar("_Number", int, Tensor)
_MASK = 0xFFFFFFFF
_CUTOUT_STREAMS = 1 << 32  # the first of its streams, one an epoch; flips have stream 0, shifts those from 1 on


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A table of choices [choice, pixel], and the choice of each sample (int64, [sample])."""

    table: Tensor
    choices: Tensor

    def of(self, indices: Tensor) -> Tensor:
        """Look up the rows of a batch's samples: [batch, pixel]."""
        return self.table[self.choices[indices]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transforms:
    """How all samples are transformed in an epoch; None: not in this respect."""

    rows: Choice | None = None
    """Where each row of the image comes from: the place of its first pixel."""
    columns: Choice | None = None
    """Which column of the image each column comes from."""
    blank_rows: Choice | None = None
    """Which rows cutout's square reaches."""
    blank_columns: Choice | None = None


def draw_transforms(
    num_samples: int,
    *,
    mode: str,
    seed: int,
    epoch: int,
    side: int,
    max_shift: int = 2,
    cutout: int = 0,
    device: torch.device | None = None,
) -> Transforms:
    """Draw the transforms of samples of `side` x `side` pixels for an epoch. `mode`: none, flip, flip_translate.

    Flips alternate: the hash decides whether a sample is mirrored in the even or in the odd epochs, so that two epochs
    show both sides, which beats a coin per epoch (Source: arXiv:2404.00498, "alternating flip"). Translation is by up
    to `max_shift` pixels each way; pixels from outside are reflected. `cutout` is the side of a square, somewhere in
    each image, that is blanked to the channels' means.
    """
    if mode not in ("none", "flip", "flip_translate"):
        raise ValueError(f"augment: {mode!r} is none of none, flip, flip_translate")
    indices, pixels = torch.arange(num_samples, device=device), torch.arange(side, device=device)
    rows = columns = blank_rows = blank_columns = None
    if mode != "none":
        shift = max_shift if mode == "flip_translate" else 0
        num_shifts = 2 * shift + 1
        flip = (random_bits(indices, seed=seed, stream=0) + epoch) % 2
        down, right = _draw_two(indices, num_shifts, seed=seed, stream=epoch + 1)
        moved = _reflect(pixels - torch.arange(-shift, shift + 1, device=device)[:, None], side)
        rows = Choice(moved * side, down)
        columns = Choice(torch.cat((moved, side - 1 - moved)), right + flip * num_shifts)
    if cutout:
        num_places = side - cutout + 1
        top, left = _draw_two(indices, num_places, seed=seed, stream=_CUTOUT_STREAMS + epoch)
        behind = pixels - torch.arange(num_places, device=device)[:, None]
        inside = (behind >= 0) & (behind < cutout)
        blank_rows, blank_columns = Choice(inside, top), Choice(inside, left)
    return Transforms(rows=rows, columns=columns, blank_rows=blank_rows, blank_columns=blank_columns)


def augment(
    images: Tensor,
    indices: Tensor,
    transforms: Transforms,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    channels_last: bool = False,
    size: int | None = None,
) -> Tensor:
    """Apply the drawn transforms to a batch and normalise it; then enlarge images that are smaller than `size` to it.

    images: uint8, [batch, channel, side, side]; indices: int64, [batch], the samples' places in the train set.
    """
    if transforms.rows is not None and transforms.columns is not None:
        images = _take_pixels(images, transforms.rows.of(indices), transforms.columns.of(indices))
    images = normalize(images, mean=mean, std=std, channels_last=channels_last)
    if transforms.blank_rows is not None and transforms.blank_columns is not None:
        rows, columns = transforms.blank_rows.of(indices), transforms.blank_columns.of(indices)
        images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)
    return _enlarge(images, size)


def normalize(
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    channels_last: bool = False,
    size: int | None = None,
) -> Tensor:
    """Bring uint8 images [batch, channel, height, width] to mean 0 and deviation 1 per channel, then to `size`."""
    center, scale = _center_and_scale(tuple(mean), tuple(std), images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _enlarge(images.to(torch.float32, memory_format=layout).sub_(center).mul_(scale), size)


def random_bits(indices: Tensor, *, seed: int, stream: int) -> Tensor:
    """Return 32 random bits (int64, 0..2^32-1) for each index of an int64 tensor; every (seed, stream) has its own."""
    key = derive_seed(seed, stream)
    return _mix(_mix((indices & _MASK) ^ key) ^ _mix(key + 1 & _MASK))


def derive_seed(*numbers: int) -> int:
    """Return a seed that belongs to `numbers`, such as (seed, epoch): 0..2^32-1, all that a torch generator takes."""
    key = 0
    for number in numbers:
        key = _mix(key ^ number & _MASK)
        key = _mix(key + 1 + (number >> 32) & _MASK)
    return key


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


def _draw_two(indices: Tensor, choices: int, *, seed: int, stream: int) -> tuple[Tensor, Tensor]:
    """Draw two numbers in 0..choices-1 for each sample, each as likely (int64, [sample])."""
    bits = random_bits(indices, seed=seed, stream=stream)
    return (bits & 0xFFFF) * choices >> 16, (bits >> 16) * choices >> 16


def _take_pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Gather each pixel from where its row begins (int64, [batch, side]) and its column."""
    batch, channels, height, width = images.shape
    source = (rows[:, :, None] + columns[:, None, :]).view(batch, 1, height * width)
    pixels = images.reshape(batch, channels, height * width).gather(2, source.expand(-1, channels, -1))
    return pixels.view(batch, channels, height, width)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Map positions just outside 0..size-1 to their mirror image inside; the edge itself is not repeated."""
    return size - 1 - (size - 1 - position.abs()).abs()


def _mix(x: _Number) -> _Number:
    """Scramble 32 bits one to one; both factors are below 2^31, so that no product leaves int64.

    Source: Chris Wellons, "Prospecting for Hash Functions" (2018), nullprogram.com/blog/2018/07/31.
    """
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _MASK
    x = (x ^ (x >> 12)) * 0x297A2D39 & _MASK
    return x ^ (x >> 15)

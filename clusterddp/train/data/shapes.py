"""`shapes`: a generated data set that can be learned, so that a demo needs neither network nor files.

Ten classes of drawn shapes, 32x32 pixels in colour: any place, size, tilt and colours, on an uneven background, with
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SIZE = 32
_TILT = 0.35  # radians either way: a square stays a square, a plus never becomes a saltire
_RADIUS = (6.0, 13.0)  # pixels
_NOISE = 32  # half the width of the uniform noise, in grey levels
_CONTRAST = 55.0  # the least distance between shape and background in grey levels, along their farthest channel

Field = Callable[[Tensor, Tensor], Tensor]
"""The distance of a point from its shape (negative: inside), in units of the shape's radius.

x and y: [count, 32, 32], y downwards.
"""


def generate_shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` images, the classes in equal shares and random order.

    Returns images (uint8, [count, 3, 32, 32]) and labels (int64, [count]), the same for the same arguments.
    """
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(CLASSES)
    labels = labels[torch.randperm(count, generator=random)]
    images = torch.empty(count, 3, SIZE, SIZE, dtype=torch.uint8)
    for label, field in enumerate(CLASSES.values()):
        places = (labels == label).nonzero().flatten()
        images[places] = _draw(field, len(places), random)
    return images, labels


def _draw(field: Field, count: int, random: torch.Generator) -> Tensor:
    """Draw `count` images of one shape (uint8, [count, 3, 32, 32])."""
    coverage = _coverage(field, count, random)[:, None]
    background, shape = _colours(count, random)
    slope = _uniform(count, -1.5, 1.5, random)[:, None, None, None]
    ramp = torch.linspace(-16, 16, SIZE)
    shading = slope * ramp.view(1, 1, 1, SIZE) + slope.flip(0) * ramp.view(1, 1, SIZE, 1)
    noise = torch.randint(0, 2 * _NOISE + 1, (count, 3, SIZE, SIZE), generator=random, dtype=torch.uint8)
    images = (background + shading).lerp(shape, coverage).add_(noise).sub_(_NOISE)
    return images.clamp_(0, 255).to(torch.uint8)


def _coverage(field: Field, count: int, random: torch.Generator) -> Tensor:
    """Return how much of each pixel the shape covers (0..1, [count, 32, 32]), shapes wholly inside the image."""
    radius = _uniform(count, *_RADIUS, random)
    room = SIZE / 2 - radius
    x0 = (SIZE - 1) / 2 + room * _uniform(count, -1, 1, random)
    y0 = (SIZE - 1) / 2 + room * _uniform(count, -1, 1, random)
    tilt = _uniform(count, -_TILT, _TILT, random)
    pixel = torch.arange(SIZE)
    across = (pixel.view(1, 1, SIZE) - x0.view(-1, 1, 1)) / radius.view(-1, 1, 1)
    down = (pixel.view(1, SIZE, 1) - y0.view(-1, 1, 1)) / radius.view(-1, 1, 1)
    cos, sin = tilt.cos().view(-1, 1, 1), tilt.sin().view(-1, 1, 1)
    distance = field(across * cos + down * sin, down * cos - across * sin)
    return (0.5 - distance * radius.view(-1, 1, 1)).clamp_(0, 1)


def _colours(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return background and shape colours ([count, 3, 1, 1], 0..255) that differ by `_CONTRAST` at least."""
    background = _uniform(count * 3, 0, 255, random).view(count, 3)
    shape = _uniform(count * 3, 0, 255, random).view(count, 3)
    difference = shape - background
    largest = difference.abs().amax(1, keepdim=True).clamp_min(1.0)
    stretched = background + difference * (_CONTRAST / largest).clamp_min(1.0)
    # A colour pushed out of 0..255 goes the other way instead: one of the two sides always has the room.
    inside = ((stretched >= 0) & (stretched <= 255)).all(1, keepdim=True)
    shape = torch.where(inside, stretched, (2 * background - stretched).clamp(0, 255))
    return background.view(count, 3, 1, 1), shape.view(count, 3, 1, 1)


def _uniform(count: int, low: float, high: float, random: torch.Generator) -> Tensor:
    return torch.rand(count, generator=random) * (high - low) + low


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    half = math.sqrt(3) / 2
    return torch.maximum(y, half * x.abs() - 0.5 * y) - 0.5


def _plus(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.minimum(x, y) - 0.25, torch.maximum(x, y) - 0.95)


def _saltire(x: Tensor, y: Tensor) -> Tensor:
    half = math.sqrt(0.5)
    return _plus((x + y) * half, (x - y) * half)


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five points; every half of a point is one straight edge from its tip to the dent beside it."""
    turn = math.pi / 5
    angle = (torch.remainder(torch.atan2(x, -y) + turn, 2 * turn) - turn).abs()
    r = torch.hypot(x, y)
    dent_x, dent_y = 0.42 * math.cos(turn), 0.42 * math.sin(turn)
    length = math.hypot(1 - dent_x, dent_y)
    return (r * angle.cos() - 1) * (dent_y / length) + r * angle.sin() * ((1 - dent_x) / length)


CLASSES: dict[str, Field] = {
    "disc": lambda x, y: torch.hypot(x, y) - 1,
    "ring": lambda x, y: (torch.hypot(x, y) - 0.78).abs() - 0.22,
    "crescent": lambda x, y: torch.maximum(torch.hypot(x, y) - 1, 0.8 - torch.hypot(x - 0.5, y)),
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.8,
    "frame": lambda x, y: (torch.maximum(x.abs(), y.abs()) - 0.65).abs() - 0.2,
    "triangle": _triangle,
    "plus": _plus,
    "saltire": _saltire,
    "star": _star,
    "bars": lambda x, y: torch.maximum((x.abs() - 0.55).abs() - 0.25, y.abs() - 0.85),
}

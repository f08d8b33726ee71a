"""Random numbers that are a pure function of their place: integer hashes, in tensors and in plain integers alike."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

_Number = TypeVar("_Number", int, Tensor)
_MASK = 0xFFFFFFFF


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


def _mix(x: _Number) -> _Number:
    """Scramble 32 bits one to one; both factors are below 2^31, so that no product leaves int64.

    Source: Chris Wellons, "Prospecting for Hash Functions" (2018), nullprogram.com/blog/2018/07/31.
    """
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _MASK
    x = (x ^ (x >> 12)) * 0x297A2D39 & _MASK
    return x ^ (x >> 15)

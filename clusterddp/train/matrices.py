"""Weights of convolutions as matrices, a row for each output: what PowerSGD sends and Muon turns."""

from __future__ import annotations

from torch import Tensor


def as_matrix(values: Tensor) -> Tensor:
    """Take [out, in, height, width] as [out, height * width * in], which copies nothing of a channels_last tensor."""
    return values.movedim(1, -1).reshape(len(values), -1)


def from_matrix(matrix: Tensor, like: Tensor) -> Tensor:
    """Undo `as_matrix`."""
    return matrix.view(like.movedim(1, -1).shape).movedim(-1, 1)

"""Copies of tensors in the host's memory, which later steps do not change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_host(tree: Any) -> Any:
    """Return `tree` (of dicts, lists and tuples) with copies of its tensors in the host's memory, strides kept.

    From a GPU each dtype travels in one transfer into pinned memory, and one synchronization waits for all of them. The
    copies share that memory: see `cut_apart`.
    """
    tensors = [tensor.detach() for tensor in _leaves(tree)]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    copies = [tensor if tensor.is_cuda else tensor.clone() for tensor in tensors]
    for dtype in dict.fromkeys(copy.dtype for copy in copies if copy.is_cuda):
        places = [place for place, copy in enumerate(copies) if copy.is_cuda and copy.dtype == dtype]
        flat, pieces = flatten([copies[place] for place in places])
        host = torch.empty_like(flat, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        for place, piece in zip(places, pieces, strict=True):
            copies[place] = host.as_strided(piece.shape, piece.stride(), piece.storage_offset())
    if device is not None:
        torch.cuda.synchronize(device)
    remaining = iter(copies)
    return _mapped(tree, lambda tensor: next(remaining))


def flatten(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors of one dtype and device into one; return it, and in it a view for each of them, strides kept."""
    ends = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    flat = torch.empty(ends[-1], dtype=tensors[0].dtype, device=tensors[0].device)
    pieces = [
        flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), end - tensor.numel())
        for tensor, end in zip(tensors, ends, strict=True)
    ]
    torch._foreach_copy_(pieces, list(tensors))
    return flat, pieces


def cut_apart(tree: Any) -> Any:
    """Return `tree` with a copy of each tensor that shares memory: pickled, it would include all of that memory."""
    return _mapped(
        tree, lambda tensor: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    )


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)

"""Copies of tensors in the host's memory, which later steps do not change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_host(tree: Any) -> Any:
    """Return `tree` (of dicts, lists and tuples) with copies of its tensors in the host's memory, strides kept.

    From a GPU each dtype travels in one transfer into pinned memory, and one synchronization waits for all of them. The
    copies share that memory: see `cut_apart`.
    """
    tensors = [leaf.detach() for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
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
    return map_leaves(tree, lambda _, leaf: next(remaining) if isinstance(leaf, Tensor) else leaf)


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

    def own(_: str, leaf: Any) -> Any:
        shares = isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() != leaf.nbytes
        return leaf.clone() if shares else leaf

    return map_leaves(tree, own)


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state with their names, such as `state['model']['weight']`."""
    found: list[tuple[str, Any]] = []
    map_leaves(tree, lambda name, leaf: found.append((name, leaf)))
    return iter(found)


def map_leaves(tree: Any, change: Callable[[str, Any], Any], name: str = "state") -> Any:
    """Return a copy of a state (of dicts, lists and tuples) with what `change` returns in place of each leaf."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, change, f"{name}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        kind = list if isinstance(tree, list) else tuple
        return kind(map_leaves(value, change, f"{name}[{place}]") for place, value in enumerate(tree))
    return change(name, tree)

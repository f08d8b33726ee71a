"""How gradients meet: what each rank's backward pass has found becomes one step of all of them."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.train.group import Group


def wrap_exact(model: nn.Module, group: Group) -> nn.Module:
    """Make the backward pass average the gradients over the ranks, exactly; a single rank's model stays as it is.

    Rank 0's parameters become everybody's. Batch norm's running statistics are left to each rank: nothing reads them
    while training, and `averaged_buffers` makes them equal where somebody does. That saves a broadcast in every step.
    """
    if group.world_size == 1:
        return model
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 deprecates broadcast_buffers for forward_sync_buffers, which torch 2.11 does not have.
    options: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    if "batched_grad_copy" in known:
        options["batched_grad_copy"] = True  # bucket views alone save no copy once gradients are set to None
    return DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )


def exchange_gradients(wrapped: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Say, around a micro-batch's forward and backward pass, whether its backward pass talks to the other ranks."""
    if now or not isinstance(wrapped, DistributedDataParallel):
        return contextlib.nullcontext()
    return wrapped.no_sync()

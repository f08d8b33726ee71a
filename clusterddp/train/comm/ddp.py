"""Gradients averaged while the backward pass still runs, by torch's DistributedDataParallel: exact, or in bf16."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.train.comm.exchange import Exchange, ring_bytes
from clusterddp.train.group import Group

_BF16_BUCKET_MB = 4
"""Small, so that sending starts early: 272 ms a step instead of 390 with 25 MiB (ResNet-18, 2 ranks, 1 Gbit/s)."""


class DdpExchange(Exchange):
    """Exact: the mean of all gradients in fp32, in torch's own buckets of 25 MiB."""

    def __init__(self, model: nn.Module, group: Group, **options: Any) -> None:
        """Rank 0's parameters become everybody's.

        Batch norm's running statistics are left to each rank: nothing reads them while training, and `averaged` makes
        them equal where somebody does. That saves a broadcast in every step.
        """
        super().__init__(wrap(model, group, **options), group)
        self._num_values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    @property
    def bytes_sent_per_step(self) -> float:
        return ring_bytes(4 * self._num_values, self._group)

    def scope(self, *, now: bool) -> AbstractContextManager[None]:
        assert isinstance(self.module, DistributedDataParallel)
        return contextlib.nullcontext() if now else self.module.no_sync()


class Bf16Exchange(DdpExchange):
    """The same in bf16, half the bytes: each gradient is rounded to 8 bits before it is added up."""

    label = "bf16"
    exact = False

    def __init__(self, model: nn.Module, group: Group) -> None:
        super().__init__(model, group, bucket_cap_mb=_BF16_BUCKET_MB)
        assert isinstance(self.module, DistributedDataParallel)
        # As a lambda: DDP reads a hook's annotations, and does not understand them as text.
        self.module.register_comm_hook(group, lambda group, bucket: mean_in_bf16(bucket.buffer(), group))

    @property
    def bytes_sent_per_step(self) -> float:
        return super().bytes_sent_per_step / 2


def mean_in_bf16(gradients: Tensor, group: Group) -> torch.futures.Future[Tensor]:
    """Begin to average a bucket of gradients, in place, in bf16.

    torch refuses its own `bf16_compress_hook` on gloo, by the function's name, though gloo adds up bf16 well. Never
    fp16: gloo adds it up three times slower than bf16, and it overflows.
    """
    shares = gradients.div(group.world_size).to(torch.bfloat16)  # divided before the sum, as DDP does in fp32
    summed = dist.all_reduce(shares, async_op=True)
    assert summed is not None
    mean: torch.futures.Future[Tensor] = summed.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return mean


def wrap(model: nn.Module, group: Group, **options: Any) -> DistributedDataParallel:
    """Wrap `model` so that its backward pass averages the gradients over the ranks."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 deprecates broadcast_buffers for forward_sync_buffers, which torch 2.11 does not have.
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    if "batched_grad_copy" in known:
        options["batched_grad_copy"] = True  # bucket views alone save no copy once gradients are set to None
    return DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )

"""How ranks exchange gradients: what an exchange is, and torch's DistributedDataParallel, in fp32 or in bf16."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.train.group import Group, averaged_buffers

_BF16_BUCKET_MB = 4
"""Small, so that sending starts early: 272 ms a step instead of 390 with 25 MiB (ResNet-18, 2 ranks, 1 Gbit/s)."""


class Exchange:
    """The exchange of a single rank, which sends nothing; the exchanges of several ranks derive from it.

    A step calls it in this order: `scope` around each micro-batch, `after_backward`, (the optimizer), `after_step`.
    """

    label = "exact"
    """The mode as the spec writes it: exact, bf16, local:H."""
    exact = True
    """Whether training equals that of a single rank with the batches of all ranks."""
    transport = ""
    """What carries the gradients, where it is not the process group."""
    drifts = False
    """Whether weights differ between ranks within an epoch; their running mean then always differs."""
    own_gradient = False
    """Whether a rank steps with the gradient of its own batch, not with the mean over the ranks."""
    diverged = False
    """Whether weights and optimizer state may differ between ranks now."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.module = model
        """What the forward pass calls."""
        self._group = group

    @property
    def bytes_sent_per_step(self) -> float:
        """Bytes that each rank sends in an optimizer step, on average, with ring all-reduces."""
        return 0.0

    def scope(self, *, now: bool) -> AbstractContextManager[None]:
        """Wrap a micro-batch's forward and backward pass; `now`: it is the step's last one."""
        return contextlib.nullcontext()

    def after_backward(self) -> None:
        """Act when the gradients of a step are complete, before the optimizer uses them."""

    def after_step(self, steps_done: int, *, epoch_ends: bool) -> None:
        """Act when the weights have moved. `epoch_ends`: it was the last step of the epoch, or of the run."""

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replace what differs between ranks in `model` by its mean over the ranks, inside the `with` only.

        `model` is the trained one, or one that is made of its weights, such as their running mean.
        """
        return averaged_buffers(model, self._group)

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank, besides weights and optimizer state; the caller copies it.

        With another number of ranks, each rank resumes from the mean of these tensors over the former ranks.
        """
        return {}

    def common_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides and is the same on every rank."""
        return {}

    def common_tensors(self) -> list[Tensor]:
        """Return the float32 tensors that are kept between steps and are the same on every rank at an epoch's end."""
        return []

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        """Resume from `own_state` and `common_state`, or from nothing if empty; the weights are loaded before."""


class DdpExchange(Exchange):
    """Exact: the mean of all gradients in fp32, in torch's own buckets of 25 MiB, while the backward pass runs."""

    def __init__(self, model: nn.Module, group: Group, **options: Any) -> None:
        """Rank 0's parameters replace those of all ranks.

        Batch norm's running statistics stay each rank's own: no training step reads them, and `averaged` makes them
        equal for evaluation and checkpoints. That saves a broadcast in every step.
        """
        super().__init__(_wrap(model, group, **options), group)
        self._num_values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    @property
    def bytes_sent_per_step(self) -> float:
        return ring_bytes(4 * self._num_values, self._group)

    def scope(self, *, now: bool) -> AbstractContextManager[None]:
        assert isinstance(self.module, DistributedDataParallel)
        return contextlib.nullcontext() if now else self.module.no_sync()


class Bf16Exchange(DdpExchange):
    """The same in bf16, half the bytes: each gradient is rounded to 8 bits before the sum."""

    label = "bf16"
    exact = False

    def __init__(self, model: nn.Module, group: Group) -> None:
        super().__init__(model, group, bucket_cap_mb=_BF16_BUCKET_MB)
        assert isinstance(self.module, DistributedDataParallel)
        # As a lambda: DDP reads a hook's annotations, and does not understand them as text.
        self.module.register_comm_hook(group, lambda group, bucket: _mean_in_bf16(bucket.buffer(), group))

    @property
    def bytes_sent_per_step(self) -> float:
        return super().bytes_sent_per_step / 2


def ring_bytes(payload: float, group: Group) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `payload` bytes.

    Source: Patarasuk and Yuan 2009; gloo and NCCL use such rings.
    """
    return 2 * (group.world_size - 1) / group.world_size * payload


def _mean_in_bf16(gradients: Tensor, group: Group) -> torch.futures.Future[Tensor]:
    """Begin to average a bucket of gradients, in place, in bf16.

    torch refuses its own `bf16_compress_hook` on gloo, by the function's name, though gloo's sum in bf16 is right.
    Never fp16: gloo sums it three times slower than bf16, and it overflows.
    """
    shares = gradients.div(group.world_size).to(torch.bfloat16)  # divided before the sum, as DDP does in fp32
    summed = dist.all_reduce(shares, async_op=True)
    assert summed is not None
    mean: torch.futures.Future[Tensor] = summed.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return mean


def _wrap(model: nn.Module, group: Group, **options: Any) -> DistributedDataParallel:
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

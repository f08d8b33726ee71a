"""How ranks exchange gradients or weights: what an exchange is, and the modes that `train.comm` names.

exact is torch's DistributedDataParallel, or on CPUs of one host memory that all ranks see; bf16 sends half the bytes;
local:H lets each rank take steps of its own. A training step calls `scope`, `after_backward` and `after_step`, and code
that reads the model of all ranks calls `averaged`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.errors import ClusterddpError
from clusterddp.train.group import (
    Group,
    averaged_tensors,
    broadcast_model,
    mean_over_ranks,
    min_over_ranks,
)
from clusterddp.train.host import shared_file
from clusterddp.train.optim import optimizer_tensors

_BF16_BUCKET_MB = 4
"""Small, so that sending starts early: 272 ms a step instead of 390 with 25 MiB (ResNet-18, 2 ranks, 1 Gbit/s)."""
_SMALLEST = 2 / 3
"""The smallest weights are those that make up at most this share of an `every`-th of all elements together."""


def build_exchange(comm: str, model: nn.Module, group: Group, *, optimizer: torch.optim.Optimizer) -> Exchange:
    """Make the exchange of mode `comm` (exact, bf16, local:H); rank 0's weights replace those of all ranks.

    The docstring of each class has its cost; docs/trainer.md explains when to use it.
    """
    if group.world_size == 1:
        return Exchange(model, group)
    mode, _, number = comm.partition(":")
    if mode == "exact":
        memory = share_memory(model, group)
        return DdpExchange(model, group) if memory is None else SharedMemory(model, group, memory)
    if mode == "bf16":
        return Bf16Exchange(model, group)
    if mode == "local":
        return LocalSteps(model, group, every=int(number), optimizer=optimizer)
    raise ClusterddpError(
        f"train.comm {comm} was removed, expected exact, bf16 or local:H",
        hint="clusterddp resume RUN train.comm=exact goes on from the newest checkpoint; so does local:8",
    )


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

    def settle(self, images: Tensor) -> None:
        """Act once before the first step of an attempt; `images`, [batch, channel, height, width], fit the model."""

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
        return averaged_tensors(model.buffers(), self._group)

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
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 deprecates broadcast_buffers for forward_sync_buffers, which torch 2.11 does not have.
        options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        if "batched_grad_copy" in known:
            options["batched_grad_copy"] = True  # bucket views alone save no copy once gradients are set to None
        wrapped = DistributedDataParallel(
            model,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )
        super().__init__(wrapped, group)
        self._num_values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    @property
    def bytes_sent_per_step(self) -> float:
        return ring_bytes(4 * self._num_values, self._group)

    def settle(self, images: Tensor) -> None:
        """Let DDP choose its buckets, by a backward pass that leaves the model as it is.

        It does so after the first one of a process, and the order in which more than two ranks are added up follows
        from the buckets: a resumed run would take a step with others than the run that was not stopped.
        """
        if self._group.world_size > 2:
            self.module.eval()(images).sum().backward()
            self.module.train().zero_grad(set_to_none=True)

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


class SharedMemory(Exchange):
    """Exact: each rank copies its gradients into shared memory, and computes the mean of its share of them for all.

    Each rank computes on its own cores, so sending cannot overlap with computation; the cost is the number of copies of
    a gradient. Through gloo's sockets it is copied into the kernel and out again, twice.
    """

    transport = "memory that all ranks see"

    def __init__(self, model: nn.Module, group: Group, memory: Tensor) -> None:
        """Rank 0's parameters replace those of all ranks. `memory`: from `share_memory`."""
        super().__init__(model, group)
        broadcast_model(model, group)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own, mean = memory[group.rank], memory[-1]
        self._own, self._mean = _views(own, self._trained), _views(mean, self._trained)
        length = -(-memory.shape[1] // group.world_size)
        share = slice(group.rank * length, (group.rank + 1) * length)
        self._shares, self._mean_of_shares = memory[:-1, share], mean[share]

    def after_backward(self) -> None:
        """Make every gradient the mean over the ranks; it is shared by all ranks, so nothing may write into it."""
        torch._foreach_copy_(self._own, [each.grad for each in self._trained if each.grad is not None])
        dist.barrier(group=self._group.control)
        torch.sum(self._shares, dim=0, out=self._mean_of_shares).div_(self._group.world_size)
        dist.barrier(group=self._group.control)
        for parameter, mean in zip(self._trained, self._mean, strict=True):
            parameter.grad = mean


def share_memory(model: nn.Module, group: Group) -> Tensor | None:
    """Map memory for the gradients of `model` that all ranks see: float32, [ranks + 1, values].

    None on every rank where one of them cannot: the ranks are on several hosts or on GPUs, or processes are hidden
    from each other. The memory has no name, and goes with the last rank.
    """
    if not group.on_one_host or group.device.type != "cpu":
        return None
    if not group.host_ranks or min_over_ranks(len(group.host_ranks), group) < group.world_size:
        return None
    values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = (group.world_size + 1) * values
    with shared_file(group, "clusterddp-gradients", num_bytes=4 * size) as (_, path):
        mapped = _map(path, size)
        all_mapped = min_over_ranks(mapped is not None, group)
    return None if mapped is None or not all_mapped else mapped.view(group.world_size + 1, values)


def _map(path: str, size: int) -> Tensor | None:
    """Map a file of `size` float32; None where it has not that size, or cannot be opened."""
    try:
        if (
            os.stat(path).st_size != 4 * size
        ):  # else torch makes it larger: a lack of memory would be a signal in a step
            return None
        return torch.from_file(path, shared=True, size=size, dtype=torch.float32)
    except (OSError, RuntimeError):
        return None


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Cut `flat` [values] into tensors of the parameters' shapes, each laid out in memory as its parameter is."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]


class LocalSteps(Exchange):
    """Local steps: the mean of each weight after every `every` steps or sooner, and of all at each epoch's end.

    Local SGD (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217), streamed (Douillard et al. 2025,
    arXiv:2501.18512): after each step a rank sends another one of `every` parts, so each weight once in `every` steps.
    The all-reduce of a part runs during the next step and is applied after it; a rank keeps its own move of that step
    (CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043). So no rank waits, unless a step is shorter than the all-reduce, and
    the load on the link is even. The step after which a part is applied does not depend on the link, so neither do
    results. `local:1`, which approximates `exact`, waits for its only part.

    The smallest weights are sent with every part. In a convolutional net those are the first layers and batch norm, on
    which all later layers depend; they cost little to send.

    A rank sends how far it has moved since the last mean, in bf16: small numbers, which lose little by rounding, and
    the next message includes the loss. The mean itself is kept in fp32 and is the same on all ranks to the last bit.

    Momentum is each rank's own within an epoch. At its end it is averaged too: then all ranks are the same, and a
    checkpoint holds one of them.
    """

    exact = False
    drifts = True

    def __init__(self, model: nn.Module, group: Group, *, every: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, group)
        self.label = f"local:{every}"
        self.own_gradient = every > 1  # the mean of what single steps have moved is what their mean gradient moves
        broadcast_model(model, group)
        self._every = every
        self._optimizer = optimizer
        trained = (weight for weight in model.parameters() if weight.requires_grad)
        self._weights = sorted(map(_in_memory_order, trained), key=Tensor.numel)
        self._ends = list(accumulate(map(Tensor.numel, self._weights)))
        self._smallest = slice(0, _count_smallest(map(Tensor.numel, self._weights), every))
        self._mean = torch.cat(self._weights)
        """The mean of the ranks' weights when each part was last averaged."""
        self._sent: Sequence[slice] = ()
        """Which elements were sent and are not applied yet."""
        self._moved = self._sum = torch.empty(0, dtype=torch.bfloat16)
        """How far this rank had moved from the mean of those when they were sent; the sum of that over the ranks."""
        self._under_way: dist.Work | None = None

    @property
    def bytes_sent_per_step(self) -> float:
        smallest = self._smallest.stop
        return ring_bytes(2 * (smallest + (self._mean.numel() - smallest) / self._every), self._group)

    def after_step(self, steps_done: int, *, epoch_ends: bool) -> None:
        self.diverged = not epoch_ends
        self._apply()
        if epoch_ends:
            self._average_all()
        else:
            self._send((self._smallest, self._part(steps_done % self._every)))
            if self._every == 1:
                self._apply()

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average parameters too, while the ranks have diverged; those of a running mean always."""
        if model is self.module and not self.diverged:
            return averaged_tensors(model.buffers(), self._group)
        return averaged_tensors(chain(model.parameters(), model.buffers()), self._group)

    def own_state(self) -> dict[str, Any]:
        return {"moved": self._moved} if self._sent else {}

    def common_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"mean": self._mean} if self.diverged else {}
        if self._sent:
            self._await_sum()
            sent = [(part.start, part.stop) for part in self._sent]
            state |= {"sum": self._sum, "sent": sent, "ranks": self._group.world_size}
        return state

    def common_tensors(self) -> list[Tensor]:
        return [self._mean]

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        """Resume; a sum under way counts only with the same number of ranks: else the mean of the weights has it."""
        self.diverged = "mean" in common
        self._mean.copy_(common["mean"] if self.diverged else torch.cat(self._weights))
        self._sent = ()
        if common.get("ranks") == self._group.world_size:
            self._sent = [slice(*part) for part in common["sent"]]
            self._moved, self._sum = (tensor.to(self._mean.device) for tensor in (own["moved"], common["sum"]))

    def _part(self, index: int) -> slice:
        """Return one of `every` parts of all weights but the smallest."""
        first, size = self._smallest.stop, self._mean.numel() - self._smallest.stop
        return slice(first + size * index // self._every, first + size * (index + 1) // self._every)

    def _pieces(self, parts: Sequence[slice]) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each weight's share of `parts`, its place among all elements, and its place among those of `parts`."""
        count = 0
        for part in parts:
            for weight, end in zip(self._weights, self._ends, strict=True):
                begin = end - weight.numel()
                here = slice(max(begin, part.start), min(end, part.stop))
                if here.start < here.stop:
                    there = slice(count, count + here.stop - here.start)
                    yield weight[here.start - begin : here.stop - begin], here, there
                    count = there.stop

    def _send(self, parts: Sequence[slice]) -> None:
        """Begin the sum over the ranks of how far each has moved."""
        self._sent = [part for part in parts if part.start < part.stop]
        if self._sent:
            count = sum(part.stop - part.start for part in self._sent)
            self._moved = torch.empty(count, dtype=torch.bfloat16, device=self._mean.device)
            for weight, here, there in self._pieces(self._sent):
                self._moved[there] = weight - self._mean[here]
            self._sum = self._moved.clone()
            self._under_way = dist.all_reduce(self._sum, async_op=True)

    def _await_sum(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def _apply(self) -> None:
        """Replace this rank's move by the mean of all moves; what bf16 lost of it, and later steps, remain."""
        self._await_sum()
        share = 1 / self._group.world_size
        for weight, here, there in self._pieces(self._sent):
            weight.sub_(self._moved[there]).add_(self._sum[there], alpha=share)
            self._mean[here].add_(self._sum[there], alpha=share)
        self._sent = ()

    def _average_all(self) -> None:
        """Wait for the mean of all ranks' weights and momentum, and continue from it."""
        self._send([slice(0, self._mean.numel())])
        self._apply()
        for weight, end in zip(self._weights, self._ends, strict=True):
            weight.copy_(self._mean[end - weight.numel() : end])
        mean_over_ranks(optimizer_tensors(self._optimizer), self._group)


def _count_smallest(sizes: Iterable[int], every: int) -> int:
    """Count the elements of the smallest weights."""
    sizes = sorted(sizes)
    most = _SMALLEST * sum(sizes) / every
    return max((count for count in accumulate(sizes) if count <= most), default=0)


def _in_memory_order(weight: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements in memory order, for any layout."""
    return weight.detach().as_strided((weight.numel(),), (1,))

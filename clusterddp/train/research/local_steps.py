"""Local steps: each rank trains by itself, and one part of the weights after the other is averaged over the ranks.

Local SGD (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217), streamed (Douillard et al. 2025,
arXiv:2501.18512): after each step a rank sends another one of `every` parts, so each weight once in `every` steps. The
all-reduce of a part runs during the next step and is applied after it; a rank keeps its own move of that step
(CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043). So no rank waits, unless a step is shorter than the all-reduce, and the
load on the link is even. The step after which a part is applied does not depend on the link, so neither do results.
`local:1`, which approximates `exact`, waits for its only part.

The smallest weights are sent with every part. In a convolutional net those are the first layers and batch norm, on
which all later layers depend; they cost little to send.

A rank sends how far it has moved since the last mean, in bf16: small numbers, which lose little by rounding, and the
next message includes the loss. The mean itself is kept in fp32 and is the same on all ranks to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.train.exchange import Exchange, ring_bytes
from clusterddp.train.group import Group, averaged_buffers, averaged_tensors, broadcast_model, mean_over_ranks
from clusterddp.train.optim import optimizer_tensors

_SMALLEST = 2 / 3
"""The smallest weights are those that make up at most this share of an `every`-th of all elements together."""


class LocalSteps(Exchange):
    """The mean of each weight after every `every` optimizer steps or sooner, and of all at each epoch's end.

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
        payload = 2 * self._mean.numel() * share_sent(map(Tensor.numel, self._weights), self._every)
        return ring_bytes(payload, self._group)

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
            return averaged_buffers(model, self._group)
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


def share_sent(sizes: Iterable[int], every: int) -> float:
    """Return the share of all elements that is sent in a step, on average, for weights of `sizes` elements."""
    sizes = list(sizes)
    smallest = _count_smallest(sizes, every)
    return (smallest + (sum(sizes) - smallest) / every) / sum(sizes)


def _count_smallest(sizes: Iterable[int], every: int) -> int:
    """Count the elements of the smallest weights."""
    sizes = sorted(sizes)
    most = _SMALLEST * sum(sizes) / every
    return max((count for count in accumulate(sizes) if count <= most), default=0)


def _in_memory_order(weight: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements in memory order, for any layout."""
    return weight.detach().as_strided((weight.numel(),), (1,))

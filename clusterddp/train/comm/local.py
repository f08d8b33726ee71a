"""Local steps: each rank trains by itself for some steps, then all go on from the mean of their weights.

Local SGD (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217). What is sent, once in `every` steps, is how
far each rank has moved since the last mean, in bf16: small numbers, which lose little by it, and what they lose goes
along the next time. The mean itself is kept in fp32 and is the same on all ranks to the last bit.

Nobody waits for the sum: it travels while the next steps are taken, an eighth of `every`, and comes in after them; what
a rank has moved meanwhile stays its own (CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043; Overlap Local-SGD, Wang et al.
2020, arXiv:2002.09539). After how many steps it comes in does not depend on the link, so results do not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.train.comm.exchange import Exchange, ring_bytes
from clusterddp.train.group import Group, averaged_buffers, averaged_tensors, broadcast_model, mean_over_ranks
from clusterddp.train.optim import optimizer_tensors


def steps_under_way(every: int) -> int:
    """Return the number of steps that are taken between sending and taking in: few, so that ranks stay near."""
    return every // 8


class LocalSteps(Exchange):
    """The mean of the weights after every `every` optimizer steps, and at each epoch's end.

    Momentum stays each rank's own while an epoch lasts. At its end it is averaged too: then all ranks are the same,
    and a checkpoint needs no more than one of them.
    """

    exact = False
    drifts = True

    def __init__(self, model: nn.Module, group: Group, *, every: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, group)
        self.label = f"local:{every}"
        broadcast_model(model, group)
        self._every = every
        self._optimizer = optimizer
        self._weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        self._mean = [weight.clone() for weight in self._weights]
        """The weights that all ranks had last, were it not for what they have moved since."""
        self._moved = torch.empty(sum(map(Tensor.numel, self._weights)), dtype=torch.bfloat16, device=group.device)
        """How far this rank had moved from the mean when that was sent."""
        self._sum = torch.empty_like(self._moved)
        """The same, added up over the ranks, or on the way to it."""
        self._under_way: dist.Work | None = None
        self._due: int | None = None
        """How many steps are done when the sum that was sent last comes in; None: it has."""

    @property
    def bytes_sent_per_step(self) -> float:
        return ring_bytes(2 * self._moved.numel(), self._group) / self._every

    def after_step(self, steps_done: int, *, epoch_ends: bool) -> None:
        self.apart = not epoch_ends
        if self._due is not None and (epoch_ends or steps_done == self._due):
            self._take_in()
        if epoch_ends:
            self._meet()
        elif steps_done % self._every == 0:
            self._send()
            self._due = steps_done + steps_under_way(self._every)
            if self._due == steps_done:
                self._take_in()

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average parameters too, while the ranks are apart, or of another model, which keeps more than a mean does."""
        if model is self.module and not self.apart:
            return averaged_buffers(model, self._group)
        return averaged_tensors(chain(model.parameters(), model.buffers()), self._group)

    def own_state(self) -> dict[str, Any]:
        self._arrive()
        return {} if self._due is None else {"moved": self._moved.cpu()}

    def common_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"mean": [weight.cpu() for weight in self._mean]} if self.apart else {}
        if self._due is not None:
            self._arrive()
            state |= {"sum": self._sum.cpu(), "due": self._due, "ranks": self._group.world_size}
        return state

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        """Go on; of a sum under way only with the ranks that it is of: the mean of others' weights has it already."""
        self.apart = "mean" in common
        for mine, saved in zip(self._mean, common.get("mean", self._weights), strict=True):
            mine.copy_(saved)
        self._due = None
        if common.get("ranks") == self._group.world_size:
            self._due = common["due"]
            self._sum.copy_(common["sum"])
            self._moved.copy_(own["moved"])

    def _send(self) -> None:
        """Begin to add up over the ranks how far each has moved."""
        moves = views_like(self._weights, self._moved)
        for weight, mean, move in zip(self._weights, self._mean, moves, strict=True):
            move.copy_(weight - mean)
        self._sum.copy_(self._moved)
        self._under_way = dist.all_reduce(self._sum, async_op=True)

    def _arrive(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def _take_in(self) -> None:
        """Have the mean of all moves instead of the own one; what bf16 has lost of that, and later steps, remain."""
        self._arrive()
        self._due = None
        share = 1 / self._group.world_size
        moves, sums = views_like(self._weights, self._moved), views_like(self._weights, self._sum)
        for weight, mean, move, total in zip(self._weights, self._mean, moves, sums, strict=True):
            weight.sub_(move).add_(total, alpha=share)
            mean.add_(total, alpha=share)

    def _meet(self) -> None:
        """Wait for the mean of all ranks' weights and momentum, and go on from that."""
        self._send()
        self._take_in()
        for weight, mean in zip(self._weights, self._mean, strict=True):
            weight.copy_(mean)
        mean_over_ranks(optimizer_tensors(self._optimizer), self._group)


def views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Cut `flat`, with as many elements as all `tensors` together, into views of their shapes and strides."""
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [
        flat.as_strided(tensor.size(), tensor.stride(), start) for tensor, start in zip(tensors, starts, strict=False)
    ]

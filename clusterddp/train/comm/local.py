"""Local steps: each rank trains by itself for some steps, then all go on from the mean of their weights.

Local SGD (Stich 2019, arXiv:1805.09767; Lin et al. 2020, arXiv:1808.07217). What is sent, once in `every` steps, is how
far each rank has moved since the last mean, in bf16: small numbers, which lose little by it. The mean itself is kept in
fp32 and is the same on all ranks to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.train.comm.exchange import Exchange, ring_bytes
from clusterddp.train.group import (
    Group,
    averaged_buffers,
    averaged_tensors,
    broadcast_model,
    mean_over_ranks,
    sum_over_ranks,
)


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
        """The weights that all ranks had last."""
        self._sent = torch.empty(sum(map(Tensor.numel, self._weights)), dtype=torch.bfloat16, device=group.device)
        self._moves = views_like(self._weights, self._sent)

    @property
    def bytes_sent_per_step(self) -> float:
        return ring_bytes(2 * sum(weight.numel() for weight in self._weights), self._group) / self._every

    def after_step(self, steps_done: int, *, epoch_ends: bool) -> None:
        self.apart = not epoch_ends
        if epoch_ends or steps_done % self._every == 0:
            self._meet()
        if epoch_ends:
            mean_over_ranks(optimizer_tensors(self._optimizer), self._group)

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average parameters too, while the ranks are apart, or of another model, which keeps more than a mean does."""
        if model is self.module and not self.apart:
            return averaged_buffers(model, self._group)
        return averaged_tensors(chain(model.parameters(), model.buffers()), self._group)

    def common_state(self) -> dict[str, Any]:
        return {"mean": [weight.cpu() for weight in self._mean]} if self.apart else {}

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        self.apart = "mean" in common
        for mine, saved in zip(self._mean, common.get("mean", self._weights), strict=True):
            mine.copy_(saved)

    def _meet(self) -> None:
        """Go on from the mean of all ranks' weights. What it costs is going through memory."""
        for weight, mean, move in zip(self._weights, self._mean, self._moves, strict=True):
            move.copy_(weight.sub_(mean))
        sum_over_ranks(self._sent, self._group)
        for weight, mean, move in zip(self._weights, self._mean, self._moves, strict=True):
            weight.copy_(mean.add_(move, alpha=1 / self._group.world_size))


def views_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Cut `flat`, with as many elements as all `tensors` together, into views of their shapes and strides."""
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [
        flat.as_strided(tensor.size(), tensor.stride(), start) for tensor, start in zip(tensors, starts, strict=False)
    ]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what the optimizer keeps for each weight, such as momentum, in the order of the weights."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        value
        for parameter in parameters
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.ndim > 0
    ]

"""A running mean of the weights, which is smoother than the weights and often better; it is evaluated beside them."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor, nn


class Ema:
    """The exponential moving average of a model's parameters and floating-point buffers, as a model of its own.

    Counters (batch norm's num_batches_tracked) stay as they were. What differs from rank to rank in the weights does so
    in the average; as that is linear in them, its mean over the ranks is the average of their mean.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._averages, self._weights = _floats(self.model), _floats(model)

    @torch.no_grad()
    def update(self, *, step: int) -> None:
        """Move towards the weights as they are after optimizer step `step` (from 1 on).

        Early steps count for more, or the initial weights would be remembered for long. Source: the `num_updates` of
        tensorflow.train.ExponentialMovingAverage.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)


def build_ema(model: nn.Module, decay: float) -> Ema | None:
    """Begin an average at the model's weights; None without a decay."""
    return Ema(model, decay) if decay else None


def _floats(model: nn.Module) -> list[Tensor]:
    return [each.detach() for each in chain(model.parameters(), model.buffers()) if each.is_floating_point()]

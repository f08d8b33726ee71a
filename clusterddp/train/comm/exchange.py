"""What an exchange between ranks is: when it acts in a step, what it keeps, what of that a checkpoint holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from clusterddp.train.group import Group, averaged_buffers


class Exchange:
    """The exchange of a single rank, which sends nothing; the ways of several ranks derive from it.

    A step calls it in this order: `scope` around each micro-batch, `after_backward`, (the optimizer), `after_step`.
    """

    label = "exact"
    """The mode as the spec writes it: exact, bf16, powersgd:R, local:H."""
    exact = True
    """Whether training is the one that a single rank would do with the batches of all."""
    way = ""
    """Where it goes, if not from rank to rank."""
    drifts = False
    """Whether weights differ from rank to rank between meetings; their running mean then always does."""
    alone = False
    """Whether a rank steps with the gradient of its own batch, not with the mean over the ranks."""
    apart = False
    """Whether weights and optimizer state may differ from rank to rank just now."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.module = model
        """What the forward pass calls."""
        self._group = group

    @property
    def bytes_sent_per_step(self) -> float:
        """Bytes that each rank sends in an optimizer step, on average, as rings of ranks do it."""
        return 0.0

    def scope(self, *, now: bool) -> AbstractContextManager[None]:
        """Go around a micro-batch's forward and backward pass; `now`: it is the step's last one."""
        return contextlib.nullcontext()

    def after_backward(self, step: int) -> None:
        """Act when the gradients of optimizer step `step` (from 0) are there, before they are used."""

    def after_step(self, steps_done: int, *, epoch_ends: bool) -> None:
        """Act when the weights have moved. `epoch_ends`: it was the epoch's last step, or the run's."""

    def averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let what differs from rank to rank in `model` be the mean over the ranks, inside the `with` only.

        `model` is the trained one, or one that is made of its weights, such as their running mean.
        """
        return averaged_buffers(model, self._group)

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank, besides weights and optimizer state; the caller copies it.

        Another number of ranks goes on from the mean of these tensors over the ranks that were.
        """
        return {}

    def common_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides and is the same on every rank."""
        return {}

    def common_tensors(self) -> list[Tensor]:
        """Return what is kept from step to step and is the same on every rank at an epoch's end: float32."""
        return []

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        """Go on from what `own_state` and `common_state` were, from nothing if empty; the weights are loaded before."""


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are there, in the order of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def ring_bytes(payload: float, group: Group) -> float:
    """Return the bytes that each rank sends so that all have the sum of `payload` bytes, by rings.

    Source: Patarasuk and Yuan 2009; gloo's and NCCL's rings do it so.
    """
    return 2 * (group.world_size - 1) / group.world_size * payload

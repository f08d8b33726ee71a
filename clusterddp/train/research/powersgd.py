"""Gradients of low rank: PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727), in two messages a step.

A layer's gradient, as a matrix M [rows, columns], is sent as two thin ones, P [rows, rank] and Q [columns, rank], whose
product P Q' is near the best approximation of that rank. Each rank keeps the error and adds it to its next gradient.

torch's own hook sends P and Q of each bucket from callbacks, whose order differs from rank to rank: with several
buckets on gloo it aborts. Here the whole backward pass comes first; then all P go in one message, all Q in another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.train.exchange import Exchange, gradients_of, ring_bytes
from clusterddp.train.group import Group, broadcast_model, mean_over_ranks, start_mean
from clusterddp.train.muon import as_matrix, from_matrix

_EXACT_SHARE, _MOST_EXACT_STEPS = 0.1, 100


class PowerSgd(Exchange):
    """Gradients of matrix rank `rank`; exact in the first tenth of the steps (at most 100), which change most."""

    exact = False

    def __init__(self, model: nn.Module, group: Group, *, rank: int, total_steps: int, seed: int) -> None:
        super().__init__(model, group)
        self.label = f"powersgd:{rank}"
        broadcast_model(model, group)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._matrices = [parameter for parameter in trained if _pays(parameter, rank)]
        self._others = [parameter for parameter in trained if not _pays(parameter, rank)]
        self._exact_steps = min(_MOST_EXACT_STEPS, int(_EXACT_SHARE * total_steps))
        self._steps_done = 0
        self._errors = [torch.zeros_like(as_matrix(parameter.detach())) for parameter in self._matrices]
        generator = torch.Generator().manual_seed(seed)  # equal on all ranks
        self._rights = [
            torch.randn(error.shape[1], min(rank, *error.shape), generator=generator).to(group.device)
            for error in self._errors
        ]

    @property
    def bytes_sent_per_step(self) -> float:
        """Those of the last step."""
        others = sum(parameter.numel() for parameter in self._others)
        if self._steps_done <= self._exact_steps:
            return ring_bytes(4 * (others + sum(error.numel() for error in self._errors)), self._group)
        thin = sum((len(error) + len(right)) * right.shape[1] for error, right in self._with_rights())
        return ring_bytes(4 * (others + thin), self._group)

    def after_backward(self, step: int) -> None:
        """Replace every gradient by the mean over the ranks, or by its approximation."""
        self._steps_done = step + 1
        if step < self._exact_steps:
            mean_over_ranks(gradients_of([*self._matrices, *self._others]), self._group)
            return
        for error, gradient in zip(self._errors, gradients_of(self._matrices), strict=True):
            error.add_(as_matrix(gradient))
        lefts = [error @ right for error, right in self._with_rights()]
        mean_over_ranks([*lefts, *gradients_of(self._others)], self._group)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        pairs = list(zip(self._errors, lefts, strict=True))
        self._rights = [error.mT @ left for error, left in pairs]
        arrive = start_mean(self._rights, self._group)
        for (error, left), right in zip(pairs, self._rights, strict=True):
            error.addmm_(left, right.mT, alpha=-1)  # the error of this rank's share of the mean
        arrive()
        for parameter, left, right in zip(self._matrices, lefts, self._rights, strict=True):
            parameter.grad = from_matrix(left @ right.mT, parameter)

    def own_state(self) -> dict[str, Any]:
        """Only the mean of the errors over the ranks has an effect, so another number of ranks resumes from it."""
        return {"errors": list(self._errors)}

    def common_state(self) -> dict[str, Any]:
        return {"rights": list(self._rights)}

    def common_tensors(self) -> list[Tensor]:
        return self._rights

    def load_state(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        for mine, saved in zip(self._errors, own.get("errors", self._errors), strict=True):
            mine.copy_(saved)
        for mine, saved in zip(self._rights, common.get("rights", self._rights), strict=True):
            mine.copy_(saved)

    def _with_rights(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._errors, self._rights, strict=True))


def _pays(parameter: Tensor, rank: int) -> bool:
    """Return whether two thin matrices are smaller than the gradient; biases and the like are sent as they are."""
    if parameter.ndim < 2:
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns

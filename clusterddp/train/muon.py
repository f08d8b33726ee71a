"""Muon: weights of convolutions are turned, by as much in every direction; everything else moves by SGD.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; as airbench94_muon has it, whose
weights keep their length, since batch norm follows each convolution and makes their length meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clusterddp.train.matrices import as_matrix, from_matrix

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Drives singular values from 0.01 up towards 1, quickly rather than precisely. Source: Jordan et al. 2024."""
_ROUNDS = 3  # Source: airbench94_muon
_TINY = 1e-7  # a gradient may be zero


class Muon(torch.optim.SGD):
    """SGD for all parameter groups but those that have `turns`, whose weights are turned.

    A turned weight, as a matrix W [out, in * height * width], is brought to the length sqrt(out) and loses lr * U,
    where U has the directions of the gradients' momentum, all singular values about 1 and so about the length of W: lr
    is the share of its length by which W moves. The size of gradients has no part in it.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, turn_share: float, momentum: float, nesterov: bool, precision: str
    ) -> None:
        """`turn_share`: the turns' learning rate as a share of SGD's; `precision`: of matrix products, fp32 or bf16."""
        super().__init__(groups, lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
        self.turn_share = turn_share  # not in the groups, which a checkpoint brings back: SGD's rate goes by the ranks
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Turn what is turned, and let SGD move the rest. Gradients stay, for who looks whether they are finite."""
        turned: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"] if "turns" in group else ():
                if weight.grad is not None:
                    turned.append((weight, weight.grad))
                    self._turn(weight, lr=group["lr"], momentum=group["momentum"], nesterov=group["nesterov"])
                    weight.grad = None  # SGD passes it over
        moved = super().step(closure)
        for weight, gradient in turned:
            weight.grad = gradient
        return moved

    def _turn(self, weight: Tensor, *, lr: float, momentum: float, nesterov: bool) -> None:
        gradient = weight.grad
        assert gradient is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        kept = state["momentum_buffer"].mul_(momentum).add_(gradient)
        ahead = gradient.add(kept, alpha=momentum) if nesterov else kept
        direction = orthogonalise(as_matrix(ahead).to(self._dtype))
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(from_matrix(direction.to(weight.dtype), weight), alpha=lr)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Bring the singular values of [rows, columns] near 1, but for the smallest, by Newton-Schulz iterations."""
    first, third, fifth = _POLYNOMIAL
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide: Tensor = matrix.mT if is_tall else matrix
    wide = wide / (wide.norm() + _TINY)
    for _ in range(_ROUNDS):
        square = wide @ wide.mT
        wide = first * wide + (third * square + fifth * square @ square) @ wide
    return wide.mT.contiguous() if is_tall else wide

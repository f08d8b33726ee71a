"""The optimizer (SGD, Muon or Adam) and the learning rate over the steps of the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec

_ONECYCLE_START = 1 / 25  # the first rate as a share of the peak. Source: torch.optim.lr_scheduler.OneCycleLR
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Drives singular values from 0.01 up towards 1, quickly rather than precisely. Source: Jordan et al. 2024."""
_ROUNDS = 3  # Source: airbench94_muon
_TINY = 1e-7  # a gradient may be zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The length of a run and its learning rate, in optimizer steps.

    Epochs, and so the samples seen, do not depend on the number of ranks; steps do.
    """

    epochs: int
    num_samples: int
    """Images of an epoch; the last ones, fewer than a step has, are left out."""
    global_batch: int
    """Samples of one optimizer step over all ranks."""
    peak_lr: float
    """The highest rate, for steps with the mean gradient of all ranks."""
    warmup: float
    """The share of all steps in which the rate rises."""
    shape: str
    own_gradient_share: float = 1.0
    """The share of the rate for ranks that step with their own batch's gradient (`Exchange.own_gradient`)."""
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    @property
    def total_steps(self) -> int:
        """The steps of a run that takes all of them with this global batch."""
        return self.left(0, 0, 0)

    def left_in_epoch(self, samples: int) -> int:
        """Return the steps that are left of an epoch in which so many images have been seen."""
        return (self.num_samples - samples) // self.global_batch

    def left(self, epoch: int, samples: int, step: int) -> int:
        """Return the steps that are left after `epoch` epochs, `samples` images of the next, and `step` steps in all.

        The steps behind may have had another global batch.
        """
        left = self.left_in_epoch(samples) + (self.epochs - epoch - 1) * self.steps_per_epoch
        return max(0, left if self.max_steps is None else min(left, self.max_steps - step))

    def learning_rate(self, step: int, *, own_gradient: bool = False) -> float:
        """Return the rate of optimizer step `step` (0..total_steps-1), taken in the step's middle, so never 0.

        A run whose global batch has changed counts from the end: the step that has `left` - 1 after it is step
        total_steps - `left`.
        """
        return self.peak(own_gradient=own_gradient) * self._height(step)

    def peak(self, *, own_gradient: bool = False) -> float:
        """Return the highest rate of the run."""
        return self.peak_lr * (self.own_gradient_share if own_gradient else 1.0)

    def _height(self, step: int) -> float:
        """Return the rate of a step as a share of the peak."""
        progress = (step + 0.5) / self.total_steps
        if progress < self.warmup:
            risen = progress / self.warmup
            if self.shape == "onecycle":
                return _ONECYCLE_START + (1 - _ONECYCLE_START) * _half_cosine(risen)
            return risen
        left = (1 - progress) / (1 - self.warmup)
        if self.shape == "onecycle":
            return _half_cosine(left)
        return left if self.shape == "triangle" else 1.0


def plan_schedule(spec: TrainSpec, *, num_samples: int, world_size: int) -> Schedule:
    """Count the steps of the run and scale its learning rate with the global batch, if asked to.

    A rank that steps with its own batch only has the gradient's noise in full, where the mean over N ranks has it
    1 / sqrt(N) as large. Unless the spec settles the scaling itself it takes that share of the rate: then the noise
    moves it no further in a step. Source: docs/benchmarks.md, "The same loss?".
    """
    global_batch = spec.global_batch(world_size)
    if num_samples < global_batch:
        raise ClusterddpError(
            f"a global batch of {global_batch:,} ({world_size} ranks x batch {spec.batch_size} x accumulate "
            f"{spec.accumulate}) is more than the {num_samples:,} train images",
            hint="lower train.batch_size or train.accumulate, or raise train.samples",
        )
    return Schedule(
        epochs=spec.epochs,
        num_samples=num_samples,
        global_batch=global_batch,
        peak_lr=spec.peak_lr(global_batch),
        warmup=spec.warmup,
        shape=spec.schedule,
        own_gradient_share=world_size**-0.5 if spec.lr_grows and spec.lr_scaling == "auto" else 1.0,
        max_steps=spec.max_steps,
    )


def build_optimizer(
    model: nn.Module, spec: TrainSpec, schedule: Schedule, *, precision: str = "fp32", compiled: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of all trained parameters of `model`; biases and batch norm's parameters do not decay.

    Adam is torch.optim.Adam: its weight decay is added to the gradient, not decoupled as AdamW's. Muon takes the
    weights of convolutions, and SGD what is left; `precision`, fp32 or bf16, is that of its matrix products, and where
    steps are `compiled`, so is it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    turned = [parameter for parameter in trained if parameter.ndim == 4] if spec.optimizer == "muon" else []
    left = [parameter for parameter in trained if spec.optimizer != "muon" or parameter.ndim != 4]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in left if parameter.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [parameter for parameter in left if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if spec.optimizer == "adam":
        return torch.optim.Adam(groups, lr=spec.lr, fused=True)
    nesterov = spec.nesterov and spec.momentum > 0
    if spec.optimizer == "muon":
        groups.append({"params": turned, "turns": True})
        share = spec.muon_lr / schedule.peak_lr
        return Muon(
            groups,
            turn_share=share,
            momentum=spec.momentum,
            nesterov=nesterov,
            precision=precision,
            compiled=compiled,
        )
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=nesterov, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the schedule's rate; weights that Muon turns have a fixed share of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * optimizer.turn_share if isinstance(optimizer, Muon) and "turns" in group else rate


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what the optimizer keeps for each weight, such as momentum, in the order of the weights."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        value
        for parameter in parameters
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.ndim > 0
    ]


def _half_cosine(share: float) -> float:
    """Go from 0 to 1, slowly at both ends."""
    return (1 - math.cos(math.pi * share)) / 2


class Muon(torch.optim.SGD):
    """SGD for all parameter groups but those that have `turns`: weights move by an orthogonalised momentum ("turn").

    A turned weight, as a matrix W [out, in * height * width], is scaled to the norm sqrt(out) and loses lr * U,
    where U has the directions of the gradients' momentum, all singular values about 1 and so about the norm of W: lr
    is the share of its norm by which W moves. The size of gradients has no effect.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; as airbench94_muon has it,
    whose weights keep their norm, since batch norm follows each convolution and makes their norm meaningless.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        turn_share: float,
        momentum: float,
        nesterov: bool,
        precision: str,
        compiled: bool = False,
    ) -> None:
        """`turn_share`: the turns' learning rate as a share of SGD's; `precision`: of matrix products, fp32 or bf16.

        `compiled`: on GPUs what turns the weights is one compiled graph.
        """
        super().__init__(groups, lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
        self.turn_share = turn_share  # not in the groups, which a checkpoint brings back: SGD's rate goes by the ranks
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._turn_at_once = torch.compile(turn_at_once, dynamic=False) if compiled else turn_at_once
        self._rate: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Turn the weights of groups with `turns`, let SGD move the others. Gradients stay for `Meter.read`."""
        turned: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            if "turns" in group:
                turned += [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]
                self._turn([weight for weight in group["params"] if weight.grad is not None], group)
        for weight, _ in turned:
            weight.grad = None  # SGD passes it over
        moved = super().step(closure)
        for weight, gradient in turned:
            weight.grad = gradient
        return moved

    @torch.no_grad()
    def compile_now(self) -> float:
        """Have the graph compiled, if there is to be one, by a step of copies of the weights; return the seconds."""
        began = time.perf_counter()
        for group in self.param_groups:
            weights = [weight.detach().clone() for weight in group["params"] if "turns" in group and weight.is_cuda]
            if weights and self._turn_at_once is not turn_at_once:
                zeros = [torch.zeros_like(weight) for weight in weights]
                self._turn_on_gpu(weights, zeros, [torch.zeros_like(weight) for weight in weights], group)
        return time.perf_counter() - began

    def run_uncompiled(self) -> None:
        """Do without a compiled graph."""
        self._turn_at_once = turn_at_once

    def _turn(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        kept = [self.state[weight]["momentum_buffer"] for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        plain = [weight.detach() for weight in weights]
        if plain and plain[0].is_cuda:
            self._turn_on_gpu(plain, gradients, kept, group)
        else:
            turn_one_by_one(plain, gradients, kept, group["lr"], **self._options(group))

    def _turn_on_gpu(
        self, weights: list[Tensor], gradients: list[Tensor], kept: list[Tensor], group: dict[str, Any]
    ) -> None:
        if self._rate is None:
            self._rate = torch.zeros((), device=weights[0].device)
        self._rate.fill_(group["lr"])  # a graph would be compiled anew for each number that is not in a tensor
        self._turn_at_once(weights, gradients, kept, self._rate, **self._options(group))

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum": group["momentum"], "nesterov": group["nesterov"], "dtype": self._dtype}


def turn_one_by_one(
    weights: list[Tensor],
    gradients: list[Tensor],
    kept: list[Tensor],
    rate: float,
    *,
    momentum: float,
    nesterov: bool,
    dtype: torch.dtype,
) -> None:
    """Turn weights, one after the other, by their gradients and what is `kept` of earlier ones, which moves too.

    For CPUs, where it is no slower than `turn_at_once`, which comes to other last bits. `dtype`: of matrix products.
    """
    for weight, ahead in zip(weights, _move_momentum(gradients, kept, momentum, nesterov), strict=True):
        direction = orthogonalise(as_matrix(ahead).to(dtype))
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(from_matrix(direction.to(weight.dtype), weight), alpha=rate)


def turn_at_once(
    weights: list[Tensor],
    gradients: list[Tensor],
    kept: list[Tensor],
    rate: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    dtype: torch.dtype,
) -> None:
    """Do what `turn_one_by_one` does, in few and large operations. `rate`: float32, [], on the weights' device."""
    ahead = _move_momentum(gradients, kept, momentum, nesterov)
    factors = torch._foreach_norm(weights)
    torch._foreach_reciprocal_(factors)
    torch._foreach_mul_(factors, [len(weight) ** 0.5 for weight in weights])
    directions = orthogonalise_all([as_matrix(each) for each in ahead], dtype)
    for weight, factor, direction in zip(weights, factors, directions, strict=True):
        weight.mul_(factor)
        weight.addcmul_(from_matrix(direction, weight), rate, value=-1)


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


def orthogonalise_all(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalise each matrix in `dtype`; those of as many rows, once none is tall, together. Return them in float32.

    Shorter ones are filled up with columns of zeros, which stay zero and change nothing.
    """
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    found = list(wide)
    for rows in sorted({len(matrix) for matrix in wide}):
        places = [place for place, matrix in enumerate(wide) if len(matrix) == rows]
        columns = max(wide[place].shape[1] for place in places)
        stack = torch.zeros(len(places), rows, columns, dtype=dtype, device=matrices[0].device)
        for row, place in zip(stack, places, strict=True):
            row[:, : wide[place].shape[1]] = wide[place]
        for row, place in zip(_iterate(stack).float(), places, strict=True):
            found[place] = row[:, : wide[place].shape[1]]
    return [
        each if each.shape == matrix.shape else each.mT.contiguous()
        for each, matrix in zip(found, matrices, strict=True)
    ]


def as_matrix(values: Tensor) -> Tensor:
    """Take [out, in, height, width] as [out, height * width * in], which copies nothing of a channels_last tensor."""
    return values.movedim(1, -1).reshape(len(values), -1)


def from_matrix(matrix: Tensor, like: Tensor) -> Tensor:
    """Undo `as_matrix`."""
    return matrix.view(like.movedim(1, -1).shape).movedim(-1, 1)


def _iterate(stack: Tensor) -> Tensor:
    """Do `orthogonalise`'s iterations for matrices [matrix, rows, columns] that are not tall."""
    first, third, fifth = _POLYNOMIAL
    stack = stack / (stack.norm(dim=(1, 2), keepdim=True) + _TINY)
    for _ in range(_ROUNDS):
        square = stack @ stack.mT
        inner = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        stack = torch.baddbmm(stack, inner, stack, beta=first)
    return stack


def _move_momentum(gradients: list[Tensor], kept: list[Tensor], momentum: float, nesterov: bool) -> Sequence[Tensor]:
    """Move the momentum; return what the weights are to be moved by."""
    torch._foreach_mul_(kept, momentum)
    torch._foreach_add_(kept, gradients)
    return torch._foreach_add(gradients, kept, alpha=momentum) if nesterov else kept

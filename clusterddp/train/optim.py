"""The optimizer (SGD, Muon or Adam) and the learning rate over the steps of the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clusterddp.train.data.dataset import steps_per_epoch
from clusterddp.train.muon import Muon

if TYPE_CHECKING:
    from clusterddp.spec.train import TrainSpec

_ONECYCLE_START = 1 / 25  # the first rate as a share of the peak. Source: torch.optim.lr_scheduler.OneCycleLR


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The length of a run and its learning rate, in optimizer steps.

    Epochs, and so the samples seen, do not depend on the number of ranks; steps do.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int
    global_batch: int
    """Samples of one optimizer step over all ranks."""
    peak_lr: float
    """The highest rate, for steps with the mean gradient of all ranks."""
    warmup: float
    """The share of all steps in which the rate rises."""
    shape: str
    own_gradient_share: float = 1.0
    """The share of the rate for ranks that step with their own batch's gradient (`Exchange.own_gradient`)."""

    def learning_rate(self, step: int, *, own_gradient: bool = False) -> float:
        """Return the rate of optimizer step `step` (0..total_steps-1), taken in the step's middle, so never 0."""
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
    """Count the steps of the run and scale its learning rate with the global batch (Goyal et al. 2017), if asked to.

    A rank that steps with its own batch only has the gradient's noise in full, where the mean over N ranks has it
    1 / sqrt(N) as large. Unless the spec settles the scaling itself it takes that share of the rate: then the noise
    moves it no further in a step. Source: docs/benchmarks.md, "The same loss?".
    Raises: ClusterddpError: the train set is smaller than one step.
    """
    global_batch = world_size * spec.batch_size * spec.accumulate
    grows = spec.lr_scaling == "linear" or (spec.lr_scaling == "auto" and spec.optimizer != "adam")
    per_epoch = steps_per_epoch(num_samples, world=world_size, batch_size=spec.batch_size, accumulate=spec.accumulate)
    total_steps = spec.epochs * per_epoch
    return Schedule(
        epochs=spec.epochs,
        steps_per_epoch=per_epoch,
        total_steps=total_steps if spec.max_steps is None else min(total_steps, spec.max_steps),
        global_batch=global_batch,
        peak_lr=spec.lr * (global_batch / spec.lr_batch if grows else 1.0),
        warmup=spec.warmup,
        shape=spec.schedule,
        own_gradient_share=world_size**-0.5 if grows and spec.lr_scaling == "auto" else 1.0,
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

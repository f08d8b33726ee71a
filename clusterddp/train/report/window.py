"""What happened since the last report, kept on the device so that no step has to wait for a figure."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.train.group import Group, sum_over_ranks
from clusterddp.train.state import TrainState


class Window:
    """Each step's loss, and the hits of all steps, of one rank since the last report."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.losses = torch.zeros(length, dtype=torch.float64, device=device)
        self.hits = torch.zeros(1, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        self.losses.zero_()
        self.hits.zero_()
        self.steps = 0
        self.began = time.perf_counter()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one micro-batch of the step under way; `loss` is its share of the step's loss."""
        self.losses[self.steps] += loss
        self.hits += (logits.argmax(1) == labels).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A window's figures over all ranks: the mean loss, how many samples were classified right, the time it took."""

    loss: float
    hits: float
    seconds: float
    ranks: list[list[float]]
    """What the ranks' gauges say, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The steps since the last report, over all ranks. `epoch` counts from 1; `accuracy` is a share, 0..1."""

    epoch: int
    step: int
    loss: float
    accuracy: float
    lr: float
    figures: dict[str, Any]
    """Speed, and what the time went on, from `figures.tell`."""
    train_seconds: float
    """Seconds of steps so far."""
    epochs_total: int
    steps_total: int
    step_in_epoch: int
    steps_per_epoch: int
    eta_s: float
    """Seconds of steps that are left at this pace."""


def read_window(window: Window, state: TrainState, group: Group) -> Figures:
    """Add up the window over the ranks; this waits for the device, so the time is that of finished steps.

    Raises: ClusterddpError: a loss, or a gradient of the last step, is not finite.
    """
    own = state.gauges.read(state.precision)
    sums = torch.cat((window.losses, window.hits, own.flatten().to(group.device, non_blocking=True)))
    sum_over_ranks(sums, group)
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    norm_on_device = torch.nn.utils.get_total_norm(gradients).double().view(1)
    found = torch.cat((norm_on_device, sums)).cpu()  # the only transfer from the device
    norm, losses, rest = found[0].item(), found[1 : 1 + window.steps], found[1 + len(window.losses) :]
    means = (losses / group.world_size).tolist()
    for step, loss in enumerate(means, start=state.step - window.steps + 1):
        if not math.isfinite(loss):
            raise _astray(f"the loss of step {step} is {loss}")
    if not math.isfinite(norm):
        raise _astray(f"the gradients of step {state.step} have the norm {norm}")
    return Figures(
        loss=sum(means) / len(means),
        hits=rest[0].item(),
        seconds=time.perf_counter() - window.began,
        ranks=rest[1:].view_as(own).tolist(),
    )


def _astray(what: str) -> ClusterddpError:
    return ClusterddpError(
        f"training has gone astray: {what}",
        hint="lower train.lr, lengthen train.warmup, or set train.precision to fp32; checkpoints before it are sound",
    )

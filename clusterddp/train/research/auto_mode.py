"""`comm: auto`: measure computation and communication once, estimate each allowed mode's step, and choose.

All ranks measure together, on a copy of the model, and the slowest rank's time counts. So all choose the same mode, and
the training is unchanged. The checkpoint keeps the choice.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.device import synchronize
from clusterddp.train.exchange import gradients_of
from clusterddp.train.forward import trial_pass
from clusterddp.train.group import Group, max_over_ranks, mean_over_ranks
from clusterddp.train.research.local_steps import share_sent
from clusterddp.train.research.powersgd import PowerSgd

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec

_MOST_ROUNDS, _ENOUGH_S = 10, 3.0
_OVERLAP = 2 / 3
"""The share of a forward and backward pass in which gradients are ready to be sent: the backward pass."""
_TIE = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The times of a step's parts, in s, on the slowest rank."""

    world_size: int
    compute: float
    """Forward and backward passes of a whole step, without any exchange."""
    last_pass: float
    """The last micro-batch's share of `compute`, whose backward pass communication overlaps."""
    sent: Mapping[str, float]
    """The time of an exchange by itself: "fp32" and "bf16", all gradients so; "powersgd:R", its computation included;
    "local:H", what is sent in a step on average."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """The processor time of that exchange; empty where a GPU computes."""

    def step_s(self, comm: str) -> float:
        """Estimate how long a step takes with mode `comm`.

        DDP sends while the backward pass runs, PowerSGD after it, local steps a part during the next step. Overlapped
        communication still uses the processors that compute.
        """
        mode = comm.partition(":")[0]
        what = "fp32" if mode == "exact" else comm
        sent, busy = self.sent[what], self.busy.get(what, 0.0)
        if mode == "powersgd" or comm == "local:1":
            return self.compute + sent
        overlapped = self.compute if mode == "local" else _OVERLAP * self.last_pass
        return self.compute + max(busy, sent - overlapped)


def choose_comm(measured: Measured, allowed: Sequence[str]) -> str:
    """Choose the fastest of exact and `allowed`; within 5 % of it the first in that order."""
    modes = ["exact", *allowed]
    fastest = min(measured.step_s(comm) for comm in modes)
    return next(comm for comm in modes if measured.step_s(comm) <= _TIE * fastest)


def explain_choice(measured: Measured, allowed: Sequence[str]) -> list[str]:
    """Return log lines: the measured times, the estimate for each mode, the choice."""
    ranks, compute_ms = measured.world_size, 1000 * measured.compute
    sent, busy = (
        ", ".join(f"{what} {1000 * seconds:.1f}" for what, seconds in each.items())
        for each in (measured.sent, measured.busy)
    )
    lines = [
        f"comm auto: {ranks} ranks; ms a step: computing {compute_ms:.1f}; ms to exchange at once: {sent}",
        *([f"  of that the processors that compute are busy with it for: {busy}"] if busy else []),
        f"  one step of {ranks} ranks beats {ranks} steps of one if the exchange adds less than "
        f"{ranks - 1} x {compute_ms:.1f} = {(ranks - 1) * compute_ms:.1f} ms:",
        f"  {'mode':<14}{'ms a step':>10}{'exchange adds':>15}{'against one rank':>18}",
    ]
    for comm in ("exact", *allowed):
        step_s = measured.step_s(comm)
        speed = ranks * measured.compute / step_s
        lines.append(f"  {comm:<14}{1000 * step_s:>10.1f}{1000 * step_s - compute_ms:>15.1f}{speed:>17.2f}x")
    lines.append(f"  chosen: {choose_comm(measured, allowed)}")
    return lines


def measure(model: nn.Module, dataset: Dataset, group: Group, *, spec: TrainSpec, precision: str) -> Measured:
    """Time a training step's parts on a copy of `model`; every rank takes part.

    Uncompiled: on GPUs `compile` makes the real step shorter than the one that is measured.
    """
    model = copy.deepcopy(model)
    images = dataset.train_images[: spec.batch_size]
    images = normalize(images, mean=dataset.mean, std=dataset.std, channels_last=True, size=dataset.image_size)
    labels = dataset.train_labels[: spec.batch_size]

    def one_pass() -> None:
        model.zero_grad(set_to_none=True)
        trial_pass(model, images, labels, precision)

    last_pass, _ = _median_s(one_pass, group)
    gradients = gradients_of(model.parameters())
    took = {
        "fp32": _median_s(lambda: mean_over_ranks(gradients, group), group),
        "bf16": _median_s(lambda: mean_over_ranks(gradients, group, dtype=torch.bfloat16), group),
    }
    for comm in spec.comm_allow:
        mode, _, number = comm.partition(":")
        if mode == "local":
            share = share_sent(map(Tensor.numel, gradients), int(number))
            took[comm] = share * took["bf16"][0], share * took["bf16"][1]
        if mode == "powersgd":
            tried = PowerSgd(model, group, rank=int(number), total_steps=0, seed=0)
            took[comm] = _median_s(partial(tried.after_backward, 0), group)
    return Measured(
        world_size=group.world_size,
        compute=spec.accumulate * last_pass,
        last_pass=last_pass,
        sent={what: sent for what, (sent, _) in took.items()},
        busy={what: busy for what, (_, busy) in took.items()} if group.device.type == "cpu" else {},
    )


def _median_s(action: Callable[[], None], group: Group) -> tuple[float, float]:
    """Time `action` some times after a first one; return the slowest rank's median, and the busiest one's, in s.

    Busy is the processor time of all threads of a rank, divided by the number of threads that compute.
    """
    action()
    first = _together_s(action, group)
    rounds = min(_MOST_ROUNDS, int(_ENOUGH_S / max_over_ranks(first[0], group)))
    took_s, busy_s = zip(first, *(_together_s(action, group) for _ in range(rounds)), strict=True)
    busy = statistics.median(busy_s) / torch.get_num_threads()
    return max_over_ranks(statistics.median(took_s), group), max_over_ranks(busy, group)


def _together_s(action: Callable[[], None], group: Group) -> tuple[float, float]:
    """Time `action`, begun on all ranks together: elapsed time, and processor time of this process."""
    max_over_ranks(0.0, group)
    began, busy_before = time.perf_counter(), time.process_time()
    action()
    synchronize(group.device)
    return time.perf_counter() - began, time.process_time() - busy_before

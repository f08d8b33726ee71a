"""The memory of the built-in trainer's ranks on a CPU: measured once, scaled by the values of a spec.

Measured with torch 2.13 on 2 cores of AMD EPYC, memory returned to the system after each step: steps of 16 and of 128
images, and the evaluation of a batch (`benchmarks/training_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.system.units import format_bytes

_MB = 1_000_000
_PROCESS = 60 * _MB
"""The part of Python and torch, oneDNN's kernels and gloo's threads that a forked rank does not share."""
_EVALUATED_PIXELS = 250 * 32 * 32
"""Of a batch of the evaluation (train/evaluate.py)."""
_MARGIN = 1.15
_HEAP = 2.0
"""A heap that is kept is planned as so many times what a step allocates: it has holes, and 1.75 times was measured."""
_KEPT = 0.5
"""Of the free memory ranks that take turns keep at most this much between steps: others use the machine, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes of one rank."""

    resident: int
    """Kept between steps: its own part of Python and torch, weights, gradients and the optimizer's state."""
    step: int
    """Allocated for the passes over a micro-batch, and freed; or for an evaluation, if that needs more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """The values of a model in fp32; bf16 needs `bf16_share` of the bytes for each pixel."""

    values: float
    """Parameters."""
    step_bytes: float
    """For each pixel of a micro-batch that the model sees."""
    evaluation_bytes: float
    """For each pixel of a batch."""
    bf16_share: float


_RESNET18 = _Measured(values=11.2e6, step_bytes=4500, evaluation_bytes=1300, bf16_share=0.52)
_RESNET18_LARGE_STEM = _Measured(values=11.2e6, step_bytes=430, evaluation_bytes=140, bf16_share=0.6)
_FASTNET = _Measured(values=2.0e6, step_bytes=1650, evaluation_bytes=540, bf16_share=0.68)
_LARGE_STEM_FROM = 65  # pixels a side (train/models/resnet.py)


def training_memory(train: Mapping[str, Any], *, image_size: int) -> TrainingMemory | None:
    """Return the memory of a rank with these values of a spec's `train` section; None: the model was not measured.

    `image_size`: pixels of a side of the images that the model sees.
    """
    width = float(train["width"])
    measured = {"resnet18": _RESNET18, "fastnet": _FASTNET}.get(train["model"])
    if measured is None:
        return None
    values, per_pixel, per_evaluated = measured.values, measured.step_bytes, measured.evaluation_bytes
    if train["model"] == "resnet18" and image_size >= _LARGE_STEM_FROM:
        measured = _RESNET18_LARGE_STEM
        per_pixel, per_evaluated = measured.step_bytes, measured.evaluation_bytes
    elif train["model"] == "fastnet":
        values, per_pixel, per_evaluated = values * width**2, per_pixel * width, per_evaluated * width
    share = measured.bf16_share if train["precision"] == "bf16" else 1.0
    # Weights, their gradients in buckets, and momentum; Adam's second state, the running mean, kept errors.
    copies = 3 + (train["optimizer"] == "adam") + (train["ema"] > 0) + (not train["comm"].startswith(("exact", "bf16")))
    gradients = 4 * values  # of a pass, before they are copied to buckets
    step = gradients + share * per_pixel * train["batch_size"] * image_size**2
    evaluation = share * per_evaluated * max(_EVALUATED_PIXELS, image_size**2)
    return TrainingMemory(resident=int(_PROCESS + 4 * copies * values), step=int(max(step, evaluation)))


def plan_turns(num_ranks: int, *, threads: int, cores: int, need: TrainingMemory | None, free: int) -> int:
    """Return how many of a host's `num_ranks`, of `threads` each, compute at a time.

    `free`: bytes of memory; 0: not known.
    Raises: ClusterddpError: there is not enough for one.
    """
    by_cores = min(num_ranks, max(1, cores // threads))
    if need is None or not free:
        return by_cores
    left = free / _MARGIN - num_ranks * need.resident
    if left < need.step:
        raise ClusterddpError(
            f"{num_ranks} rank{'s' * (num_ranks > 1)} on this host: {format_bytes(need.resident)} each, and "
            f"{format_bytes(need.step)} for a step of one at a time, are "
            f"{format_bytes(_MARGIN * (num_ranks * need.resident + need.step))}; "
            f"{format_bytes(free)} of memory are free",
            hint="train.batch_size with half the images and train.accumulate with twice the number takes less for the "
            "same step; so do fewer ranks",
        )
    return min(by_cores, int(left // need.step))


def can_keep_steps(num_ranks: int, *, turns: bool, need: TrainingMemory | None, free: int) -> bool:
    """Return whether each of a host's ranks can keep the memory of a step for its next one.

    `turns`: whether they take turns at computing; those that do not keep it where the memory is not known.
    `free`: bytes of memory; 0: not known.
    """
    if need is None or not free:
        return not turns
    return num_ranks * (need.resident + _HEAP * need.step) <= (_KEPT if turns else 1 / _MARGIN) * free


def split_batch(train: Mapping[str, Any], *, image_size: int, num_ranks: int, free: int) -> int:
    """Return the number of micro-batches (1, 2, 4 ...) with which a step of one rank at a time fits into memory.

    Raises: ClusterddpError: no number is enough.
    """
    parts = 1
    while True:
        need = training_memory({**train, "batch_size": train["batch_size"] // parts}, image_size=image_size)
        try:
            plan_turns(num_ranks, threads=1, cores=1, need=need, free=free)
        except ClusterddpError:
            if train["batch_size"] % (2 * parts):
                raise
            parts *= 2
        else:
            return parts

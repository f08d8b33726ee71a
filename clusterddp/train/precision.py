"""What the model computes in: fp32, or bf16 where a look at the hardware and two trial steps say that it pays."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.group import Group, min_over_ranks

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec

_TRIAL_IMAGES = 16
_TRIAL_STEPS = 2
_TRIAL_S = 0.5  # of steps that are short, more are tried
_WORTH_IT = 1.2  # below it the smaller error of fp32 is worth more than the time


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a forward pass computes in `precision` (fp32 or bf16)."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def trial_pass(module: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
    """Do what a step does up to the gradients, which are added to those of `module`; its buffers move, too.

    images: float, normalised, [batch, channel, height, width]; labels: int64, [batch].
    """
    with autocast(precision, images.device):
        logits = module(images)
    cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]


def time_precisions(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Time a step (forward and backward pass) of a copy of `model` in fp32 and in bf16; return seconds of each.

    The steps take turns, so that a neighbour's load falls on both; of each kind the first is a warm-up, the shortest of
    the others counts. images: float, normalised, [batch, channel, height, width]; labels: int64, [batch]; on the CPU.
    """
    trial = copy.deepcopy(model).train()
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    deadline = time.perf_counter() + _TRIAL_S
    while len(seconds["bf16"]) <= _TRIAL_STEPS or time.perf_counter() < deadline:
        for precision, times in seconds.items():
            began = time.perf_counter()
            trial_pass(trial, images, labels, precision)
            times.append(time.perf_counter() - began)
            trial.zero_grad(set_to_none=True)
    return min(seconds["fp32"][1:]), min(seconds["bf16"][1:])


def choose_precision(
    spec: TrainSpec,
    model: nn.Module,
    dataset: Dataset,
    group: Group,
    *,
    time_trial: Callable[[nn.Module, Tensor, Tensor], tuple[float, float]] = time_precisions,
) -> tuple[str, str]:
    """Settle what `auto` means, the same on every rank; return it (fp32 or bf16) and the reason, in words.

    Neither `model` nor any random state is changed. With `deterministic` nothing is timed: time never repeats.
    """
    lack = lack_of_bf16(group)
    if lack is not None:
        return "fp32", f"{lack} (before Ampere; its fp16 is not used)" if group.device.type == "cuda" else lack
    if group.device.type == "cuda":
        return "bf16", "the GPU has units for it"
    if spec.deterministic:
        return "bf16", "the CPU has units for it; with train.deterministic it is not timed"
    images, labels = dataset.train_images[:_TRIAL_IMAGES], dataset.train_labels[:_TRIAL_IMAGES]
    images = normalize(images, mean=dataset.mean, std=dataset.std, channels_last=True, size=dataset.image_size)
    fp32_s, bf16_s = time_trial(model, images, labels)
    gain = min_over_ranks(fp32_s / bf16_s, group)
    where = "" if group.world_size == 1 else " on the host that gains least"
    reason = f"{gain:.1f} times as fast as fp32{where}, in trial steps of {len(labels)} images"
    return ("bf16", reason) if gain >= _WORTH_IT else ("fp32", f"bf16 would be {reason}, less than {_WORTH_IT}")


def lack_of_bf16(group: Group) -> str | None:
    """Say what a device of the run lacks for bf16; None when all have it. Every rank must ask."""
    if min_over_ranks(float(_has_bf16(group.device)), group):
        return None
    what = "GPU" if group.device.type == "cuda" else "CPU"
    lacks = "no bf16 units" if what == "GPU" else "neither avx512_bf16 nor AMX"
    return f"a {what} of the run has {lacks}" if group.world_size > 1 else f"the {what} has {lacks}"


def _has_bf16(device: torch.device) -> bool:
    """Say whether the device computes in bf16 itself; where it does not, torch emulates it, up to 25 times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public names for these (2.10 to 2.13); on a CPU of another make they are False.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

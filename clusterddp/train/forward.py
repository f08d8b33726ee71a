"""The forward pass: the model on its device, its wrappers (sync_bn, strategy, compile), and its precision."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.device import cpu_bf16_units, synchronize
from clusterddp.train.group import Group, min_over_ranks
from clusterddp.train.models import build_model

_TRIAL_IMAGES = 16
_TRIAL_STEPS = 2
_TRIAL_S = 0.5  # of steps that are short, more are tried
_WORTH_IT = 1.2  # below it the smaller error of fp32 is worth more than the time


def place_model(spec: TrainSpec, dataset: Dataset, group: Group, *, is_restored: bool = False) -> nn.Module:
    """Build the model on the rank's device, channels last, before anything is wrapped around it."""
    if spec.strategy != "ddp" and group.world_size > 1:
        raise ClusterddpError(
            f"train.strategy {spec.strategy} is one process, found {group.world_size} ranks",
            hint="strategy ddp is the one for many",
        )
    model = build_model(spec, dataset, is_restored=is_restored).to(group.device)
    if spec.sync_bn:
        if group.device.type != "cuda":
            raise ClusterddpError(
                f"train.sync_bn: torch's SyncBatchNorm works on GPUs only, and rank {group.rank} is on the CPU",
                hint="leave it out: before each evaluation the ranks' batch norm statistics are averaged anyway",
            )
        assert spec.model != "fastnet", "SyncBatchNorm replaces its form of batch norm: spec/check.py refuses it"
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    # Ranks must agree on strides (torch's stubs do not know this form of `to`).
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def wrap_forward(module: nn.Module, model: nn.Module, spec: TrainSpec, group: Group, *, precision: str) -> nn.Module:
    """Return what the forward pass calls: `module` (`model`, or what exchanges its gradients), maybe compiled.

    Evaluation goes by `model` itself, so that its last, short batch compiles nothing.
    """
    if spec.strategy == "dp":
        if group.device.type != "cuda" or torch.cuda.device_count() == 1:
            return model  # one device, so there is nothing to divide
        own = group.device.index
        others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
        return nn.DataParallel(_InPrecision(model, precision, group.device), device_ids=[own, *others])
    return torch.compile(module) if is_compiled(spec, group.device) else module  # type: ignore[return-value]


def is_compiled(spec: TrainSpec, device: torch.device) -> bool:
    """Return whether steps are compiled. On CPUs `auto` does not: 15 to 30 s of compiling gain 10 % at best."""
    return spec.strategy != "dp" and (spec.compile == "always" or (spec.compile == "auto" and device.type == "cuda"))


def compile_now(module: nn.Module, model: nn.Module, dataset: Dataset, spec: TrainSpec, precision: str) -> float:
    """Compile `module` by one forward and backward pass that leaves `model` unchanged, even where it fails.

    Return the seconds. Every rank must take part where the pass exchanges something.
    """
    began = time.perf_counter()
    device = dataset.train_images.device
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = torch.zeros(spec.batch_size, *dataset.image_shape, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
    try:
        model.zero_grad(set_to_none=True)
        trial_pass(module, images, labels, precision)
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    synchronize(device)
    return time.perf_counter() - began


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a forward pass computes in `precision` (fp32 or bf16)."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def trial_pass(module: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
    """Do a step up to the gradients, which are added to those of `module`; its buffers change, too.

    images: float, normalised, [batch, channel, height, width]; labels: int64, [batch].
    """
    with autocast(precision, images.device):
        logits = module(images)
    cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]


def time_precisions(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Time a step (forward and backward pass) of a copy of `model` in fp32 and in bf16; return seconds of each.

    The steps alternate, so that other load slows both; of each kind the first is a warm-up, the shortest of the others
    counts. images: float, normalised, [batch, channel, height, width]; labels: int64, [batch]; on the CPU.
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
    """Choose the precision for `auto`, the same on every rank; return it (fp32 or bf16) and the reason.

    Neither `model` nor any random state is changed. With `deterministic` nothing is timed: times never repeat.
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
    # On one rank of each host: the others have the same processor, and would share it.
    is_timed = not group.host_ranks or group.host_index == 0
    fp32_s, bf16_s = time_trial(model, images, labels) if is_timed else (math.inf, 1.0)
    gain = min_over_ranks(fp32_s / bf16_s, group)
    where = "" if group.world_size == 1 else " on the host that gains least"
    reason = f"{gain:.1f} times as fast as fp32{where}, in trial steps of {len(labels)} images"
    return ("bf16", reason) if gain >= _WORTH_IT else ("fp32", f"bf16 would be {reason}, less than {_WORTH_IT}")


def lack_of_bf16(group: Group) -> str | None:
    """Describe what a device of the run lacks for bf16; None when all have it. Every rank must call this.

    Without units for it torch emulates it, up to 25 times slower.
    """
    on_gpu = group.device.type == "cuda"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else any(cpu_bf16_units())
    if min_over_ranks(float(has_bf16), group):
        return None
    what, lacks = ("GPU", "no bf16 units") if on_gpu else ("CPU", "neither avx512_bf16 nor AMX")
    return f"a {what} of the run has {lacks}" if group.world_size > 1 else f"the {what} has {lacks}"


class _InPrecision(nn.Module):
    """Enters autocast inside: DataParallel's threads do not inherit the caller's bf16 and would compute in fp16."""

    def __init__(self, model: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.device = device

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, class] of normalised images [batch, channel, height, width]."""
        with autocast(self.precision, self.device):
            logits: Tensor = self.model(images)
        return logits

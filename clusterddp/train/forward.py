"""What a forward pass calls: the model on its device, and around it what sync_bn, strategy and compile ask for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.group import Group
from clusterddp.train.models import build_model
from clusterddp.train.models.resnet import has_large_stem
from clusterddp.train.precision import autocast, trial_pass

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec


def place_model(spec: TrainSpec, dataset: Dataset, group: Group) -> nn.Module:
    """Build the model on the rank's device, channels last, before anything is wrapped around it.

    Raises: ClusterddpError: what the spec asks for does not work with these ranks.
    """
    if spec.strategy != "ddp" and group.world_size > 1:
        raise ClusterddpError(
            f"train.strategy {spec.strategy} is one process, found {group.world_size} ranks",
            hint="strategy ddp is the one for many",
        )
    model = build_model(spec, dataset).to(group.device)
    if spec.sync_bn:
        model = _with_sync_bn(model, spec, group)
    # Ranks must agree on strides (torch's stubs do not know this form of `to`).
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def wrap_forward(module: nn.Module, model: nn.Module, spec: TrainSpec, group: Group, *, precision: str) -> nn.Module:
    """Return what the forward pass calls: `module` (`model`, or what exchanges its gradients), maybe compiled.

    Evaluation goes by `model` itself, so that its last, short batch compiles nothing.
    """
    if spec.strategy == "dp":
        return _data_parallel(model, group, precision)
    if not is_compiled(spec, group.device):
        return module
    return torch.compile(module, **compile_options(spec, group.device))  # type: ignore[return-value]


def is_compiled(spec: TrainSpec, device: torch.device) -> bool:
    """Say whether steps are compiled. On CPUs `auto` does not: 15 to 30 s of compiling gain 10 % at best."""
    return spec.strategy != "dp" and (
        spec.compile in ("always", "max") or (spec.compile == "auto" and device.type == "cuda")
    )


def compile_options(spec: TrainSpec, device: torch.device) -> dict[str, Any]:
    """Return what torch.compile is told; on CPUs `max` is `always`."""
    if spec.compile != "max" or device.type != "cuda":
        return {}
    return {"mode": "max-autotune" if uses_cuda_graphs(spec, device) else "max-autotune-no-cudagraphs"}


def uses_cuda_graphs(spec: TrainSpec, device: torch.device) -> bool:
    """Say whether forward and backward passes are CUDA graphs.

    A graph writes its results, gradients included, to the same memory each time, so none may outlive a second
    micro-batch; and SyncBatchNorm's exchange is not to be captured.
    """
    return spec.compile == "max" and device.type == "cuda" and spec.accumulate == 1 and not spec.sync_bn


def describe_forward(spec: TrainSpec, group: Group, *, compile_seconds: float) -> list[str]:
    """Tell, in words, what is unusual about the forward pass of training."""
    facts = [f"compiled in {compile_seconds:.1f} s"] if compile_seconds else []
    if spec.strategy == "dp":
        gpus = torch.cuda.device_count() if group.device.type == "cuda" else 0
        idle = f"strategy dp: one {group.device.type} device, so there is nothing to share out"
        facts.append(f"strategy dp: DataParallel over {gpus} GPUs" if gpus > 1 else idle)
    return facts


def describe_images(spec: TrainSpec, dataset: Dataset) -> str:
    """Tell, in words, the size of the images, and which first layers of the model follow from it."""
    kept, size = dataset.train_images.shape[2], dataset.image_size
    enlarged = f", enlarged to {size}x{size} in each batch" if kept < size else ""
    stem = ""
    if spec.model == "resnet18":
        stem = (
            "; resnet18 begins as for ImageNet, 7x7 and max-pool" if has_large_stem(size) else "; resnet18 begins 3x3"
        )
    return f"images of {kept}x{kept} pixels{enlarged}{stem}"


def count_devices(forward: nn.Module) -> int:
    """Count the devices that one rank's forward pass works on."""
    return len(forward.device_ids) if isinstance(forward, nn.DataParallel) else 1


def compile_now(module: nn.Module, model: nn.Module, dataset: Dataset, spec: TrainSpec, precision: str) -> float:
    """Have `module` compiled by one forward and backward pass that leaves no trace in `model`, even where it fails.

    Return the seconds. Every rank must take part where the pass exchanges something.
    """
    began = time.perf_counter()
    device = dataset.train_images.device
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = torch.zeros(spec.batch_size, *dataset.image_shape, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
    try:
        for _ in range(3 if uses_cuda_graphs(spec, device) else 1):  # the first compiles, the second records
            mark_step(spec, device)
            model.zero_grad(set_to_none=True)
            trial_pass(module, images, labels, precision)
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def mark_step(spec: TrainSpec, device: torch.device) -> None:
    """Have CUDA graphs know that a step begins: what the one before has left in their memory is of no use any more."""
    if uses_cuda_graphs(spec, device):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


class _InPrecision(nn.Module):
    """Enters autocast inside: DataParallel's threads do not know of the caller's bf16 and would compute in fp16."""

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


def _data_parallel(model: nn.Module, group: Group, precision: str) -> nn.Module:
    """Share each batch out over all GPUs that this process sees; with one, or on the CPU, there is nothing to share."""
    if group.device.type != "cuda" or torch.cuda.device_count() == 1:
        return model
    own = group.device.index
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != own]
    return nn.DataParallel(_InPrecision(model, precision, group.device), device_ids=[own, *others])


def _with_sync_bn(model: nn.Module, spec: TrainSpec, group: Group) -> nn.Module:
    if group.device.type != "cuda":
        raise ClusterddpError(
            f"train.sync_bn: torch's SyncBatchNorm works on GPUs only, and rank {group.rank} is on the CPU",
            hint="leave it out: before each evaluation the ranks' batch norm statistics are averaged anyway",
        )
    if spec.model == "fastnet":
        raise ClusterddpError(
            "train.sync_bn: fastnet has a batch norm of its own form, which SyncBatchNorm would replace",
            hint="leave it out, or train resnet18",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted

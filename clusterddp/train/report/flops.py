"""The arithmetic of training and the peak of a device, from which TFLOP/s and MFU are computed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A pattern of CUDA's name for a GPU -> (bf16, fp32) in TFLOP/s, dense. The first match counts. From Ampere on fp32 is
# TF32, cuDNN's default for convolutions; V100 and T4 have no bf16: theirs is fp16.
# Source: NVIDIA's data sheets, divided by two where the figure is with sparsity.
_PEAKS = {
    r"\bB200\b": (2250, 1125),
    r"\bH200 NVL\b|\bH100 NVL\b": (835.5, 417.5),
    r"\bH100 PCIe\b|\bH800 PCIe\b": (756, 378),
    r"\bG?H200\b|\bH100\b|\bH800\b": (989.4, 494.7),
    r"\bH20\b": (148, 74),
    r"\bA100\b|\bA800\b": (312, 156),
    r"\bA30\b": (165, 82),
    r"\bA40\b": (149.7, 74.8),
    r"\bA10\b": (125, 62.5),
    r"\bRTX A6000\b": (154.8, 77.4),
    r"\bL40S\b": (362, 183),
    r"\bL40\b": (181, 90.5),
    r"\bL4\b": (121, 60),
    r"\bRTX 4090$": (165.2, 82.6),
    r"\bRTX 3090$": (71, 35.6),
    r"\bV100-PCIE\b": (112, 14),
    r"\bV100\b": (125, 15.7),
    r"\bT4\b": (65, 8.1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of a device, in TFLOP/s, and its source."""

    tflop_per_s: float
    source: str


def read_peak(device: torch.device, precision: str) -> Peak | None:
    """Look up the device's peak; None for a CPU and for a GPU that is not in the table."""
    return find_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def find_peak(name: str, precision: str) -> Peak | None:
    """Look up a GPU by its name; a slice of one (MIG) has no figure."""
    if "MIG " in name:
        return None
    for pattern, (bf16, fp32) in _PEAKS.items():
        if re.search(pattern, name):
            tflop_per_s = bf16 if precision == "bf16" else fp32
            return Peak(tflop_per_s=tflop_per_s, source=f"NVIDIA's data sheet: {name}, {precision}, dense")
    return None


def count_flops(model: nn.Module, image: Tensor) -> int:
    """Count the operations of a forward and backward pass over one image: those of convolutions and linear layers.

    image: float, [1, channel, height, width]. A multiplication and an addition count as two, as in data sheets. torch's
    own FlopCounterMode finds the same numbers, and takes two seconds to import what it needs.
    """
    found: list[int] = []

    def count(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        # The backward pass costs as much again for the weights, and for what was given, where a gradient is wanted.
        passes = 1 + layer.weight.requires_grad + given[0].requires_grad
        found.append(2 * output.numel() * layer.weight[0].numel() * passes)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    was_training, benchmark = model.training, torch.backends.cudnn.benchmark
    model.eval()  # batch norm's statistics stay as they are
    torch.backends.cudnn.benchmark = False  # one image is not worth a benchmark of algorithms
    model(image)
    torch.backends.cudnn.benchmark = benchmark
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return sum(found)

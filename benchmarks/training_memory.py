"""Measure what a rank of the trainer takes on the CPU: training_memory.py MODEL BATCH PRECISION [SIZE].

Prints JSON, in bytes: `resident`, what weights and momentum and torch's own data add after the imports; `step`, what a
forward and backward pass takes besides; `evaluation`, what a batch of the evaluation does. From these comes the table
in clusterddp/facts/training_memory.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: TID253 - it is about torch

from clusterddp.train.compute_slots import return_freed_memory
from clusterddp.train.forward import autocast, trial_pass
from clusterddp.train.models.fastnet import FastNet
from clusterddp.train.models.resnet import has_large_stem, resnet18

_CPU = torch.device("cpu")


def main(model_name: str, batch: int, precision: str, size: int = 32) -> dict[str, int]:
    """Measure one model."""
    torch.set_num_threads(1)
    return_freed_memory()
    before = read_bytes("VmRSS")
    model = (
        resnet18(channels=3, num_classes=10, large_stem=has_large_stem(size))
        if model_name == "resnet18"
        else FastNet(channels=3, num_classes=10, width=1.0)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, nesterov=True, fused=True)
    images, labels = _images(batch, size), torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        trial_pass(model, images, labels, precision)

    def evaluate() -> None:
        with torch.no_grad(), autocast(precision, _CPU):
            model.eval()(_images(250 * 32 // max(32, size), size))

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    resident = read_bytes("VmRSS") - before
    peak = measure_peak(step)
    optimizer.zero_grad(set_to_none=True)
    return {"resident": resident, "step": peak, "evaluation": measure_peak(evaluate)}


def measure_peak(function: Callable[[], None]) -> int:
    """Return by how many bytes the process grows while `function` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = read_bytes("VmRSS")
    function()
    return read_bytes("VmHWM") - before


def read_bytes(name: str) -> int:
    """Read a line of /proc/self/status that is in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)


if __name__ == "__main__":
    name, images, precision, *rest = sys.argv[1:]
    print(json.dumps(main(name, int(images), precision, *map(int, rest))))

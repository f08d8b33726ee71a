"""What the times of all ranks' steps amount to, in a window and in a whole run: speed, waiting, arithmetic, memory."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from clusterddp.train.report.clock import StepTimes

_BIN = math.log(1.01)  # step times of a run are kept to one part in a hundred, so that their number does not grow
_ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers:
    """What a rank tells the others about its window."""

    busy_ms: float
    """The median of its steps without the waiting for others; so one hiccup makes no straggler."""
    steps_ms: float
    data_ms: float
    exposed_ms: float
    memory_mb: float
    peak_tflop_per_s: float
    """0 when it is not known."""

    @classmethod
    def of(cls, times: StepTimes, device: torch.device, peak_tflop_per_s: float) -> RankNumbers:
        return cls(
            busy_ms=statistics.median(times.busy_ms),
            steps_ms=sum(times.steps_ms),
            data_ms=times.data_ms,
            exposed_ms=times.exposed_ms,
            memory_mb=read_memory_peak_mb(device),
            peak_tflop_per_s=peak_tflop_per_s,
        )

    def to_list(self) -> list[float]:
        return [getattr(self, each.name) for each in fields(self)]

    @classmethod
    def from_list(cls, values: list[float]) -> RankNumbers:
        return cls(**{each.name: value for each, value in zip(fields(cls), values, strict=True)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What steps ran with; a figure means nothing without."""

    world_size: int
    precision: str
    comm: str
    exact: bool
    flop_per_image: int
    """Forward and backward."""
    peak_tflop_per_s: float | None
    """Of all ranks' devices together."""
    peak_source: str | None


@dataclass(kw_only=True, slots=True)
class Totals:
    """What is added up over the windows of a run and all its attempts; times are sums over the ranks."""

    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    steps: int = 0
    steps_ms: float = 0.0
    data_ms: float = 0.0
    exposed_ms: float = 0.0
    memory_mb: float = 0.0
    """The most that any rank had."""
    bytes_sent: float = 0.0
    """By each rank."""
    spread: float = 0.0
    """The spread of each window times its steps."""
    bins: dict[int, int] = field(default_factory=dict)
    """How many steps took 1.01 to the power of the key, in ms."""
    straggler: dict[str, Any] | None = None
    """The worst one that was named."""
    time_to_accuracy: dict[str, float] = field(default_factory=dict)
    """Seconds in steps until an evaluation first found this share, written with two digits, to be right."""

    def add(self, other: Totals) -> None:
        """Add a window, whose `straggler` is the one that is named now."""
        for name in ("steps", "steps_ms", "data_ms", "exposed_ms", "bytes_sent", "spread"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory_mb = max(self.memory_mb, other.memory_mb)
        for key, count in other.bins.items():
            self.bins[key] = self.bins.get(key, 0) + count
        if other.straggler and other.straggler["ratio"] > (self.straggler or {"ratio": 0.0})["ratio"]:
            self.straggler = other.straggler

    def reach(self, accuracy: float, train_seconds: float) -> None:
        """Note which accuracies an evaluation has reached for the first time."""
        for share in _ACCURACIES:
            if accuracy >= share:
                self.time_to_accuracy.setdefault(f"{share:.2f}", round(train_seconds, 3))


def sum_up(ranks: list[RankNumbers], steps_ms: list[float], *, bytes_per_step: float, spread: float) -> Totals:
    """Make a window's totals of all ranks' numbers and this rank's steps."""
    totals = Totals(
        steps=len(steps_ms),
        steps_ms=sum(rank.steps_ms for rank in ranks),
        data_ms=sum(rank.data_ms for rank in ranks),
        exposed_ms=sum(rank.exposed_ms for rank in ranks),
        memory_mb=max(rank.memory_mb for rank in ranks),
        bytes_sent=bytes_per_step * len(steps_ms),
        spread=spread * len(steps_ms),
    )
    for step_ms in steps_ms:
        key = round(math.log(max(step_ms, 1e-6)) / _BIN)
        totals.bins[key] = totals.bins.get(key, 0) + 1
    return totals


def tell(totals: Totals, images_per_s: float, conditions: Conditions) -> dict[str, Any]:
    """Return the figures of a window or a run as metrics.jsonl and summary.json have them; docs/metrics.md explains."""
    tflop_per_s = images_per_s * conditions.flop_per_image / 1e12
    peak = conditions.peak_tflop_per_s
    alone = conditions.world_size == 1
    return {
        "images_per_s": images_per_s,
        "images_per_s_per_rank": images_per_s / conditions.world_size,
        "step_ms": quantiles((math.exp(key * _BIN), count) for key, count in totals.bins.items()),
        "data_wait_percent": _percent(totals.data_ms, totals.steps_ms),
        "comm_exposed_percent": 0.0 if alone else _percent(totals.exposed_ms, totals.steps_ms),
        "comm_bytes_per_step": round(totals.bytes_sent / max(1, totals.steps)),
        "tflop_per_s": round(tflop_per_s, 6),
        "mfu_percent": None if peak is None else _percent(tflop_per_s, peak),
        "peak_tflop_per_s": peak,
        "peak_source": conditions.peak_source,
        "memory_peak_mb": round(totals.memory_mb, 1),
        "straggler_spread": round(totals.spread / max(1, totals.steps), 3),
        "straggler": totals.straggler,
        "precision": conditions.precision,
        "comm": conditions.comm,
        "exact": conditions.exact,
    }


def quantiles(counted: Iterable[tuple[float, int]]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum of values, each of which comes with its count."""
    ordered = sorted(counted)
    total = sum(count for _, count in ordered)
    found: dict[str, float] = {}
    below = 0
    for value, count in ordered:
        below += count
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
            if below >= share * total:
                found.setdefault(name, round(value, 3))
    return found


def read_memory_peak_mb(device: torch.device) -> float:
    """Read the most memory this rank had so far, in 10^6 bytes: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0

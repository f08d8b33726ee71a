"""The figures of a window of steps and of a whole run, over all ranks: loss, speed, waiting, memory.

`StepClock` has this rank's times. `Meter.read` adds up those of all ranks in one all-reduce, into the `Totals` of the
window. `figures_of` makes the figures of a row in metrics.jsonl from these, and those of summary.json from the run's.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.run.metrics import reached
from clusterddp.train.device import synchronize
from clusterddp.train.group import Group, sum_over_ranks

_BIN = math.log(1.01)  # step times of a run are kept to one part in a hundred, so that their number does not grow
_ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)

StepEvent = Literal["step", "load_begin", "load_end", "wait_begin", "wait_end", "step_end"]
"""`step`: a step begins. `load_*`: around taking and augmenting a micro-batch. `wait_*`: around waiting for the other
ranks with nothing else to do. `step_end`: the step is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of some steps, in ms."""

    steps_ms: list[float]
    """Each step, up to the beginning of the next one."""
    busy_ms: list[float]
    """Each step without the time in which this rank waited for the other ranks."""
    data_ms: float
    """All steps together: taking and augmenting images."""
    exposed_ms: float
    """All steps together: waiting for the other ranks with nothing else to do, the transfer included."""


class StepClock:
    """Records events of steps: with this process's clock on a CPU, with CUDA events in the stream on a GPU.

    Recording waits for nothing; `read` waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[StepEvent, Any]] = []
        self._spare: list[torch.cuda.Event] = []

    def follow(self, model: nn.Module) -> None:
        """Record `wait_begin` in each backward pass of `model`, when its last gradient is complete.

        That is the first trained parameter's: gradients are computed from the last layer to the first.
        """
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        def record(parameter: Tensor) -> None:
            self.record("wait_begin")

        first.register_post_accumulate_grad_hook(record)  # type: ignore[no-untyped-call]

    def record(self, event: StepEvent) -> None:
        if self._device.type != "cuda":
            self._events.append((event, time.perf_counter()))
            return
        at: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        at.record()
        self._events.append((event, at))

    def read(self) -> StepTimes:
        """Return the times of all steps since the last reading; on a GPU this waits until they are done."""
        self.record("step")  # the end of the last one
        synchronize(self._device)
        events, self._events = self._events, []
        times = times_of([(event, self._ms(events[0][1], at)) for event, at in events])
        if self._device.type == "cuda":
            self._spare.extend(at for _, at in events)
        return times

    def _ms(self, start: Any, end: Any) -> float:
        if self._device.type == "cuda":
            return float(start.elapsed_time(end))
        return 1000.0 * float(end - start)


def times_of(events: list[tuple[StepEvent, float]]) -> StepTimes:
    """Compute the times from events, each at its time in ms, the last of which ends the last step."""
    begins = [at for event, at in events if event == "step"]
    busy: list[float] = []
    data = exposed = waited = 0.0
    last: dict[StepEvent, float] = {}
    for event, at in events:
        if event == "step":
            last, waited = {}, 0.0
        elif event == "load_end":
            data += at - last["load_begin"]
        elif event == "wait_end" and "wait_begin" in last:
            waited += at - last["wait_begin"]
        elif event == "step_end":
            busy.append(at - last["step"] - waited)
            exposed += waited
        last[event] = at
    steps = [end - begin for begin, end in itertools.pairwise(begins)]
    return StepTimes(steps_ms=steps, busy_ms=busy, data_ms=data, exposed_ms=exposed)


class Window:
    """Each step's loss, and the correct answers of all steps, of one rank since the last report.

    They are on the device, so that no step waits for a number.
    """

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
        """Add one micro-batch of the current step; `loss` is its share of the step's loss."""
        self.losses[self.steps] += loss
        self.hits += (logits.argmax(1) == labels).sum()


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over the windows of a run and all its attempts; times are sums over the ranks."""

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
    bins: dict[int, int] = field(default_factory=dict)
    """How many steps took 1.01 to the power of the key, in ms."""
    time_to_accuracy: dict[str, float] = field(default_factory=dict)
    """Seconds in steps until an evaluation first reached this accuracy, written with two digits."""

    def add(self, window: Totals) -> None:
        """Add a window."""
        for name in ("steps", "steps_ms", "data_ms", "exposed_ms", "bytes_sent"):
            setattr(self, name, getattr(self, name) + getattr(window, name))
        self.memory_mb = max(self.memory_mb, window.memory_mb)
        for key, count in window.bins.items():
            self.bins[key] = self.bins.get(key, 0) + count

    def reach(self, accuracy: float, train_seconds: float) -> None:
        """Record which accuracies an evaluation has reached for the first time."""
        for share in _ACCURACIES:
            if accuracy >= share:
                self.time_to_accuracy.setdefault(f"{share:.2f}", round(train_seconds, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowFigures:
    """A window over all ranks: the mean loss, the number of correct answers, the time it took."""

    loss: float
    hits: float
    seconds: float
    totals: Totals


class Meter:
    """Measures the steps of one rank, and reads a window of all ranks."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.clock = StepClock(group.device)
        self.clock.follow(model)
        self._model = model
        self.group = group

    def read(self, window: Window, *, last_step: int, bytes_per_step: float) -> WindowFigures:
        """Add up the window over the ranks; this waits for the device, so the time is that of finished steps.

        Raises: ClusterddpError: a loss, or a gradient of the last step, is not finite.
        """
        group = self.group
        times = self.clock.read()
        # The median: one slow step says nothing of a rank.
        reached.step, reached.own_step_s = last_step, statistics.median(times.busy_ms) / 1e3
        own = [sum(times.steps_ms), times.data_ms, times.exposed_ms, read_memory_peak_mb(group.device)]
        rows = torch.zeros(group.world_size, len(own), dtype=torch.float64)
        rows[group.rank] = torch.tensor(own, dtype=torch.float64)
        sums = torch.cat((window.losses, window.hits, rows.flatten().to(group.device, non_blocking=True)))
        sum_over_ranks(sums, group)
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm_on_device = torch.nn.utils.get_total_norm(gradients).double().view(1)
        found = torch.cat((norm_on_device, sums)).cpu()  # the only transfer from the device
        norm, losses, hits, numbers = torch.split(found, [1, len(window.losses), 1, rows.numel()])
        means = (losses[: window.steps] / group.world_size).tolist()
        _check_finite(means, norm.item(), last_step=last_step)
        seconds = time.perf_counter() - window.began
        columns = zip(*numbers.view_as(rows).tolist(), strict=True)
        sums_ms, data_ms, exposed_ms, memory_mb = (list(column) for column in columns)
        steps = len(times.steps_ms)
        totals = Totals(
            steps=steps,
            steps_ms=sum(sums_ms),
            data_ms=sum(data_ms),
            exposed_ms=sum(exposed_ms),
            memory_mb=max(memory_mb),
            bytes_sent=bytes_per_step * steps,
            bins=dict(Counter(round(math.log(max(step_ms, 1e-6)) / _BIN) for step_ms in times.steps_ms)),
        )
        return WindowFigures(loss=sum(means) / len(means), hits=hits.item(), seconds=seconds, totals=totals)


def figures_of(totals: Totals, images_per_s: float, *, world_size: int, **conditions: Any) -> dict[str, Any]:
    """Return the figures of a window or a run as metrics.jsonl and summary.json have them; docs/metrics.md explains.

    `conditions`: what else the steps ran with, under its key in the row.
    """
    return {
        "images_per_s": images_per_s,
        "images_per_s_per_rank": images_per_s / world_size,
        "step_ms": quantiles((math.exp(key * _BIN), count) for key, count in totals.bins.items()),
        "data_wait_percent": _percent(totals.data_ms, totals.steps_ms),
        "comm_exposed_percent": 0.0 if world_size == 1 else _percent(totals.exposed_ms, totals.steps_ms),
        "comm_bytes_per_step": round(totals.bytes_sent / max(1, totals.steps)),
        "memory_peak_mb": round(totals.memory_mb, 1),
        **conditions,
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _check_finite(losses: list[float], norm: float, *, last_step: int) -> None:
    """Raise ClusterddpError unless the loss of each step up to `last_step`, and its gradients' norm, are finite."""
    steps = enumerate(losses, start=last_step - len(losses) + 1)
    what = next((f"the loss of step {step} is {loss}" for step, loss in steps if not math.isfinite(loss)), None)
    if what is None and not math.isfinite(norm):
        what = f"the gradients of step {last_step} have the norm {norm}"
    if what is not None:
        raise ClusterddpError(
            f"training diverged: {what}",
            hint="lower train.lr, lengthen train.warmup, or set train.precision to fp32; checkpoints before it are "
            "sound",
        )


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0

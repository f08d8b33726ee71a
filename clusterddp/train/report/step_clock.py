"""The times of one rank's steps: reading data, computing, waiting for the other ranks."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clusterddp.train.device import synchronize

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

"""One rank's own times: when its steps began, had their data, their gradients, and ended."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Moment = Literal["step", "load", "loaded", "alone", "together", "done"]
"""A step begins; it begins to take a micro-batch; it has it; this rank waits for nothing but the others; it has what it
needs from them; the step is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of some steps, in ms."""

    steps_ms: list[float]
    """Each step, up to the beginning of the next one."""
    busy_ms: list[float]
    """What each step took without waiting for the other ranks."""
    data_ms: float
    """All steps together: taking and augmenting images."""
    exposed_ms: float
    """All steps together: waiting for the other ranks with nothing else to do, the transfer included."""


class StepClock:
    """Marks moments of steps: by this process's clock on a CPU, by events in the stream on a GPU.

    Marking waits for nothing. What is marked is read once in a while.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Moment, Any]] = []
        self._spare: list[torch.cuda.Event] = []

    def follow(self, model: nn.Module) -> None:
        """Mark `alone` in each backward pass of `model`, when its last gradient is there.

        That is the first trained parameter's: gradients are found from the last layer to the first.
        """
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        def mark(parameter: Tensor) -> None:
            self.mark("alone")

        first.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    def mark(self, moment: Moment) -> None:
        if self._device.type != "cuda":
            self._marks.append((moment, time.perf_counter()))
            return
        event: Any = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((moment, event))

    def read(self) -> StepTimes:
        """Return the times of all steps since the last reading; on a GPU this waits until they are done."""
        self.mark("step")  # the end of the last one
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        marks, self._marks = self._marks, []
        times = times_of([(moment, self._ms(marks[0][1], at)) for moment, at in marks])
        if self._device.type == "cuda":
            self._spare.extend(at for _, at in marks)
        return times

    def _ms(self, start: Any, end: Any) -> float:
        if self._device.type == "cuda":
            return float(start.elapsed_time(end))
        return 1000.0 * float(end - start)


def times_of(marks: list[tuple[Moment, float]]) -> StepTimes:
    """Make sense of marks, in ms, the last of which ends the last step."""
    begins = [at for moment, at in marks if moment == "step"]
    busy: list[float] = []
    data = exposed = waited = 0.0
    last: dict[Moment, float] = {}
    for moment, at in marks:
        if moment == "step":
            last, waited = {}, 0.0
        elif moment == "loaded":
            data += at - last["load"]
        elif moment == "together" and "alone" in last:
            waited += at - last["alone"]
        elif moment == "done":
            busy.append(at - last["step"] - waited)
            exposed += waited
        last[moment] = at
    steps = [end - begin for begin, end in itertools.pairwise(begins)]
    return StepTimes(steps_ms=steps, busy_ms=busy, data_ms=data, exposed_ms=exposed)

"""What a script reports of itself: values and progress, as rows of metrics.jsonl and as TensorBoard events.

Rank 0 of a run writes; every other process returns at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.metrics import MetricsFile, reached
from clusterddp.script.place import find_assignment, is_first_rank, say
from clusterddp.train.report.events import EventWriter

PROGRESS_EVERY_S = 5.0
"""At most so often a row of progress is written."""
_RESERVED = frozenset({"kind", "attempt", "time", "steps_done", "steps_total", "epochs_total"})


def log(values: Mapping[str, Any], *, step: int | None = None, total: int | None = None) -> None:
    """Add a row with these values to metrics.jsonl; `status`, `list` and TensorBoard show them.

    A value is a number or a tensor of one element, which rank 0 reads. `step` defaults to that of `progress`; with
    `total` it is the progress, too, and every rank has to call. Storage that is full or away loses rows and raises
    nothing. Outside of a run this does nothing.

    Raises: TypeError, ValueError: a key or a value that a row cannot have. ClusterddpError: a later attempt has begun.
    """
    if total is not None:
        if step is None:
            raise TypeError("clusterddp.log: total without step: write step=, too")
        progress(step, total)
    if _is_silent():
        return
    numbers = {_checked_key(key): _number(key, value) for key, value in values.items()}
    at = numbers.pop("step", reached.step) if step is None else step
    _report().log(numbers, None if at is None else int(at))


def progress(step: int, total: int | None = None, *, epoch: int | None = None, epochs: int | None = None) -> None:
    """Report that `step` of `total` steps are done; `epoch` counts from 1.

    Call it in every step: a row is written every 5 s, and at the last step.
    """
    reached.step, reached.total = int(step), None if total is None else int(total)
    reached.epoch, reached.epochs = (None if each is None else int(each) for each in (epoch, epochs))
    if not _is_silent():
        _report().progress()


def _is_silent() -> bool:
    return "CLUSTERDDP_RUN_DIR" not in os.environ or not is_first_rank()


@functools.cache
def _report() -> _Report:
    assignment = find_assignment()
    assert assignment is not None
    report = _Report(assignment.run, assignment.attempt.number)
    atexit.register(report.close)
    return report


class _Report:
    """Writes the rows of one attempt."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._metrics = MetricsFile(run, attempt=attempt, report=say)
        self._events: EventWriter | None = None
        self._wrote_at = -math.inf
        self._written: int | None = None
        """The step of the newest row of progress."""

    def log(self, values: Mapping[str, float], step: int | None) -> None:
        place = {"steps_done": reached.step, "steps_total": reached.total} | _epochs()
        row = {"kind": "log", "attempt": self._attempt, "step": step, **place, **values}
        self._append({key: _spelled(value) for key, value in row.items()})
        if self._events is None:
            directory = str(self._run.tensorboard)
            self._events = EventWriter(directory, purge_step=step or 0, report=say)
        self._events.write(step or 0, dict(values))

    def progress(self) -> None:
        now = time.monotonic()
        if now - self._wrote_at >= PROGRESS_EVERY_S or reached.is_last_step:
            self._wrote_at = now
            self._append_progress()

    def _append_progress(self) -> None:
        self._written = reached.step
        row = {"kind": "progress", "attempt": self._attempt, "step": reached.step, "steps_total": reached.total}
        self._append(row | _epochs())

    def _append(self, row: Mapping[str, Any]) -> None:
        self._metrics.append({key: value for key, value in row.items() if value is not None})

    def close(self) -> None:
        """Write how far the script came, and what is still queued."""
        if self._written != reached.step:
            with contextlib.suppress(ClusterddpError):  # a later attempt has begun
                self._append_progress()
        if self._events is not None:
            self._events.close()


def _epochs() -> dict[str, int | None]:
    return {"epoch": reached.epoch, "epochs_total": reached.epochs}


def _checked_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"clusterddp.log: the key {key!r} is a {type(key).__name__}, expected text")
    if key in _RESERVED:
        raise ValueError(f"clusterddp.log: the key {key!r} is a column of every row: choose another name")
    return key


def _number(key: object, value: Any) -> float:
    """Return a value as a number; whole numbers stay whole."""
    if isinstance(value, int):
        return int(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"clusterddp.log: {key!r} is a {type(value).__name__}, expected a number or a tensor of one element"
        ) from error


def _spelled(value: Any) -> Any:
    """Return what JSON takes: `"nan"`, `"inf"` and `"-inf"` are text, which float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

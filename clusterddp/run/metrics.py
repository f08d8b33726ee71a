"""The rows of one attempt in `metrics.jsonl`: appended at once, and counted where the storage does not take them.

And how far a rank is, which the supervisor of its node asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.run.directory import RunDir, refuse_if_stale
from clusterddp.run.record import log_event
from clusterddp.system.files import append_jsonl


@dataclass(kw_only=True, slots=True)
class Reached:
    """How far the program of this process is."""

    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    own_step_s: float | None = None
    """Seconds of a step without its waiting for other ranks, where the program measures it."""

    @property
    def is_last_step(self) -> bool:
        return self.step is not None and self.total is not None and self.step >= self.total


reached = Reached()
"""Known on every rank, outside of a run as well."""


def timed_steps(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the step and the time of each row that has both."""
    pairs = ((row.get("step"), row.get("time")) for row in rows)
    return [(step, at) for step, at in pairs if isinstance(step, int) and isinstance(at, int | float)]


class MetricsFile:
    """Appends rows; storage that is full or away ends no training."""

    def __init__(self, run: RunDir, *, attempt: int, report: Callable[[str], None]) -> None:
        """`report` receives a warning when rows are lost, and another one when they can be written again."""
        self._run = run
        self._attempt = attempt
        self._report = report
        self._lost_rows = 0
        """Since the last row that was written."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, with the time.

        Raises: ClusterddpError: a later attempt of the run has begun.
        """
        try:
            refuse_if_stale(self._run, self._attempt)
            append_jsonl(self._run.metrics, {**row, "time": time.time()})
        except OSError as error:
            self._lost_rows += 1
            if self._lost_rows == 1:
                self._report(f"warning: {self._run.metrics.name} cannot be written, training goes on: {error.strerror}")
            return
        if self._lost_rows:
            self._report(f"warning: {self._run.metrics.name} has lost {self._lost_rows} rows; it can be written again")
            log_event(self._run, "rows_lost", attempt=self._attempt, rows=self._lost_rows)
            self._lost_rows = 0

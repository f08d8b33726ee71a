"""How long a run waited, ran and stood still: three times that `status` and `list` keep apart."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import Start, read_start


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a run so far; they add up to the time since its submit."""

    queued_s: float
    """From the submit until its ranks began, and between attempts that follow by themselves."""
    running_s: float
    """In all attempts."""
    stopped_s: float
    """From the end of an attempt until the ranks that a user resumed begin."""

    def to_json(self) -> dict[str, float]:
        return {name: round(seconds, 1) for name, seconds in dataclasses.asdict(self).items()}


def read_times(run: RunDir, *, created: float, finished: bool, now: float | None = None) -> Times:
    """Read the times of a run from the starts and ends of its attempts.

    `finished`: it does not go on; then its last end is the end of all times. An attempt whose end no process recorded
    counts as running until the next one begins.
    """
    now = time.time() if now is None else now
    spent = {"queued": 0.0, "running": 0.0, "stopped": 0.0}
    since, doing = created, "queued"
    for attempt in run.attempts():
        start, end = _read(attempt)
        if "started" in start:
            spent[doing] += max(0.0, start["started"] - since)
            since, doing = start["started"], "running"
        if end is not None:
            spent[doing] += max(0.0, end.ended - since)
            since, doing = end.ended, "queued" if end.will_restart else "stopped"
    if not finished:
        spent[doing] += max(0.0, now - since)
    return Times(queued_s=spent["queued"], running_s=spent["running"], stopped_s=spent["stopped"])


def _read(attempt: AttemptDir) -> tuple[Start, AttemptEnd | None]:
    """Read how an attempt began and ended; what is damaged counts as not recorded."""
    start: Start = {}
    end = None
    with contextlib.suppress(ClusterddpError):
        start = read_start(attempt) or {}
    with contextlib.suppress(ClusterddpError):
        end = read_end(attempt)
    return start, end

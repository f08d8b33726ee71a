"""Effective training time: how much of a run's time went into steps that count, and where the rest went.

The time from the first step to the end, or to now, is cut at what the history, the starts, the ends and the rows of
`metrics.jsonl` have recorded. So the parts add up to the whole, whatever is missing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_start
from clusterddp.view.curves import sample_lines
from clusterddp.view.progress import number_of
from clusterddp.view.timeline import AttemptSpan, Timeline, time_of
from clusterddp.wire import read_object

PARTS = {
    "steps": "steps that count",
    "repeated": "repeated steps",
    "noticed": "noticed",
    "ended": "ended",
    "waited": "waited",
    "started": "started",
    "imported": "imported",
    "loaded": "loaded",
    "evaluated": "evaluated",
    "checkpointed": "checkpointed",
    "other": "other",
}
"""Part of the time, as in JSON -> its name for people."""
_AFTER_FAULT = ("noticed", "ended", "waited", "started", "imported", "loaded")
"""The parts of the time from a failure to the next step."""
_WHOLE_BYTES = 1 << 20
"""Of longer metrics a sample of the rows is read: `status` is fast, and boundaries are exact to 1/10,000."""
_EPOCH = 1e9
"""More steps than an epoch has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """Where the time of a run went since its first step, over all attempts."""

    ratio: float
    """Effective training time ratio, 0..1: `parts.steps` divided by `seconds`."""
    seconds: float
    """From the end of the first step to the end of the run; while it trains to its newest row, else to now."""
    parts: dict[str, float]
    """Seconds by part. `steps`: that count. `repeated`: steps of an earlier attempt, or lost before a row had them.
    `noticed`: from the last sign of life of what failed. `ended`: until all ranks were gone. `waited`: for a resume or
    a queue. `started`: until ranks began. `imported`: until they met. `loaded`: until their first step. `evaluated`,
    `checkpointed`, `other`: between steps. The rows of a script do not tell the last three from steps."""
    faults: int
    """Failures after which the run took a step again."""
    median_s: dict[str, float]
    """From a failure to the next step: the median of `total`, and of each part."""
    worst_s: dict[str, float]
    """The most of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of metrics.jsonl."""

    time: float
    kind: str
    place: float | None
    """How far the run was; it grows with the steps."""
    train_s: float | None
    """The trainer's seconds in steps, over all attempts."""
    checkpoint_s: float
    """The trainer's seconds in checkpoints, over all attempts."""


class _Walk:
    """Cuts the time into parts, from the past to now; a moment that comes out of order cuts nothing."""

    def __init__(self) -> None:
        self.at = math.inf
        """Until the first step nothing counts."""
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.faults: list[dict[str, float]] = []
        self._fault: dict[str, float] | None = None
        """The parts at a failure after which no step was taken yet."""
        self._reached = -math.inf
        """The place that earlier attempts reached."""
        self._counts_anew = False
        """True of a script that counts its steps anew in each epoch: which are repeated cannot be told."""

    def until(self, part: str, moment: float | None) -> None:
        """Count the time up to `moment` as `part`."""
        if moment is not None and moment > self.at:
            self.parts[part] += moment - self.at
            self.at = moment

    def fail(self) -> None:
        """Note a failure: what comes until the next step is lost by it."""
        self._fault = self._fault or (dict(self.parts) if self.at < math.inf else None)

    def train(self, stepped: float, rows: Sequence[_Row]) -> None:
        """Count the time of an attempt from its first step, which ended at `stepped`, to its newest row."""
        self.at = stepped if self.at == math.inf else self.at
        if self._fault is not None:
            lost = {part: self.parts[part] - self._fault[part] for part in _AFTER_FAULT}
            self.faults.append({"total": sum(lost.values())} | lost)
            self._fault = None
        last: _Row | None = None
        reached = self._reached
        for row in rows:
            before = last.place if last else None
            self._counts_anew |= row.place is not None and before is not None and row.place < before
            if last and last.train_s is not None and row.train_s is not None:
                gap_until = row.time - max(0.0, row.train_s - last.train_s)
                if row.kind == "eval":
                    self.until("evaluated", gap_until)
                self.until("checkpointed", min(gap_until, self.at + row.checkpoint_s - last.checkpoint_s))
                self.until("other", gap_until)
            repeated = 0.0 if self._counts_anew else _share_below(reached, before, row.place)
            self.until("repeated", self.at + repeated * (row.time - self.at))
            self.until("steps", row.time)
            self._reached = max(self._reached, -math.inf if row.place is None else row.place)
            last = row


def read_effective(
    run: RunDir, timeline: Timeline, events: Sequence[dict[str, Any]], *, is_finished: bool, now: float
) -> Effective | None:
    """Read where the time of a run went; None: it has taken no step.

    `events`: the history of the whole run.
    """
    rows = _read_rows(run)
    walk = _Walk()
    facts: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in events:
        if "step" not in row:  # of a batch script the attempt's own
            facts.setdefault(row.get("attempt"), {})[row["event"]] = row
    for attempt in timeline.attempts:
        _walk_attempt(walk, run, attempt, facts.get(attempt.number, {}), rows.get(attempt.number, []))
    if not is_finished and timeline.attempts and timeline.attempts[-1].will_restart:
        walk.until("waited", now)
    seconds = sum(walk.parts.values())
    if not seconds:
        return None
    keys = ("total", *_AFTER_FAULT) if walk.faults else ()
    return Effective(
        ratio=walk.parts["steps"] / seconds,
        seconds=seconds,
        parts=walk.parts,
        faults=len(walk.faults),
        median_s={key: statistics.median(fault[key] for fault in walk.faults) for key in keys},
        worst_s={key: max(fault[key] for fault in walk.faults) for key in keys},
    )


def _walk_attempt(
    walk: _Walk, run: RunDir, attempt: AttemptSpan, facts: dict[str, dict[str, Any]], rows: Sequence[_Row]
) -> None:
    """Count the time of an attempt and of the wait for it; `facts`: the newest event of each kind."""

    def at(event: str, key: str = "time") -> float | None:
        return time_of(facts.get(event, {}).get(key))

    noticed = at("rank_failed", "noticed")
    fault = attempt.ended if noticed is None else noticed - (number_of(facts["rank_failed"].get("silent_s")) or 0.0)
    begun = at("attempt_started") or attempt.started
    called = [moment for moment in (at("resumed"), at("job_started")) if moment]
    stepped = at("first_step") or (rows[0].time if rows else None)
    met, phases = attempt.started, facts.get("first_step", {}).get("phases")
    if stepped and isinstance(phases, dict):  # the trainer's; of a script it is not known when its ranks have met
        met = stepped - sum(number_of(phases.get(name)) or 0.0 for name in ("data", "first_step"))
    start = {
        "waited": max(called, default=begun),
        "started": attempt.started and max(begun or 0.0, attempt.started - _import_s(run, attempt.number)),
        "imported": stepped and met,
        "loaded": stepped,
    }
    for part, moment in start.items():
        walk.until(part, moment)
    if stepped is None:
        walk.until([*start][sum(moment is not None for moment in start.values())], fault)
    else:
        walk.train(stepped, rows)
    if attempt.outcome in ("RUNNING", "PENDING"):
        if (since := at("hang", "since")) and (at("hang_over") or 0.0) < since:
            walk.until("steps", since)
            walk.until("noticed", attempt.ended)
        return
    if attempt.outcome in ("FAILED", "LOST"):
        walk.until("repeated", None if noticed is None else fault)
        walk.fail()
        walk.until("noticed", noticed or attempt.ended)
    walk.until("ended", attempt.ended)


def _import_s(run: RunDir, attempt: int) -> float:
    """Return how long imports took before the ranks were forked, on the slowest node."""
    with contextlib.suppress(ClusterddpError, OSError):
        nodes = (read_start(run.attempt(attempt)) or {}).get("nodes", ())
        return max((node.get("import_s") or 0.0 for node in nodes), default=0.0)
    return 0.0


def _read_rows(run: RunDir) -> dict[int, list[_Row]]:
    """Read the rows of each attempt that have a time; the step of what a script logs may count something else."""
    rows: dict[int, list[_Row]] = {}
    for _, line in sample_lines(run.metrics, whole_bytes=_WHOLE_BYTES):
        with contextlib.suppress(ValueError):
            row = read_object(line)
            at, attempt, kind = time_of(row.get("time")), row.get("attempt"), row.get("kind")
            if at is None or not isinstance(attempt, int):
                continue
            step = number_of(row.get("steps_done", row.get("step")))
            epoch = None if kind in ("train", "eval") else number_of(row.get("epoch"))
            own = rows.setdefault(attempt, [])
            checkpoint_s = number_of(row.get("checkpoint_seconds"))
            if checkpoint_s is None:
                checkpoint_s = own[-1].checkpoint_s if own else 0.0
            found = _Row(
                time=at,
                kind=str(kind),
                place=None if step is None else step + _EPOCH * (epoch or 0.0),
                train_s=number_of(row.get("train_seconds")),
                checkpoint_s=checkpoint_s,
            )
            own.append(found)
    return rows


def _share_below(reached: float, before: float | None, place: float | None) -> float:
    """Return the share of the steps from `before` to `place` that an earlier attempt had reached."""
    if place is None or place <= reached:
        return float(place is not None)
    return 0.0 if before is None or before >= reached else (reached - before) / (place - before)

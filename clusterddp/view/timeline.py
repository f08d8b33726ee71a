"""When a run waited, ran and ended: its attempts."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import RankRecord, RunRecord, Start, read_events, read_ranks, read_start
from clusterddp.run.steps import is_batch_script
from clusterddp.system.files import read_json

_ASKED = ("submitted", "resumed", "requeued", "follow_up", "queued")
"""Events by which the wait for an attempt begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpan:
    """One attempt: its wait, its ranks' time, its end; times are seconds since the epoch."""

    number: int
    asked: float
    """When its wait began: the submit, the resume, the requeue, or the end of the attempt before it."""
    started: float | None
    """When its ranks were started; None: they were not."""
    ended: float
    """When it ended; of one that goes on the time of the report."""
    outcome: str
    """COMPLETED, FAILED, CANCELLED, STOPPED; RUNNING, PENDING; LOST: no end was recorded."""
    reason: str
    will_restart: bool

    @property
    def ran_s(self) -> float:
        return 0.0 if self.started is None else max(0.0, self.ended - self.started)

    @property
    def waited_s(self) -> float:
        return max(0.0, (self.ended if self.started is None else self.started) - self.asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a run so far: from its submit to its end, or to now."""

    queued_s: float
    """Of waiting for its ranks to begin: in a queue, and while processes are started."""
    running_s: float
    """Of its ranks, over all attempts."""
    stopped_s: float
    """From the end of an attempt until the run was resumed."""

    def to_json(self) -> dict[str, float]:
        return {name: round(seconds, 1) for name, seconds in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The attempts of a run, oldest first."""

    attempts: tuple[AttemptSpan, ...]

    @property
    def times(self) -> Times:
        ran_s = sum(attempt.ran_s for attempt in self.attempts)
        waited_s = sum(attempt.waited_s for attempt in self.attempts)
        total_s = self.attempts[-1].ended - self.attempts[0].asked if self.attempts else 0.0
        return Times(queued_s=waited_s, running_s=ran_s, stopped_s=max(0.0, total_s - waited_s - ran_s))


def read_timeline(run: RunDir, record: RunRecord, *, is_finished: bool, now: float) -> Timeline:
    """Read the history of a run."""
    asked: dict[int, float] = {}
    """When the wait for each attempt began."""
    with contextlib.suppress(OSError, ClusterddpError):
        for row in read_events(run):
            name, at, attempt_number = row.get("event"), time_of(row.get("time")), row.get("attempt")
            if name in _ASKED and attempt_number is not None and at is not None:
                asked.setdefault(attempt_number, at)
    attempts: list[AttemptSpan] = []
    found, is_script = run.attempts(), record.is_hold or is_batch_script(run)
    for attempt in found:
        before = attempts[-1].ended if attempts else record.created_ns / 1e9
        is_over = is_finished or attempt != found[-1]
        asked_at = asked.get(attempt.number, before)
        attempts.append(_read_attempt(attempt, asked_at, is_over=is_over, now=now, is_script=is_script))
    return Timeline(attempts=tuple(attempts))


def _read_attempt(
    attempt: AttemptDir, asked: float, *, is_over: bool, now: float, is_script: bool = False
) -> AttemptSpan:
    end, start = None, Start()  # what is damaged counts as not recorded
    with contextlib.suppress(ClusterddpError):
        end = read_end(attempt)
    with contextlib.suppress(ClusterddpError):
        start = read_start(attempt) or start
    started = time_of(start.get("started"))
    if started is None and is_script:
        with contextlib.suppress(ClusterddpError, OSError):
            started = time_of((read_json(attempt.claim) or {}).get("time"))
    if end is not None:
        ended, outcome = time_of(end.ended) or started or asked, str(end.outcome)
    elif is_over:  # no process was left to record the end
        records: list[RankRecord] = []
        with contextlib.suppress(ClusterddpError, OSError):
            records = [record for record in read_ranks(attempt) if time_of(record.started)]
        started = started or min((record.started for record in records), default=None)
        known = [moment for record in records for moment in (record.started, record.ended) if moment]
        ended, outcome = max([started or asked, *known]), "LOST"
    else:
        ended, outcome = now, "PENDING" if started is None else "RUNNING"
    return AttemptSpan(
        number=attempt.number,
        asked=min(asked, ended if started is None else started),
        started=started,
        ended=max(ended, started or asked),
        outcome=outcome,
        reason=end.reason if end else "",
        will_restart=bool(end and end.will_restart),
    )


def time_of(value: object) -> float | None:
    """Return a time of a record; None for what is none, such as one before the epoch or far in the future."""
    return float(value) if isinstance(value, int | float) and 0 < value < 1e11 else None

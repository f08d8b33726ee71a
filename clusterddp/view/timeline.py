"""When a run waited, ran and ended: its attempts and their ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import RankRecord, RunRecord, Start, read_ranks, read_start
from clusterddp.system.files import read_jsonl

_ASKED = frozenset(["submitted", "resumed", "requeued", "follow_up", "queued"])
"""Events by which the wait for an attempt begins."""
_MAX_ATTEMPTS_WITH_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpan:
    """From the start of a rank to its end; times are seconds since the epoch."""

    attempt: int
    rank: int
    host: str
    started: float
    ended: float
    """Of a rank whose end is not recorded the end of its attempt."""
    state: str
    """COMPLETED, FAILED, KILLED; RUNNING; LOST: the attempt is over and the end of the rank was not recorded."""


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
    ranks: tuple[RankSpan, ...] = ()

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
    stragglers: tuple[tuple[float, int, str], ...] = ()
    """When a rank became a straggler, which, and for how long the others wait, as text."""

    @property
    def times(self) -> Times:
        ran_s = sum(attempt.ran_s for attempt in self.attempts)
        waited_s = sum(attempt.waited_s for attempt in self.attempts)
        total_s = self.attempts[-1].ended - self.attempts[0].asked if self.attempts else 0.0
        return Times(queued_s=waited_s, running_s=ran_s, stopped_s=max(0.0, total_s - waited_s - ran_s))

    @property
    def since_first_start_s(self) -> float | None:
        """Seconds from the first start of ranks to the last end; None: no ranks were started."""
        starts = [attempt.started for attempt in self.attempts if attempt.started is not None]
        return max(0.0, self.attempts[-1].ended - min(starts)) if starts else None


def read_timeline(
    run: RunDir, record: RunRecord, *, is_finished: bool, now: float, with_ranks: bool = True
) -> Timeline:
    """Read the history of a run; with the ranks of its newest attempts only, or with none."""
    asked, stragglers = _read_events(run)
    attempts: list[AttemptSpan] = []
    found = run.attempts()
    for attempt in found:
        before = attempts[-1].ended if attempts else record.created_ns / 1e9
        span = _read_attempt(
            attempt,
            asked=asked.get(attempt.number, before),
            is_over=is_finished or attempt != found[-1],
            now=now,
            with_ranks=with_ranks and attempt.number > found[-1].number - _MAX_ATTEMPTS_WITH_RANKS,
        )
        attempts.append(span)
    return Timeline(attempts=tuple(attempts), stragglers=tuple(stragglers))


def _read_events(run: RunDir) -> tuple[dict[int, float], list[tuple[float, int, str]]]:
    """Return when the wait for each attempt began, and the stragglers."""
    asked: dict[int, float] = {}
    stragglers: list[tuple[float, int, str]] = []
    with contextlib.suppress(OSError, ClusterddpError):
        for row in read_jsonl(run.events):
            name, at, attempt = row.get("event"), _time(row.get("time")), row.get("attempt")
            if isinstance(name, str) and name in _ASKED and isinstance(attempt, int) and at is not None:
                asked.setdefault(attempt, at)
            elif name == "straggler" and isinstance(rank := row.get("rank"), int) and at is not None:
                stragglers.append((at, rank, str(row.get("text", ""))))
    return asked, stragglers


def _read_attempt(attempt: AttemptDir, *, asked: float, is_over: bool, now: float, with_ranks: bool) -> AttemptSpan:
    end, start = _read_ends(attempt)
    started = _time(start.get("started"))
    records = [record for record in read_ranks(attempt) if _time(record.started)] if with_ranks else []
    if end is not None:
        ended, outcome = _time(end.ended) or started or asked, str(end.outcome)
    elif is_over:  # no process was left to record the end
        known = [moment for record in records for moment in (record.started, record.ended) if moment]
        ended, outcome = max([started or asked, *known]), "LOST"
    else:
        ended, outcome = now, "PENDING" if started is None else "RUNNING"
    ranks = tuple(_rank_span(attempt.number, record, ended, is_over or end is not None) for record in records)
    if started is None and ranks:
        started = min(rank.started for rank in ranks)
    return AttemptSpan(
        number=attempt.number,
        asked=min(asked, ended if started is None else started),
        started=started,
        ended=max(ended, started or asked),
        outcome=outcome,
        reason=end.reason if end else "",
        will_restart=bool(end and end.will_restart),
        ranks=ranks,
    )


def _read_ends(attempt: AttemptDir) -> tuple[AttemptEnd | None, Start]:
    """Read how an attempt ended and began; what is damaged counts as not recorded."""
    end, start = None, Start()
    with contextlib.suppress(ClusterddpError):
        end = read_end(attempt)
    with contextlib.suppress(ClusterddpError):
        start = read_start(attempt) or start
    return end, start


def _rank_span(attempt: int, record: RankRecord, ended: float, is_over: bool) -> RankSpan:
    return RankSpan(
        attempt=attempt,
        rank=record.rank,
        host=record.host,
        started=record.started,
        ended=max(record.started, _time(record.ended) or ended),
        state=record.end_state or ("LOST" if is_over else "RUNNING"),
    )


def _time(value: object) -> float | None:
    """Return a time of a record; None for what is none, such as one before the epoch or far in the future."""
    return float(value) if isinstance(value, int | float) and 0 < value < 1e11 else None

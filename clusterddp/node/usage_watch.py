"""The head's view of what ranks use and how fast they are: asks all nodes, finds stragglers, writes the file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.history import log
from clusterddp.node.log import log_line
from clusterddp.node.node_usage import PATIENCE_S
from clusterddp.node.pace import Entered, Pace, pace_of_collectives, pace_of_own_steps
from clusterddp.rendezvous.connection import Message
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.rank_usage import RankUsage, Sample, Straggler, UsageReport, add_sample, warn_of, write_usage
from clusterddp.wire import build

_FIRST_S = 5.0
_EVERY_S = ((60.0, 10.0), (3600.0, 30.0), (float("inf"), 60.0))
"""Seconds since the attempt began, and between two looks until then."""
_ANSWER_S = PATIENCE_S + 4.0
_FEWEST_ENTERED, _MOST_ENTERED, _ENTERED_OF_ALL = 48, 200, 100_000
"""How many collectives are read: of each rank, and of all; 2,000 ranks cost the head 1 s for each look."""
_LATE = 0.2
"""A straggler is late by this part of a step, in two looks in a row."""
_LEAST_LATE_S = 0.002
_NODE = {"asked": float, "received": float, "sent": float, "ranks": dict[str, Any]}
_RANK = {
    "cpu": float | None,
    "memory": int | None,
    "gpu": float | None,
    "gpu_memory": int | None,
    "step": int | None,
    "own_step_s": float | None,
    "entered": list[tuple[int, int, int]] | None,
}


@dataclass(slots=True)
class _Collection:
    """What nodes have answered to one question."""

    asked_at: float
    due: float
    awaited: set[int]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    entered: dict[int, Entered] = field(default_factory=dict)
    error_s: float = 0.0
    """By how much a node's clock may differ from what was found."""


class UsageWatch:
    """One attempt's."""

    def __init__(self, run: RunDir, gang: Gang, attempt: AttemptDir, send: Callable[[int, Message], None]) -> None:
        self._run = run
        self._gang = gang
        self._attempt = attempt
        self._send = send
        self._most = max(_FEWEST_ENTERED, min(_MOST_ENTERED, _ENTERED_OF_ALL // gang.num_ranks))
        """Of the newest collectives of each rank."""
        self._next_at: float | None = None
        self._collection: _Collection | None = None
        self._steps: dict[int, tuple[float, int]] = {}
        """Of each rank: a time, and the steps done by then."""
        self._late_before: frozenset[int] = frozenset()
        self._named: frozenset[int] = frozenset()
        self._last: UsageReport | None = None

    def on_report(self, node_rank: int, report: Message, _now: float) -> None:
        """Take in the answer of a node; what is no answer leaves its ranks out."""
        collection, got = self._collection, time.time()
        if collection is None or report.get("asked") != collection.asked_at:
            return
        collection.awaited.discard(node_rank)
        own = set(self._gang.nodes[node_rank].ranks)
        try:
            node = build(_NODE, report)
            ranks = {int(rank): build(_RANK, each) for rank, each in node["ranks"].items()}
        except ValueError as error:
            log_line(f"node {node_rank} answers what is no use of ranks: {error}")
            return
        # The head asks, and answers for its own ranks, by one clock.
        there_s, here_s = node["received"] - node["asked"], node["sent"] - got
        ahead_s, error_s = (0.0, 0.0) if node_rank == 0 else ((there_s + here_s) / 2, (there_s - here_s) / 2)
        collection.error_s = max(collection.error_s, error_s)
        for rank, each in ranks.items():
            if rank in own:
                entered, began = each.pop("entered") or (), node["received"] - ahead_s
                collection.ranks[rank] = each
                collection.entered[rank] = {number: (kind, began + at / 1e6) for number, kind, at in entered}

    def tick(self, nodes: Iterable[int], begun: float, now: float) -> None:
        """Ask when it is time to; write what was answered. `begun`: when the attempt began, by the clock of `now`."""
        collection = self._collection
        if collection is not None:
            collection.awaited &= set(nodes)
            if not collection.awaited or now >= collection.due:
                self._collection = None
                self._take(collection)
            return
        if self._next_at is None:
            self._next_at = begun + _FIRST_S
        if now < self._next_at:
            return
        self._next_at = now + next(every_s for until_s, every_s in _EVERY_S if now - begun < until_s)
        self._collection = _Collection(asked_at=time.time(), due=now + _ANSWER_S, awaited=set(nodes))
        for node_rank in sorted(self._collection.awaited):
            self._send(node_rank, {"kind": "usage", "asked": self._collection.asked_at, "most": self._most})

    def _take(self, collection: _Collection) -> None:
        """Write what the ranks use, and name stragglers."""
        if not collection.ranks:
            return
        pace = self._pace(collection)
        named = self._find_stragglers(pace, collection.error_s)
        ranks = tuple(
            RankUsage(
                rank=rank,
                step_s=pace.step_s.get(rank, pace.period_s),
                late_s=pace.late_s.get(rank),
                **{key: value for key, value in each.items() if key != "own_step_s"},
            )
            for rank, each in sorted(collection.ranks.items())
        )
        self._report_changes(named)
        self._last = UsageReport(
            time=collection.asked_at,
            ranks=ranks,
            period_s=pace.period_s,
            stragglers=tuple(named.values()),
            history=self._history(ranks, collection.asked_at),
        )
        try:
            write_usage(self._attempt, self._last)
        except ClusterddpError as error:
            log_line(f"the use of the ranks could not be written: {error}")

    def _pace(self, collection: _Collection) -> Pace:
        """Return the pace by what the program measures, by its collectives, or by the steps that it reports."""
        seen = [_period(self._steps.get(rank), each, collection.asked_at) for rank, each in collection.ranks.items()]
        reported = [period_s for period_s in seen if period_s is not None]
        reported_s = statistics.median(reported) if reported else None
        for rank, each in collection.ranks.items():
            if each["step"] is not None:
                self._steps[rank] = (collection.asked_at, each["step"])
        own_s = {rank: each["own_step_s"] for rank, each in collection.ranks.items() if each["own_step_s"]}
        if len(collection.ranks) < self._gang.num_ranks:
            return Pace(period_s=reported_s)
        if len(own_s) == len(collection.ranks) > 1:
            return pace_of_own_steps(own_s, reported_s)
        return pace_of_collectives(collection.entered, reported_s)

    def _find_stragglers(self, pace: Pace, error_s: float) -> dict[int, Straggler]:
        """Return the ranks that were late in this look and in the one before."""
        if pace.period_s is None:
            return {}
        least_s = max(_LATE * pace.period_s, 2 * error_s, _LEAST_LATE_S)
        late = {rank: late_s for rank, late_s in pace.late_s.items() if late_s >= least_s}
        before, self._late_before = self._late_before, frozenset(late)
        return {
            rank: Straggler(rank=rank, host=self._gang.node_of(rank).host, late_s=late[rank], period_s=pace.period_s)
            for rank in sorted(before & set(late))
        }

    def _report_changes(self, named: Mapping[int, Straggler]) -> None:
        """Record in the history of the run who has become a straggler, and who is none any more."""
        for rank in sorted(set(named) - self._named):
            log(self._run, "straggler", attempt=self._attempt.number, rank=rank, text=warn_of([named[rank]]))
        for rank in sorted(self._named - set(named)):
            log(self._run, "straggler_over", attempt=self._attempt.number, rank=rank)
        self._named = frozenset(named)

    def _history(self, ranks: tuple[RankUsage, ...], at: float) -> tuple[Sample, ...]:
        history = self._last.history if self._last else ()
        if all(each.step_s is None for each in ranks):
            return history
        known = {each.rank: None if each.step_s is None else round(each.step_s * 1e3, 3) for each in ranks}
        return add_sample(history, Sample(time=at, step_ms=tuple(known.get(n) for n in range(self._gang.num_ranks))))


def _period(before: tuple[float, int] | None, rank: Mapping[str, Any], now: float) -> float | None:
    """Return the seconds of a step since the last look, of a rank that reports steps."""
    if before is None or rank["step"] is None or rank["step"] <= before[1]:
        return None
    return float((now - before[0]) / (rank["step"] - before[1]))

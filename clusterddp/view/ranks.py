"""The ranks of an attempt, as status shows them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.run.directory import AttemptDir
from clusterddp.run.gang import Gang
from clusterddp.run.rank_usage import RankUsage, UsageReport
from clusterddp.run.record import RankRecord, Start, StartedPython, read_ranks
from clusterddp.run.state import RunState, RunView
from clusterddp.wire import Written

_RECORD = re.compile(r"\d+\.json")
RankState = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "KILLED", "NOT_STARTED", "LOST", "UNKNOWN"]
"""PENDING: not started yet. RUNNING: started, and its end is not recorded. COMPLETED: ended with exit code 0.
FAILED: ended by itself with another exit code. KILLED: ended by a signal, as all ranks are when one fails.
NOT_STARTED: the run ended before this rank was started. LOST: the run is over and the end of this rank was not
recorded. UNKNOWN: the rank is on a machine that cannot be asked from here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus(Written):
    """One rank of the attempt that `status` shows."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    """Where the rank runs, or is planned to run."""
    pid: int | None
    interface: str | None
    """Network interface of the rank's traffic."""
    master_addr: str | None
    master_port: int | None
    """With `master_addr`: where the ranks meet."""
    state: RankState
    exit_code: int | None
    """As a shell reports it: 128 + signal for a rank that a signal ended; None until it has ended."""
    last_output: float | None = None
    """While it runs: when it last wrote to its log, if the logs are here; seconds since the epoch."""
    usage: RankUsage | None = None
    """While it runs: what it uses, and how fast it is."""
    straggler: bool = False
    """While it runs: the others wait for it."""
    python: StartedPython | None = None
    """The Python that runs it; None until all ranks have started, and of a command, which may be any program."""
    owns: tuple[int, ...] | None = None
    """Of a program that starts its ranks itself: their numbers. `rank` is then the program's, one on each node."""

    def to_json(self) -> dict[str, Any]:
        values = Written.to_json(self)
        return values if self.owns is not None else {name: values[name] for name in values if name != "owns"}


def count_started(attempt: AttemptDir) -> int:
    """Count the ranks of an attempt that have started, by the names of their records alone."""
    try:
        return sum(_RECORD.fullmatch(name) is not None for name in os.listdir(attempt.ranks))
    except OSError:
        return 0


def rank_statuses(
    gang: Gang,
    attempt: AttemptDir | None,
    start: Start,
    view: RunView,
    *,
    unreached: Collection[str],
    report: UsageReport | None,
) -> tuple[RankStatus, ...]:
    usage = {each.rank: each for each in report.ranks} if report else {}
    stragglers = {each.rank for each in report.stragglers} if report else set()
    records = {record.rank: record for record in read_ranks(attempt)} if attempt else {}
    found = {node.get("node_rank"): node for node in start.get("nodes", ())}
    master_addr, master_port = start.get("master_addr", gang.master_addr), start.get("master_port", gang.master_port)
    statuses = []
    for node in gang.nodes:
        there = found.get(node.node_rank, {})
        for local_rank, rank in enumerate(node.ranks):
            record = records.get(rank)
            state = _rank_state(record, view, may_be_known=node.host not in unreached)
            statuses.append(
                RankStatus(
                    rank=rank,
                    node_rank=node.node_rank,
                    local_rank=local_rank,
                    host=record.host if record else there.get("host", node.host),
                    pid=record.pid if record else None,
                    interface=record.interface if record else there.get("interface", gang.interface),
                    master_addr=record.master_addr if record else master_addr,
                    master_port=record.master_port if record else master_port,
                    state=state,
                    exit_code=record.exit_code if record else None,
                    last_output=_last_output(attempt, rank) if attempt and state == "RUNNING" else None,
                    usage=usage.get(rank) if state == "RUNNING" else None,
                    straggler=state == "RUNNING" and rank in stragglers,
                    python=there.get("python"),
                    owns=gang.carried_by([rank]) if gang.entry.spawns else None,
                )
            )
    return tuple(sorted(statuses, key=lambda status: status.rank))


def _last_output(attempt: AttemptDir, rank: int) -> float | None:
    times = []
    for log in (attempt.stdout(rank), attempt.stderr(rank)):
        with contextlib.suppress(OSError):
            found = log.stat()
            times += [found.st_mtime] if found.st_size else []
    return max(times, default=None)


def _rank_state(record: RankRecord | None, view: RunView, *, may_be_known: bool) -> RankState:
    attempt_over = view.finished or view.end is not None
    if record is None:
        return "NOT_STARTED" if attempt_over else "PENDING"
    if record.end_state or attempt_over:
        return record.end_state or "LOST"
    return "RUNNING" if may_be_known and view.state is not RunState.UNKNOWN else "UNKNOWN"

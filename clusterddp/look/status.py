"""What is known about a run, gathered from its files into one value; the form that scripts rely on is `to_json`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.launchers.state import read_state
from clusterddp.look.events import (
    HangEvent,
    NodeTransport,
    count_lost_rows,
    read_hang,
    read_start_phases,
    read_transports,
    warn_of_sockets,
)
from clusterddp.look.progress import TAIL_BYTES, Progress, read_progress
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.host_state import read_silence
from clusterddp.run.outcome import RootCause
from clusterddp.run.record import RankRecord, RunRecord, Start, read_gang, read_ranks, read_run, read_start
from clusterddp.run.view import RunState, RunView

if TYPE_CHECKING:
    from clusterddp.slurm.jobs import Job

RankState = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "KILLED", "NOT_STARTED", "LOST", "UNKNOWN"]
"""PENDING: not started yet. RUNNING: started, and its end is not recorded. COMPLETED: ended with exit code 0.
FAILED: ended by itself with another exit code. KILLED: ended by a signal, as all ranks are when one fails.
NOT_STARTED: the run ended before this rank was started. LOST: the run is over and the end of this rank was not
recorded. UNKNOWN: the rank is on a machine that cannot be asked from here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
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
    owns: tuple[int, ...] | None = None
    """Of a program that starts its ranks itself: their numbers. `rank` is then the program's, one on each node."""

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RankStatus.__slots__ if name != "owns"}
        return values if self.owns is None else values | {"owns": list(self.owns)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment, by its files."""

    run: str
    state: RunState
    reason: str
    """Why it is in this state, in words; empty when the state says it all."""
    launcher: str
    """`local`, `ssh`, `slurm`, `join`; `none` for ranks that another launcher started."""
    job_id: str | None
    """Slurm's job id, the pid of the local task, or what started the ranks."""
    attempt: int | None
    """The newest attempt; None before the first one starts."""
    world_size: int
    """Ranks in all."""
    progress: Progress | None
    """How far the built-in trainer is; None for a program of your own."""
    ranks: tuple[RankStatus, ...]
    """The ranks of the newest attempt."""
    root_cause: RootCause | None
    """The first failure of a run that FAILED."""
    created: float
    """Seconds since the epoch."""
    ended: float | None
    job: Job | None = None
    """On Slurm: the job as Slurm reports it; None where the files suffice."""
    silent: tuple[str, ...] = ()
    """On SSH hosts: which of them did not answer last, in words."""
    job_log: str | None = None
    """On Slurm: what the batch script wrote, relative to the run's directory, when no rank was started."""
    start_phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the newest attempt's start that is over and was recorded; see `read_start_phases`."""
    warning: str = ""
    """What a user should look at though the state does not show it."""
    transports: tuple[NodeTransport, ...] = ()
    """By node, of those whose NCCL has said so in the newest attempt."""
    hang: HangEvent | None = None
    """While it runs: since when no rank makes progress."""
    last_output: float | None = None
    """While it runs: when a rank last wrote to its log, where the logs lie here; seconds since the epoch."""
    lost_rows: int = 0
    """Rows of `metrics.jsonl` that its storage did not take, as far as it could be written again since."""

    def to_json(self) -> dict[str, Any]:
        cause = self.root_cause
        job = {"job": _job_json(self.job)} if self.launcher == "slurm" else {}
        return {
            "run": self.run,
            "state": self.state.value,
            "reason": self.reason,
            "launcher": self.launcher,
            "job_id": self.job_id,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "progress": self.progress.to_json() if self.progress else None,
            "ranks": [rank.to_json() for rank in self.ranks],
            "root_cause": cause
            and {name: getattr(cause, name) for name in ("rank", "host", "exit_code", "error", "log")},
            "start_phases": self.start_phases,
            "nccl": [dataclasses.asdict(transport) for transport in self.transports],
            "warning": self.warning,
            "lost_rows": self.lost_rows,
            "hang": self.hang and dataclasses.asdict(self.hang),
            "last_output": self.last_output,
            **job,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One line of `list`: what is known without reading the records of ranks."""

    run: str
    state: RunState
    reason: str
    launcher: str
    job_id: str | None
    attempt: int | None
    progress: Progress | None
    """As in `status`."""
    created: float
    """Seconds since the epoch."""
    ended: float | None
    """Seconds since the epoch."""
    variant: str = ""
    """In a sweep: what tells this run from the others."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "variant": self.variant,
            "state": self.state.value,
            "reason": self.reason,
            "launcher": self.launcher,
            "job_id": self.job_id,
            "attempt": self.attempt,
            "created": self.created,
            "ended": self.ended,
            "progress": self.progress.to_json() if self.progress else None,
        }


def read_status(run: RunDir) -> RunStatus:
    """Read all that is known about a run now."""
    record = read_run(run)
    view, gang = read_state(run, record=record), read_gang(run)
    end = view.end
    attempt = None if view.attempt is None else run.attempt(view.attempt)
    start: Start = (attempt and read_start(attempt)) or {}
    silence = read_silence(run) if record.launcher == "ssh" else {}
    transports = read_transports(run, view.attempt)
    return RunStatus(
        run=run.name,
        state=view.state,
        reason="; ".join([view.reason, *([] if attempt is None or view.finished else _stopped_ranks(attempt))]),
        launcher=record.launcher,
        job_id=view.job.job_id if view.job else record.job_id,
        attempt=view.attempt,
        world_size=sum(gang.entry.spawns) or gang.world_size,
        progress=_progress(run, view),
        ranks=_rank_statuses(gang, attempt, start, view, silence),
        root_cause=end.root_cause if end else None,
        created=_created(record),
        ended=end.ended if end else None,
        job=view.job,
        silent=() if view.finished else tuple(silence.values()),
        job_log=None if start else find_job_log(run),
        start_phases={} if view.attempt is None else read_start_phases(run, record, view.attempt, start),
        transports=transports,
        warning="; ".join(filter(None, (end.warning if end else "", warn_of_sockets(transports)))),
        lost_rows=count_lost_rows(run),
        hang=read_hang(run, view.attempt) if view.state is RunState.RUNNING else None,
        last_output=_last_output(attempt) if view.state is RunState.RUNNING and record.launcher != "ssh" else None,
    )


def _last_output(attempt: AttemptDir | None) -> float | None:
    """Return when a rank last wrote to its log; None: none has written anything."""
    times = []
    if attempt is not None:
        with contextlib.suppress(OSError):
            for entry in os.scandir(attempt.logs):
                found = entry.stat()
                times += [found.st_mtime] if found.st_size else []
    return max(times, default=None)


def _stopped_ranks(attempt: AttemptDir) -> list[str]:
    """Name the ranks that a signal has stopped, for which all others wait."""
    return [
        f"rank {record.rank} on {record.host} is stopped by a signal: kill -CONT {record.pid} there lets it go on"
        for record in read_ranks(attempt)
        if record.stopped is not None and record.ended is None
    ]


def read_summary(run: RunDir, *, record: RunRecord, view: RunView) -> RunSummary:
    """Read what `list` shows of a run whose record and state are known already."""
    return RunSummary(
        run=run.name,
        state=view.state,
        reason=view.end.root_cause.error if view.end and view.end.root_cause else view.reason,
        launcher=record.launcher,
        job_id=view.job.job_id if view.job else record.job_id,
        attempt=view.attempt,
        progress=_progress(run, view, tail_bytes=4096),
        variant=record.variant,
        created=_created(record),
        ended=view.end.ended if view.end else None,
    )


def find_job_log(run: RunDir) -> str | None:
    """Find what the batch script of a run on Slurm wrote, relative to the run's directory."""
    log = run.launcher_dir / "job.log"
    return str(log.relative_to(run.path)) if log.exists() else None


def _created(record: RunRecord) -> float:
    return record.created_ns / 1e9


def _progress(run: RunDir, view: RunView, *, tail_bytes: int = TAIL_BYTES) -> Progress | None:
    progress = read_progress(run, tail_bytes=tail_bytes)
    return dataclasses.replace(progress, eta_s=None) if progress and view.finished else progress


def _job_json(job: Job | None) -> dict[str, Any] | None:
    if job is None:
        return None
    names = ("job_id", "state", "reason", "partition", "num_nodes", "nodes", "submitted")
    waits = job.phase.value == "waiting"
    moments = {"started": None if waits else job.started, "expected_start": job.started if waits else None}
    return {name: getattr(job, name) for name in names} | moments


def _rank_statuses(
    gang: Gang, attempt: AttemptDir | None, start: Start, view: RunView, silence: Collection[str]
) -> tuple[RankStatus, ...]:
    records = {record.rank: record for record in read_ranks(attempt)} if attempt else {}
    found = {node.get("node_rank"): node for node in start.get("nodes", ())}
    master_addr, master_port = start.get("master_addr", gang.master_addr), start.get("master_port", gang.master_port)
    statuses = []
    for node in gang.nodes:
        there = found.get(node.node_rank, {})
        for local_rank, rank in enumerate(node.ranks):
            record = records.get(rank)
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
                    state=_rank_state(record, view, may_be_known=node.host not in silence),
                    exit_code=record.exit_code if record else None,
                    owns=gang.carried_by([rank]) if gang.entry.spawns else None,
                )
            )
    return tuple(sorted(statuses, key=lambda status: status.rank))


def _rank_state(record: RankRecord | None, view: RunView, *, may_be_known: bool) -> RankState:
    attempt_over = view.finished or view.end is not None
    if record is None:
        return "NOT_STARTED" if attempt_over else "PENDING"
    if record.ended is None:
        if attempt_over:
            return "LOST"
        return "RUNNING" if may_be_known and view.state is not RunState.UNKNOWN else "UNKNOWN"
    if record.signal is not None:
        return "KILLED"
    return "COMPLETED" if record.exit_code == 0 else "FAILED"

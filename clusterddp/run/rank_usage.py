"""What the ranks of an attempt use, and how fast they are: one file, which the head writes anew with each look."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import AttemptDir
from clusterddp.system.files import is_file, read_record, write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUsage:
    """One rank, with the processes that it has started; None: not known."""

    rank: int
    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    """Resident bytes; of what it has started only what is not shared."""
    gpu: float | None = None
    """0..1: the part of the time in which its GPU computed, as nvidia-smi has it."""
    gpu_memory: int | None = None
    """Bytes in use on its GPU, by whichever process."""
    step: int | None = None
    """Steps done, of a program that reports them."""
    step_s: float | None = None
    """Seconds of a step without the waiting for other ranks."""
    late_s: float | None = None
    """Seconds by which it enters collectives later than the median of the other ranks, at the worst place of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    host: str
    late_s: float
    """Seconds of each step."""
    period_s: float
    """Seconds of a step of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageReport:
    """The ranks of an attempt at one moment."""

    time: float
    """Seconds since the epoch."""
    ranks: tuple[RankUsage, ...]
    period_s: float | None = None
    """Seconds of a step of the run."""
    stragglers: tuple[Straggler, ...] = ()

    @property
    def warning(self) -> str:
        """Name the stragglers in one line; empty: there are none."""
        return warn_of(self.stragglers)


def warn_of(stragglers: Sequence[Straggler]) -> str:
    """Name stragglers in one line; empty: there are none."""
    if not stragglers:
        return ""
    worst = max(stragglers, key=lambda each: each.late_s)
    hosts = ", ".join(sorted({each.host for each in stragglers}))
    ranks = spell_ranks(each.rank for each in stragglers)
    verb = "is a straggler" if len(stragglers) == 1 else "are stragglers"
    waits = f"the others wait {worst.late_s * 1e3:.3g} ms of each step of {worst.period_s * 1e3:.3g} ms"
    return f"{ranks} on {hosts} {verb}: {waits} ({worst.late_s / worst.period_s:.0%})"


def write_usage(attempt: AttemptDir, report: UsageReport) -> None:
    """Replace the file."""
    write_bytes(attempt.usage, json.dumps(dataclasses.asdict(report), separators=(",", ":")).encode(), durable=False)


def read_usage_report(attempt: AttemptDir) -> UsageReport | None:
    """Read the file; None: there is none, or it is damaged."""
    try:
        return read_record(UsageReport, attempt.usage) if is_file(attempt.usage) else None
    except (OSError, ClusterddpError):
        return None

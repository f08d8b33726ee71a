"""Reports of the hosts of an ssh run: `launcher/hosts.json`, written by the command that asks them, read by all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import AttemptEnd, parse_end
from clusterddp.run.record import RunRecord
from clusterddp.system.files import read_json, write_json
from clusterddp.wire import build


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """One host, as far as a run on it goes; times are those of the machine that asked, in seconds since the epoch."""

    host: str
    asked: float
    """When it was tried last."""
    reached: float | None = None
    """When it answered last; None: never."""
    error: str | None = None
    """Why it did not answer when it was tried last; None: it did."""
    alive: tuple[str, ...] = ()
    """Roles of the run's processes there: `s0` supervisor of node 0, `g0` its guard, `n0` its ranks."""
    boot: str = ""
    """Which boot of the host it was."""
    has_run: bool = False
    """True when the run's directory is there."""
    end_attempt: int | None = None
    end: dict[str, Any] | None = None
    """The newest `end.json` in its own copy of the run, which on other hosts than the head's is not the truth."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints there, oldest first."""
    start: str = ""
    """Which start of the run it was asked about (`start_of`): before a resume it says nothing of what follows."""
    complete: int | None = None
    """The attempt with whose end everything that the spec wants from this host was fetched."""

    @property
    def answers(self) -> bool:
        """True when a process is there that will still record how the run ends; ranks will not."""
        return any(role[:1] in {"s", "g"} for role in self.alive)

    @property
    def own_end(self) -> AttemptEnd | None:
        return parse_end(self.end) if self.end else None


def start_of(record: RunRecord) -> str:
    """Name a start of a run, by a submit or a resume."""
    return f"attempt {record.base_attempt}, {record.job_id}"


def reports_path(run: RunDir) -> Path:
    return run.launcher_dir / "hosts.json"


def read_reports(run: RunDir) -> dict[str, HostReport]:
    """Read what is known of the hosts that were ever asked, by their SSH names; keys of newer versions are dropped.

    A file that is damaged counts as none: the hosts report it all again.
    """
    try:
        data = read_json(reports_path(run)) or {}
        return {host: build(HostReport, facts | {"host": host}) for host, facts in data.get("hosts", {}).items()}
    except (ClusterddpError, ValueError, TypeError, AttributeError):
        return {}


def write_reports(run: RunDir, reports: Iterable[HostReport]) -> None:
    """Replace what is known of the hosts."""
    write_json(reports_path(run), {"hosts": {report.host: dataclasses.asdict(report) for report in reports}})

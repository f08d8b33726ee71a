"""Reports of the hosts of an ssh run (`launcher/hosts.json`): written by commands that ask the hosts, read by all."""

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
    """What one host last reported of a run; times are of the machine that asked, in seconds since the epoch."""

    host: str
    asked: float
    """When it was last asked."""
    reached: float | None = None
    """When it last answered; None: never."""
    error: str | None = None
    """Why it did not answer when it was last asked; None: it answered."""
    alive: tuple[str, ...] = ()
    """Roles of the run's processes there: `s0` supervisor of node 0, `g0` its guard, `n0` its ranks."""
    boot: str = ""
    """The boot id of the host."""
    has_run: bool = False
    """True if the run's directory is there."""
    end_attempt: int | None = None
    end: dict[str, Any] | None = None
    """The newest `end.json` in the host's copy of the run; only that of the head's host is final."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints there, oldest first."""
    start: str = ""
    """Which start of the run this is about (`start_of`); a report from before a resume does not count after it."""
    complete: int | None = None
    """The attempt after whose end everything that the spec fetches from this host was downloaded."""
    last_output: float | None = None
    """When a rank there last wrote to its log in the newest attempt, by the host's clock."""

    @property
    def is_supervised(self) -> bool:
        """True while a supervisor or guard lives there, which will record how the run ends."""
        return any(role[:1] in {"s", "g"} for role in self.alive)

    @property
    def own_end(self) -> AttemptEnd | None:
        return parse_end(self.end) if self.end else None


def start_of(record: RunRecord) -> str:
    """Return a name for the last start of a run, by a submit or a resume."""
    return f"attempt {record.base_attempt}, {record.job_id}"


def reports_path(run: RunDir) -> Path:
    return run.launcher_dir / "hosts.json"


def read_reports(run: RunDir) -> dict[str, HostReport]:
    """Read the reports of all hosts that were ever asked, by their SSH names; keys of newer versions are dropped.

    A damaged file counts as none: the hosts report everything again.
    """
    try:
        data = read_json(reports_path(run)) or {}
        return {host: build(HostReport, facts | {"host": host}) for host, facts in data.get("hosts", {}).items()}
    except (ClusterddpError, ValueError, TypeError, AttributeError):
        return {}


def write_reports(run: RunDir, reports: Iterable[HostReport]) -> None:
    """Replace the reports of all hosts."""
    write_json(reports_path(run), {"hosts": {report.host: dataclasses.asdict(report) for report in reports}})

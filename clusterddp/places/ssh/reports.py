"""Reports of the hosts of an SSH run (`launcher/hosts.json`): written by commands that ask the hosts, read by all.

The state of the run follows from them, without a connection (`ask_reports`); a command that needs the current state
synchronises first (sync.py). A supervisor or guard on any host means that the run goes on, and none on all
hosts that it has ended. If node 0's host does not answer, this is unknown, unless another node has recorded an end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import AttemptEnd, parse_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, read_gang
from clusterddp.run.state import Answer, Records, derive_state
from clusterddp.system.files import read_json, read_tail, write_json
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


def ask_reports(records: Records) -> Answer:
    """Say what the hosts of a run, in their last reports since its start, know of it."""
    record = records.record
    submitter = None if records.was_handed_over else records.submitter
    if submitter and submitter.alive():
        return Answer(life="ended")  # no host has it yet
    hosts = read_hosts(records.run)
    reports = {host: report for host, report in read_reports(records.run).items() if report.start == start_of(record)}
    if is_foreign(records.run):
        reason = "belongs to another user, and only that user can connect to its hosts"
        return Answer(life="unknown", words=reason, notes=(_last_known(records, reports.get(hosts[0])),))
    unreached = [host for host in hosts if host not in reports or reports[host].error is not None]
    supervised = [host for host, report in reports.items() if report.is_supervised and report.error is None]
    if supervised and hosts[0] not in unreached:
        return Answer(life="alive", notes=tuple(_why_unreached(reports, host) for host in unreached if host in reports))
    # The head's record comes first. Another node records an end when it loses the head, or when the head's storage
    # takes no record.
    number = records.attempt.number if records.attempt else 0
    for report in sorted(reports.values(), key=lambda report: report.host != hosts[0]):
        end, of = report.own_end, report.end_attempt
        if end and not end.will_restart and of is not None and of >= number:
            return Answer(life="ended", end=end, end_attempt=records.run.attempt(of))
    why = [_why_unreached(reports, host) for host in unreached]
    if hosts[0] in unreached:
        others = [f"it is still supervised on {', '.join(supervised)}"] if supervised else []
        words = "; ".join([why[0], *others])
    elif unreached:
        words = "; ".join([f"it is not supervised on {hosts[0]}", *why])
    else:
        words = f"its supervisors on {', '.join(hosts)} are gone"
        return Answer(life="ended", words=words, notes=_what_is_left(records, reports, hosts[0]))
    return Answer(life="unknown", words=words, notes=(_last_known(records, reports.get(hosts[0])),))


def read_hosts(run: RunDir) -> tuple[str, ...]:
    """Read the SSH names of the hosts of a run, in the order of its nodes."""
    return tuple(dict.fromkeys(node.host for node in read_gang(run).nodes))


def is_foreign(run: RunDir) -> bool:
    """Return whether root looks at the run of another user; its hosts accept that user's keys, not root's."""
    return os.geteuid() == 0 and os.stat(run.path).st_uid != 0


def read_unreached(run: RunDir) -> dict[str, str]:
    """Read which hosts of a run did not answer when they were last asked: host -> a sentence with the reason."""
    reports = read_reports(run)
    return {host: _why_unreached(reports, host) for host, report in reports.items() if report.error is not None}


def _why_unreached(reports: Mapping[str, HostReport], host: str) -> str:
    report = reports.get(host)
    if report is None or report.error is None:
        return f"{host} has not been asked"
    return f"{host} cannot be reached ({report.error})"


def _what_is_left(records: Records, reports: Mapping[str, HostReport], head_host: str) -> tuple[str, ...]:
    """Say what the hosts of a run that has ended tell of its end."""
    notes = []
    head = reports[head_host]
    if not head.has_run and records.record.job_id is not None:
        notes.append(f"its directory on {head_host} is gone")
    supervisor = (records.start or {}).get("supervisor")
    if supervisor and supervisor.boot and head.boot and head.boot != supervisor.boot:
        notes.append(f"{head_host} has rebooted since")
    left = [report.host for report in reports.values() if report.alive]
    if left:
        where = ", ".join(left)
        notes.append(f"its processes are left on {where} (clusterddp cancel {records.run.name} ends them)")
    return tuple(notes)


def _last_known(records: Records, head: HostReport | None) -> str:
    """Return the last known state: `last known: RUNNING, step 1200, 3 min ago`."""
    if records.start is None and not records.end and records.record.job_id is not None:
        facts = [f"started as {records.record.job_id}"]
    else:
        facts = [derive_state(records, Answer(life="alive")).state.value]
    step = _read_step(records.run) if records.start else None
    facts += [f"step {step}"] if step is not None else []
    reached = head.reached if head else None
    facts += [ago(time.time() - reached)] if reached else []
    return f"last known: {', '.join(facts)}"


def _read_step(run: RunDir) -> int | None:
    """Read the newest step from the last rows of the metrics."""
    for line in reversed(read_tail(run.metrics).splitlines()):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the first line of the tail is cut, and a row need not have a step
        if isinstance(step, int):
            return step
    return None


def ago(seconds: float) -> str:
    """Write how long ago something was, in the largest unit that fits."""
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or (seconds >= length_s and unit != "days"):
            return f"{seconds // length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"

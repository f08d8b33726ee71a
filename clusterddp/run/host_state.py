"""What the hosts of an SSH run last reported (`launcher/hosts.json`), and the state of the run that follows from it.

This module connects to no host; a command that needs the current state synchronises first (results/sync.py). The
`end.json` of node 0's host decides. Without one, a supervisor or guard on any host means that the run goes on, and
none on all hosts means LOST. If node 0's host does not answer, the state is UNKNOWN, unless another node has recorded
an end.
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
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, parse_end
from clusterddp.run.record import ProcessIdentity, RunRecord, Start, read_gang, read_start
from clusterddp.run.view import RunState, RunView, final_view
from clusterddp.system.files import read_json, read_tail, write_json
from clusterddp.wire import build


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """The facts that the state is derived from."""

    run: RunDir
    record: RunRecord
    attempt: AttemptDir | None
    end: AttemptEnd | None
    start: Start | None
    """`start.json` of the newest attempt."""
    hosts: tuple[str, ...]
    """In the order of the nodes, the head's first."""
    reports: dict[str, HostReport]
    """Of the hosts that were asked since the last start of the run."""

    @property
    def head(self) -> HostReport | None:
        return self.reports.get(self.hosts[0])

    @property
    def unreached(self) -> list[str]:
        """The hosts that were not asked, or did not answer the last time."""
        return [host for host in self.hosts if host not in self.reports or self.reports[host].error is not None]

    @property
    def supervised_on(self) -> list[str]:
        """The hosts that answered and have a supervisor or guard of the run."""
        return [host for host, report in self.reports.items() if report.is_supervised and report.error is None]

    @property
    def goes_on_as(self) -> RunState:
        """The state while a supervisor or guard lives."""
        if self.end:
            return RunState.REQUEUED
        return RunState.PENDING if self.start is None else RunState.RUNNING

    def view(self, state: RunState, reason: str) -> RunView:
        number = self.attempt.number if self.attempt else None
        return RunView(state=state, attempt=number, end=self.end, reason=reason)


def read_host_state(run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None) -> RunView:
    """Derive the state of a run without a final end; `attempt` is the newest one, `end` the end of that."""
    known = _Known(
        run=run,
        record=record,
        attempt=attempt,
        end=end,
        start=read_start(attempt) if attempt else None,
        hosts=read_hosts(run),
        reports={host: report for host, report in read_reports(run).items() if report.start == start_of(record)},
    )
    submitter = ProcessIdentity.from_json(record.submitter) if record.submitter else None
    if record.job_id is None and submitter and submitter.alive():
        return known.view(RunState.REQUEUED if end else RunState.PENDING, "starting")
    if is_foreign(run):
        reason = f"belongs to another user, and only that user can connect to its hosts; {_last(known)}"
        return known.view(RunState.UNKNOWN, reason)
    if known.supervised_on and known.hosts[0] not in known.unreached:
        after = f"restarts after: {end.reason}" if end else "starting" if known.start is None else "runs"
        unreached = [_why_unreached(known.reports, host) for host in known.unreached if host in known.reports]
        return known.view(known.goes_on_as, "; ".join([after, *unreached]))
    return _unsupervised(known, submitter)


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


def ago(seconds: float) -> str:
    """Write how long ago something was, in the largest unit that fits."""
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or (seconds >= length_s and unit != "days"):
            return f"{seconds // length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


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


def _unsupervised(known: _Known, submitter: ProcessIdentity | None) -> RunView:
    """Derive the state of a run if the head's host was not reached, or no reached host has a supervisor or guard."""
    ended = _ended_on_a_host(known)
    if ended:
        return ended
    if known.hosts[0] in known.unreached:
        others = [f"it is still supervised on {', '.join(known.supervised_on)}"] if known.supervised_on else []
        reason = "; ".join([_why_unreached(known.reports, known.hosts[0]), *others, _last(known)])
        return known.view(RunState.UNKNOWN, reason)
    if known.unreached:
        unreached = "; ".join(_why_unreached(known.reports, host) for host in known.unreached)
        reason = f"it is not supervised on {known.hosts[0]}; {unreached}; {_last(known)}"
        return known.view(RunState.UNKNOWN, reason)
    if known.record.job_id is None and submitter and submitter.alive() is None:
        reason = f"is being submitted on {submitter.host}, which cannot be asked from here"
        return known.view(RunState.UNKNOWN, reason)
    return known.view(RunState.LOST, _why_lost(known))


def _ended_on_a_host(known: _Known) -> RunView | None:
    """Return the end that a host has recorded and that was not downloaded; None if no host has recorded one.

    The head's record comes first. Another node records an end when it loses the head, or when the head's storage takes
    no record.
    """
    number = known.attempt.number if known.attempt else 0
    for report in sorted(known.reports.values(), key=lambda report: report.host != known.hosts[0]):
        end = report.own_end
        is_newest = report.end_attempt is not None and report.end_attempt >= number
        if end and is_newest and not end.will_restart:
            return final_view(known.run.attempt(report.end_attempt or 0), end)
    return None


def _why_lost(known: _Known) -> str:
    if known.end:
        reason = f"should have restarted after: {known.end.reason}; its supervisors are gone"
    elif known.start is None and known.record.job_id is None:
        reason = "was never started: the process that submitted it is gone"
    else:
        when = "" if known.start else "no rank was started: "
        reason = f"{when}its supervisors on {', '.join(known.hosts)} are gone and recorded no end"
    head = known.head
    if head and not head.has_run and known.record.job_id is not None:
        reason += f"; its directory on {head.host} is gone"
    supervisor = (known.start or {}).get("supervisor")
    boot = supervisor.boot if supervisor else None
    if head and boot and head.boot and head.boot != boot:
        reason += f"; {head.host} has rebooted since"
    left = [report.host for report in known.reports.values() if report.alive]
    if left:
        reason += f"; its processes are left on {', '.join(left)} (clusterddp cancel {known.run.name} ends them)"
    return reason


def _why_unreached(reports: Mapping[str, HostReport], host: str) -> str:
    report = reports.get(host)
    if report is None or report.error is None:
        return f"{host} has not been asked"
    return f"{host} cannot be reached ({report.error})"


def _last(known: _Known) -> str:
    """Return the last known state: `last known: RUNNING, step 1200, 3 min ago`."""
    if known.start is None and not known.end and known.record.job_id is not None:
        facts = [f"started as {known.record.job_id}"]
    else:
        facts = [known.goes_on_as.value]
    step = _read_step(known.run) if known.start else None
    facts += [f"step {step}"] if step is not None else []
    reached = known.head.reached if known.head else None
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

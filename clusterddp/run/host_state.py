"""The state of a run on SSH hosts: from the copy of its files, and from the last reports of its hosts.

No host is asked here: a command that wants news synchronises the copy first (results/sync.py). Node 0's host holds the
truth, and its `end.json` is downloaded. Without one, processes of the run that can still write it decide. One on any
host: the run goes on. None on any: LOST. A head that does not answer leaves it open, unless another node has recorded
that it was lost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.host_reports import HostReport, read_reports, start_of
from clusterddp.run.outcome import AttemptEnd
from clusterddp.run.record import ProcessIdentity, RunRecord, Start, read_gang, read_start
from clusterddp.run.view import RunState, RunView, final_view
from clusterddp.system.files import read_tail


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    run: RunDir
    record: RunRecord
    attempt: AttemptDir | None
    end: AttemptEnd | None
    start: Start | None
    """`start.json` of the newest attempt."""
    hosts: tuple[str, ...]
    """In the order of the nodes: the head's first."""
    reports: dict[str, HostReport]
    """Of the hosts that were asked since the run was started last."""

    @property
    def head(self) -> HostReport | None:
        return self.reports.get(self.hosts[0])

    @property
    def silent(self) -> list[str]:
        """The hosts of which it is not known what is there now."""
        return [host for host in self.hosts if host not in self.reports or self.reports[host].error is not None]

    @property
    def answered_for(self) -> bool:
        return any(report.answers and report.error is None for report in self.reports.values())

    @property
    def goes_on_as(self) -> RunState:
        """What it is while a process answers for it."""
        if self.end:
            return RunState.REQUEUED
        return RunState.PENDING if self.start is None else RunState.RUNNING

    def view(self, state: RunState, reason: str) -> RunView:
        number = self.attempt.number if self.attempt else None
        return RunView(state=state, attempt=number, end=self.end, reason=reason)


def read_host_state(run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None) -> RunView:
    """Judge the state of a run that has not ended for good; `end` is that of `attempt`, the newest one."""
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
        return known.view(RunState.REQUEUED if end else RunState.PENDING, "is being started")
    if is_foreign(run):
        return known.view(RunState.UNKNOWN, f"belongs to another user, who alone can ask its hosts; {_last(known)}")
    if known.answered_for and known.hosts[0] not in known.silent:
        after = f"restarts after: {end.reason}" if end else "is being started" if known.start is None else "runs"
        silence = [_why_silent(known.reports, host) for host in known.silent if host in known.reports]
        return known.view(known.goes_on_as, "; ".join([after, *silence]))
    return _unanswered(known, submitter)


def read_hosts(run: RunDir) -> tuple[str, ...]:
    """Read the SSH names of the hosts of a run, in the order of its nodes."""
    return tuple(dict.fromkeys(node.host for node in read_gang(run).nodes))


def is_foreign(run: RunDir) -> bool:
    """Say whether root looks at a run of another user, whose hosts know that user and not root."""
    return os.geteuid() == 0 and os.stat(run.path).st_uid != 0


def read_silence(run: RunDir) -> dict[str, str]:
    """Read which hosts of a run did not answer when they were asked last, and say so: host -> words."""
    reports = read_reports(run)
    return {host: _why_silent(reports, host) for host, report in reports.items() if report.error is not None}


def _unanswered(known: _Known, submitter: ProcessIdentity | None) -> RunView:
    """Judge the state of a run that no process answers for on the hosts that were reached, or whose head was not."""
    ended = _ended_on_a_host(known)
    if ended:
        return ended
    if known.hosts[0] in known.silent:
        others = [host for host, report in known.reports.items() if report.answers and report.error is None]
        words = [f"it is answered for on {', '.join(others)}"] if others else []
        reason = "; ".join([_why_silent(known.reports, known.hosts[0]), *words, _last(known)])
        return known.view(RunState.UNKNOWN, reason)
    if known.silent:
        silent = "; ".join(_why_silent(known.reports, host) for host in known.silent)
        return known.view(RunState.UNKNOWN, f"nobody answers for it on {known.hosts[0]}; {silent}; {_last(known)}")
    if known.record.job_id is None and submitter and submitter.alive() is None:
        reason = f"is being submitted on {submitter.host}, which cannot be asked from here"
        return known.view(RunState.UNKNOWN, reason)
    return known.view(RunState.LOST, _why_lost(known))


def _ended_on_a_host(known: _Known) -> RunView | None:
    """Return how the run ended as a host has recorded it whose record is not here; None when none has.

    That of the head comes first. Another node records what it saw when it lost the head, or when the head's own storage
    takes no record.
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
        words = f"was to restart after: {known.end.reason}; what carried it is gone"
    elif known.start is None and known.record.job_id is None:
        words = "was never started: what submitted it is gone"
    else:
        when = "ended without a word" if known.start else "ended before any rank was started"
        words = f"{when}: nobody answers for it on {', '.join(known.hosts)}, and no end is recorded"
    head = known.head
    if head and not head.has_run and known.record.job_id is not None:
        words += f"; its directory on {head.host} is gone"
    supervisor = (known.start or {}).get("supervisor")
    boot = supervisor.boot if supervisor else None
    if head and boot and head.boot and head.boot != boot:
        words += f"; {head.host} was started anew since"
    left = [report.host for report in known.reports.values() if report.alive]
    if left:
        words += f"; processes of it are left on {', '.join(left)} (clusterddp cancel {known.run.name} ends them)"
    return words


def _why_silent(reports: Mapping[str, HostReport], host: str) -> str:
    report = reports.get(host)
    if report is None or report.error is None:
        return f"{host} has not been asked"
    return f"{host} cannot be reached ({report.error})"


def _last(known: _Known) -> str:
    """Say what was known last: `last known: RUNNING, step 1200, 3 min ago`."""
    if known.start is None and not known.end and known.record.job_id is not None:
        words = [f"started as {known.record.job_id}"]
    else:
        words = [known.goes_on_as.value]
    step = _read_step(known.run) if known.start else None
    words += [f"step {step}"] if step is not None else []
    reached = known.head.reached if known.head else None
    words += [ago(time.time() - reached)] if reached else []
    return f"last known: {', '.join(words)}"


def _read_step(run: RunDir) -> int | None:
    """Read how far the metrics have come, from their last rows."""
    for line in reversed(read_tail(run.metrics).splitlines()):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the first line of the tail is cut, and a row need not have a step
        if isinstance(step, int):
            return step
    return None


def ago(seconds: float) -> str:
    """Say how long ago something was, in the largest unit that fits."""
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or (seconds >= length_s and unit != "days"):
            return f"{seconds // length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"

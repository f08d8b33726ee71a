"""Reports of hosts on runs, as they go into `launcher/hosts.json`, and which hosts are still to be asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.remote.download import Listed
from clusterddp.results.checkpoints import checkpoints_among
from clusterddp.results.download import locked
from clusterddp.results.host_run import HostRun, Wants, newest_attempt
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.host_reports import HostReport, read_reports, write_reports
from clusterddp.run.record import ProcessIdentity, RunRecord, read_run
from clusterddp.run.view import RunState, RunView
from clusterddp.system.files import read_json

_QUIET_WRITE_S = 10.0
"""How old the times in `hosts.json` may become while nothing else changes."""


def report_of(host_run: HostRun, answer: Mapping[str, Any], files: Mapping[str, Listed]) -> HostReport:
    """Make a report of what a host answered."""
    now = time.time()
    return HostReport(
        host=host_run.host,
        start=host_run.start,
        asked=now,
        reached=now,
        # A machine may be there under two names: each speaks for its own nodes.
        alive=tuple(role for role in answer["alive"] if role[1:].isdecimal() and int(role[1:]) in host_run.nodes),
        boot=str(answer["boot"]),
        has_run=bool(answer["has_run"]),
        end_attempt=answer["end_attempt"],
        end=answer["end"],
        checkpoints=checkpoints_among(files) if host_run.is_head else (),
    )


def failure_of(host_run: HostRun, error: SshError) -> HostReport:
    """Make a report of a host that did not answer."""
    return HostReport(host=host_run.host, start=host_run.start, asked=time.time(), error=reason_of(error))


def reason_of(error: SshError) -> str:
    return error.found if error.phase in {"ask", "connect"} else f"{error.phase}: {error.found}"


def write_news(run: RunDir, news: Iterable[HostReport]) -> None:
    """Write reports down; what another process has written meanwhile about other hosts stays.

    Raises: ClusterddpError: it cannot be written.
    """
    with locked(run, "hosts") as free:
        if not free:
            return  # another process writes it down
        before = read_reports(run)
        after = before | {report.host: _joined(before.get(report.host), report) for report in news}
        if _is_news(before, after):
            write_reports(run, after.values())


def is_open(host_run: HostRun, wants: Wants) -> bool:
    """Say whether a host has to be asked about a run now."""
    if wants.results:
        return is_due(host_run)
    if final_end(host_run.run) is None:
        return not _is_being_started(read_run(host_run.run))
    return bool(wants.logs & host_run.ranks) and ("logs" not in host_run.fetch or is_due(host_run))


def is_due(host_run: HostRun) -> bool:
    """Say whether a host may have more to download of a run that has ended, recorded or not."""
    if final_end(host_run.run) is not None and read_run(host_run.run).job_id is None:
        return False  # it was never started
    report = read_reports(host_run.run).get(host_run.host)
    return report is None or report.complete != newest_attempt(host_run.run)


def was_never_reached(run: RunDir) -> bool:
    """Say whether hosts of a run were tried in vain, none has ever answered, and its files say nothing either."""
    if any(attempt.start.exists() or attempt.end.exists() for attempt in run.attempts()):
        return False
    reports = read_reports(run).values()
    return any(report.error for report in reports) and not any(report.reached for report in reports)


def is_out_of_sight(run: RunDir, state: RunState) -> bool:
    """Say whether nothing is known of a run: its hosts cannot be reached, and none was since it was submitted."""
    return state is RunState.UNKNOWN and is_on_hosts(run) and was_never_reached(run)


def demand_sight(run: RunDir, view: RunView, *, asked_s: float | None = None) -> None:
    """See to it that something is known of a run; `asked_s`: for how long its hosts were asked again and again.

    Raises: PreflightError: it is out of sight.
    """
    if is_out_of_sight(run, view.state):
        asked = "" if asked_s is None else f"; its hosts were asked for {asked_s:.0f} s"
        raise PreflightError(f"{run.name}: {view.reason}{asked}")


def is_on_hosts(run: RunDir) -> bool:
    """Say whether a run was started on SSH hosts; False where its record cannot be read."""
    try:
        return (read_json(run.record) or {}).get("launcher") == "ssh"
    except (ClusterddpError, OSError, AttributeError):
        return False  # the command that reads it reports that


def _is_being_started(record: RunRecord) -> bool:
    if record.queued:
        return True
    submitter = ProcessIdentity.from_json(record.submitter) if record.submitter else None
    return record.job_id is None and submitter is not None and bool(submitter.alive())


def _joined(before: HostReport | None, news: HostReport) -> HostReport:
    """Return what is known of a host now: what it said last stays known when it does not answer."""
    if before is None:
        return news
    if news.error is not None:
        return dataclasses.replace(before, start=news.start, asked=news.asked, error=news.error)
    stays_complete = news.complete is None and not news.is_supervised
    return dataclasses.replace(news, complete=before.complete) if stays_complete else news


def _is_news(before: Mapping[str, HostReport], after: Mapping[str, HostReport]) -> bool:
    if _facts(before) != _facts(after):
        return True
    oldest = min((report.asked for report in before.values()), default=0.0)
    return time.time() - oldest > _QUIET_WRITE_S


def _facts(reports: Mapping[str, HostReport]) -> dict[str, HostReport]:
    return {host: dataclasses.replace(report, asked=0.0, reached=None) for host, report in reports.items()}

"""What hosts told of runs, as it goes into `launcher/hosts.json`, and which of them have told all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from clusterddp.errors import SshError
from clusterddp.results.fetch import checkpoints_among
from clusterddp.results.pull import Told
from clusterddp.results.target import Target, Wants, locked, newest_attempt
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.host_reports import HostReport, read_reports, write_reports
from clusterddp.run.record import ProcessIdentity, RunRecord, read_run

_QUIET_WRITE_S = 10.0
"""How old the times in `hosts.json` may become while nothing else changes."""


def report_of(target: Target, told: Mapping[str, Any], files: Mapping[str, Told]) -> HostReport:
    """Make a report of what a host answered."""
    now = time.time()
    return HostReport(
        host=target.host,
        start=target.start,
        asked=now,
        reached=now,
        # A machine may be there under two names: each speaks for its own nodes.
        alive=tuple(role for role in told["alive"] if role[1:].isdecimal() and int(role[1:]) in target.nodes),
        boot=str(told["boot"]),
        has_run=bool(told["has_run"]),
        end_attempt=told["end_attempt"],
        end=told["end"],
        checkpoints=checkpoints_among(files) if target.is_head else (),
    )


def failure_of(target: Target, error: SshError) -> HostReport:
    """Make a report of a host that did not answer."""
    return HostReport(host=target.host, start=target.start, asked=time.time(), error=words_of(error))


def words_of(error: SshError) -> str:
    return error.found if error.phase in {"ask", "connect"} else f"{error.phase}: {error.found}"


def record(run: RunDir, news: Iterable[HostReport]) -> None:
    """Write down what hosts said; what another process has found out meanwhile about others stays.

    Raises: ClusterddpError: it cannot be written.
    """
    with locked(run, "hosts") as free:
        if not free:
            return  # somebody else writes it down
        before = read_reports(run)
        after = before | {report.host: _joined(before.get(report.host), report) for report in news}
        if _is_news(before, after):
            write_reports(run, after.values())


def is_open(target: Target, wants: Wants) -> bool:
    """Say whether a host has to be asked about a run now."""
    if wants.results:
        return is_due(target)
    if final_end(target.run) is None:
        return not _is_being_started(read_run(target.run))
    return bool(wants.logs & target.ranks) and ("logs" not in target.fetch or is_due(target))


def is_due(target: Target) -> bool:
    """Say whether a host may have something to fetch of a run that has ended, with a word or without one."""
    if final_end(target.run) is not None and read_run(target.run).job_id is None:
        return False  # it was never started
    report = read_reports(target.run).get(target.host)
    return report is None or report.complete != newest_attempt(target.run)


def was_never_reached(run: RunDir) -> bool:
    """Say whether hosts of a run were tried in vain and none ever answered, and its files tell nothing either."""
    if any(attempt.start.exists() or attempt.end.exists() for attempt in run.attempts()):
        return False
    reports = read_reports(run).values()
    return any(report.error for report in reports) and not any(report.reached for report in reports)


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
    stays_complete = news.complete is None and not news.answers
    return dataclasses.replace(news, complete=before.complete) if stays_complete else news


def _is_news(before: Mapping[str, HostReport], after: Mapping[str, HostReport]) -> bool:
    if _facts(before) != _facts(after):
        return True
    oldest = min((report.asked for report in before.values()), default=0.0)
    return time.time() - oldest > _QUIET_WRITE_S


def _facts(reports: Mapping[str, HostReport]) -> dict[str, HostReport]:
    return {host: dataclasses.replace(report, asked=0.0, reached=None) for host, report in reports.items()}

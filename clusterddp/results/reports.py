"""Makes and merges the reports of hosts (`launcher/hosts.json`), and decides which hosts have to be asked."""

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
"""How old the times in `hosts.json` may get while nothing else changes."""


def report_of(host_run: HostRun, answer: Mapping[str, Any], files: Mapping[str, Listed]) -> HostReport:
    """Return the report of a host that answered."""
    now = time.time()
    return HostReport(
        host=host_run.host,
        start=host_run.start,
        asked=now,
        reached=now,
        # One machine may be two hosts of a run; each reports its own nodes.
        alive=tuple(role for role in answer["alive"] if role[1:].isdecimal() and int(role[1:]) in host_run.nodes),
        boot=str(answer["boot"]),
        has_run=bool(answer["has_run"]),
        end_attempt=answer["end_attempt"],
        end=answer["end"],
        checkpoints=checkpoints_among(files) if host_run.is_head else (),
        last_output=_last_output(newest_attempt(host_run.run, files), files),
    )


def _last_output(attempt: int, files: Mapping[str, Listed]) -> float | None:
    logs = f"attempts/{attempt}/logs/"
    own = {path: listed for path, listed in files.items() if path.startswith(logs) and not path.endswith(".times")}
    written_ns = [mtime_ns for size, mtime_ns in own.values() if size]
    return max(written_ns) / 1e9 if written_ns else None


def failure_of(host_run: HostRun, error: SshError) -> HostReport:
    """Return the report of a host that did not answer."""
    return HostReport(host=host_run.host, start=host_run.start, asked=time.time(), error=reason_of(error))


def reason_of(error: SshError) -> str:
    return error.found if error.phase in {"ask", "connect"} else f"{error.phase}: {error.found}"


def update_reports(run: RunDir, reports: Iterable[HostReport]) -> None:
    """Write the reports of some hosts; those of the other hosts stay.

    Raises: ClusterddpError: they cannot be written.
    """
    with locked(run, "hosts") as free:
        if not free:
            return  # another process writes reports
        before = read_reports(run)
        after = before | {report.host: _merged(before.get(report.host), report) for report in reports}
        if _must_write(before, after):
            write_reports(run, after.values())


def must_ask(host_run: HostRun, wants: Wants) -> bool:
    """Return whether a host has to be asked about a run now."""
    if wants.results:
        return _may_have_results(host_run)
    if final_end(host_run.run) is None:
        return not _is_being_started(read_run(host_run.run))
    return bool(wants.logs & host_run.ranks) and ("logs" not in host_run.fetch or _may_have_results(host_run))


def _may_have_results(host_run: HostRun) -> bool:
    """Return whether a host may have files of an ended run that were not downloaded yet."""
    if final_end(host_run.run) is not None and read_run(host_run.run).job_id is None:
        return False  # it was never started
    report = read_reports(host_run.run).get(host_run.host)
    return report is None or report.complete != newest_attempt(host_run.run)


def was_never_reached(run: RunDir) -> bool:
    """Return whether the hosts of a run were asked, none ever answered, and its local files have no attempt."""
    if any(attempt.start.exists() or attempt.end.exists() for attempt in run.attempts()):
        return False
    reports = read_reports(run).values()
    return any(report.error for report in reports) and not any(report.reached for report in reports)


def is_unknown(run: RunDir, state: RunState) -> bool:
    """Return whether nothing is known of a run: no host has been reached since it was submitted."""
    return state is RunState.UNKNOWN and is_on_hosts(run) and was_never_reached(run)


def raise_if_unknown(run: RunDir, view: RunView, *, asked_s: float | None = None) -> None:
    """Refuse to go on with a run of which nothing is known; `asked_s`: for how many seconds its hosts were asked.

    Raises: PreflightError: `is_unknown`.
    """
    if is_unknown(run, view.state):
        asked = "" if asked_s is None else f"; its hosts were asked for {asked_s:.0f} s"
        raise PreflightError(f"{run.name}: {view.reason}{asked}")


def is_on_hosts(run: RunDir) -> bool:
    """Return whether a run was started on SSH hosts; False if its record cannot be read."""
    try:
        return (read_json(run.record) or {}).get("launcher") == "ssh"
    except (ClusterddpError, OSError, AttributeError):
        return False  # the command that reads it reports that


def _is_being_started(record: RunRecord) -> bool:
    if record.queued:
        return True
    submitter = ProcessIdentity.from_json(record.submitter) if record.submitter else None
    return record.job_id is None and submitter is not None and bool(submitter.alive())


def _merged(before: HostReport | None, new: HostReport) -> HostReport:
    """Return the report of a host; if it did not answer, its last answer stays."""
    if before is None:
        return new
    if new.error is not None:
        return dataclasses.replace(before, start=new.start, asked=new.asked, error=new.error)
    stays_complete = new.complete is None and not new.is_supervised
    return dataclasses.replace(new, complete=before.complete) if stays_complete else new


def _must_write(before: Mapping[str, HostReport], after: Mapping[str, HostReport]) -> bool:
    if _facts(before) != _facts(after):
        return True
    oldest = min((report.asked for report in before.values()), default=0.0)
    return time.time() - oldest > _QUIET_WRITE_S


def _facts(reports: Mapping[str, HostReport]) -> dict[str, HostReport]:
    changing: dict[str, Any] = {"asked": 0.0, "reached": None, "last_output": None}
    return {host: dataclasses.replace(report, **changing) for host, report in reports.items()}

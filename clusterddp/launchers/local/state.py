"""The state of a run on this machine that has no recorded end: is a process left that would write one?

The processes that answer for the run are the submitter before the start, then the task that carries it, the supervisors
and their guards. With one of them left the run is PENDING or RUNNING, else it is LOST. No clock is asked, so a slow
machine never looks like a dead run.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.cleanup import answers_for_its_run, find_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import ProcessIdentity, RunRecord, Start, read_start
from clusterddp.run.view import RunState, RunView

START_GRACE_S = 3.0
"""How long after an attempt's directory was made a missing starter is no news: it may be between two system calls."""


def read_local_state(
    run: RunDir, record: RunRecord, newest: AttemptDir | None, end: AttemptEnd | None
) -> RunView | None:
    """Read the state of a run of this machine that has not ended for good; None: its files have changed meanwhile."""
    if newest and end:
        return _restarting(run, record, newest, end)
    start = read_start(newest) if newest else None
    if newest and start is not None:
        return _started(run, record, newest, start)
    return _unstarted(run, record, newest)


def _restarting(run: RunDir, record: RunRecord, attempt: AttemptDir, end: AttemptEnd) -> RunView | None:
    foreign = _foreign_host(record)
    if foreign is not None:
        return _unknown(attempt, foreign)
    if _answered_for(run, record):
        return RunView(state=RunState.REQUEUED, attempt=attempt.number, end=end, reason=f"restarts after: {end.reason}")
    newest = run.newest_attempt()
    if newest.number != attempt.number or _final(read_end(newest)):
        return None
    return _lost(run, record, attempt, f"was to restart after: {end.reason}; what carried it is gone", end)


def _started(run: RunDir, record: RunRecord, attempt: AttemptDir, start: Start) -> RunView | None:
    head = start.get("supervisor")
    if head is None:
        raise ClusterddpError(f"{attempt.start}: names no supervisor")
    alive = head.alive()
    if alive is None:
        return _unknown(attempt, head.host)
    if alive or _answered_for(run, record):
        return RunView(state=RunState.RUNNING, attempt=attempt.number, end=None, reason="its supervisor is alive")
    # Whoever was left may have written the end and gone while we looked at the processes.
    if attempt.end.exists():
        return None
    return _lost(run, record, attempt, "ended without a word: its processes are gone and no end is recorded", None)


def _unstarted(run: RunDir, record: RunRecord, attempt: AttemptDir | None) -> RunView | None:
    foreign = _foreign_host(record)
    if foreign is not None:
        return _unknown(attempt, foreign)
    number = attempt.number if attempt else None
    if _answered_for(run, record) or _just_made(attempt):
        previous = read_end(run.attempt(number - 1)) if number else None
        state = RunState.REQUEUED if previous and previous.will_restart else RunState.PENDING
        return RunView(state=state, attempt=number, end=None, reason="is being started")
    if attempt is not None and (attempt.start.exists() or attempt.end.exists()):
        return None
    return _lost(run, record, attempt, "was never started: what submitted it is gone", None)


def _answered_for(run: RunDir, record: RunRecord) -> bool:
    """Say whether a process lives on this machine that will still write how the run ended."""
    # The submitter answers until the launcher has named a keeper; later it may live on for days in a notebook.
    identity = record.keeper or record.submitter
    if identity and ProcessIdentity.from_json(identity).alive():
        return True
    # Between the start of the launcher and the record of it, and while a guard or the task puts things in order, only
    # the cookie tells.
    return any(answers_for_its_run(process) for process in _processes(run, record))


def _lost(run: RunDir, record: RunRecord, attempt: AttemptDir | None, reason: str, end: AttemptEnd | None) -> RunView:
    left = len(_processes(run, record))
    if left:
        reason += f"; {left} of its processes are left (clusterddp cancel {run.name} ends them)"
    return RunView(state=RunState.LOST, attempt=attempt.number if attempt else None, end=end, reason=reason)


def _unknown(attempt: AttemptDir | None, host: str) -> RunView:
    return RunView(
        state=RunState.UNKNOWN,
        attempt=attempt.number if attempt else None,
        end=None,
        reason=f"runs on {host}, which cannot be asked from {socket.gethostname()}",
    )


def _processes(run: RunDir, record: RunRecord) -> list[Any]:
    # The owner of the run, not of this process: root may look at a run of somebody else.
    return find_processes(f"{record.token}.", uid=os.stat(run.path).st_uid)


def _foreign_host(record: RunRecord) -> str | None:
    """Name the machine that carries the run when it is not this one."""
    identity = record.keeper or record.submitter
    host = str(identity.get("host", "")) if identity else ""
    return host if host and host != socket.gethostname() else None


def _just_made(attempt: AttemptDir | None) -> bool:
    return attempt is not None and abs(time.time() - os.stat(attempt.path).st_mtime) < START_GRACE_S


def _final(end: AttemptEnd | None) -> bool:
    return end is not None and not end.will_restart

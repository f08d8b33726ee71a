"""The state of a run, read from its files and, where those leave a doubt, from the processes of this machine.

An `end.json` is the truth. Without one the question is whether anybody is left who would write it: the processes that
answer for the run (the submitter before the start; then the task that carries it, the supervisors and their guards).
Somebody left: PENDING or RUNNING. Nobody left: LOST. No clock is asked, so a slow machine never looks like a dead run.
Of a run on Slurm that question is asked of Slurm (job_state.py); of one on SSH hosts they have answered it
(host_state.py). A run that waits in the queue of a sweep is answered for by the queue (sweep_queue.py).
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.cleanup import answers_for_its_run, find_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import (
    FOREIGN,
    AttemptEnd,
    ProcessIdentity,
    RunRecord,
    Start,
    drop_secrets,
    read_end,
    read_run,
    read_start,
)
from clusterddp.run.spool import deliver_end, read_spooled
from clusterddp.run.view import RunState, RunView, final_view

if TYPE_CHECKING:
    from clusterddp.slurm.queue import Slurm

START_GRACE_S = 3.0
"""How long after an attempt's directory was made a missing starter is no news: it may be between two system calls."""


def read_state(run: RunDir, slurm: Slurm | None = None, *, record: RunRecord | None = None) -> RunView:
    """Read the state of a run; a file that cannot be read makes it UNKNOWN, never an error.

    `slurm` None: what this process shares. `record`: that of the run, where it was read already.
    What a run that has ended has left in the wrong place is put right: values of its secrets, an end in the spool.
    """
    try:
        view = _read_state(run, record or read_run(run), slurm)
        if view.state is RunState.LOST:
            os.stat(run.path)  # files that are away are no sign that nobody writes them
        if view.finished:
            drop_secrets(run)
        return view
    except (ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        return RunView(state=RunState.UNKNOWN, attempt=None, end=None, reason=f"its record cannot be read: {error}")


def announce(runs: Iterable[tuple[RunDir, RunRecord]], slurm: Slurm | None = None) -> None:
    """Announce that the states of these runs will be read, so that Slurm is asked once for all of them."""
    on_slurm = [(run, record) for run, record in runs if record.launcher == "slurm"]
    if on_slurm:
        from clusterddp.run.job_state import wanted_jobs

        (slurm or _slurm_here()).expect(wanted_jobs(on_slurm))


def _read_state(run: RunDir, record: RunRecord, slurm: Slurm | None = None) -> RunView:
    attempts = run.attempts()
    newest = attempts[-1] if attempts else None
    end = None
    if newest:
        end = read_end(newest) or read_spooled(record.token, newest.number)
    if newest and end and not end.will_restart:
        deliver_end(newest, record.token, end)
        return final_view(newest, end)
    if newest and record.queued:
        return _queued(run, newest)
    if record.launcher == "slurm":
        from clusterddp.run.job_state import read_job_state

        # No view: files came while Slurm was asked.
        view = read_job_state(run, record, newest, end, slurm or _slurm_here())
        return view or _read_state(run, read_run(run), slurm)
    if record.launcher in {"ssh", FOREIGN}:
        return _unsupervised_here(run, record, newest, end)
    return _read_here(run, record, newest, end)


def _queued(run: RunDir, attempt: AttemptDir) -> RunView:
    from clusterddp.run.sweep_queue import read_queued_state

    view, now = read_queued_state(run, attempt), read_run(run)
    # The queue may have started the run, and ended, while we looked.
    overtaken = view.state is RunState.LOST and (not now.queued or attempt.end.exists())
    return _read_state(run, now) if overtaken else view


def _read_here(run: RunDir, record: RunRecord, newest: AttemptDir | None, end: AttemptEnd | None) -> RunView:
    """Read the state of a run of this machine that has not ended for good."""
    if newest and end:
        return _restarting(run, record, newest, end)
    start = read_start(newest) if newest else None
    if newest and start is not None:
        return _started(run, record, newest, start)
    return _unstarted(run, record, newest)


def _unsupervised_here(run: RunDir, record: RunRecord, newest: AttemptDir | None, end: AttemptEnd | None) -> RunView:
    if record.launcher == FOREIGN:
        from clusterddp.run.worker_state import read_worker_state

        return read_worker_state(run, record, newest)
    from clusterddp.run.host_state import read_host_state

    return read_host_state(run, record, newest, end)


def _restarting(run: RunDir, record: RunRecord, attempt: AttemptDir, end: AttemptEnd) -> RunView:
    foreign = _foreign_host(record)
    if foreign is not None:
        return _unknown(attempt, foreign)
    if _answered_for(run, record):
        return RunView(state=RunState.REQUEUED, attempt=attempt.number, end=end, reason=f"restarts after: {end.reason}")
    newest = run.newest_attempt()
    if newest.number != attempt.number or _final(read_end(newest)):
        return _read_state(run, record)
    return _lost(run, record, attempt, f"was to restart after: {end.reason}; what carried it is gone", end)


def _started(run: RunDir, record: RunRecord, attempt: AttemptDir, start: Start) -> RunView:
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
        return _read_state(run, record)
    return _lost(run, record, attempt, "ended without a word: its processes are gone and no end is recorded", None)


def _unstarted(run: RunDir, record: RunRecord, attempt: AttemptDir | None) -> RunView:
    foreign = _foreign_host(record)
    if foreign is not None:
        return _unknown(attempt, foreign)
    number = attempt.number if attempt else None
    if _answered_for(run, record) or _just_made(attempt):
        previous = read_end(run.attempt(number - 1)) if number else None
        state = RunState.REQUEUED if previous and previous.will_restart else RunState.PENDING
        return RunView(state=state, attempt=number, end=None, reason="is being started")
    if attempt is not None and (attempt.start.exists() or attempt.end.exists()):
        return _read_state(run, record)
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


@functools.cache
def _slurm_here() -> Slurm:
    """Return the one `Slurm` that everything in this process shares, so that its answers are shared too."""
    from clusterddp.slurm.queue import Slurm

    return Slurm(inherited_environment())

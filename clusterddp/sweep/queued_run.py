"""Runs that wait in the queue of a sweep: how one is taken out and started, and how one that ended gets in again."""

from __future__ import annotations

import dataclasses

from clusterddp.errors import ClusterddpError
from clusterddp.planning.local import GpusInUseError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import Report, end_run, final_end, no_report
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import cancelled
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run
from clusterddp.run.sweep import claim
from clusterddp.run.view import RunState, RunView
from clusterddp.submission.submit import (
    CANCELLED_IN_QUEUE,
    clear_away,
    give_up_start,
    open_attempt,
    plan_again,
    record_end,
    start_attempt,
)


def start_queued(run: RunDir, report: Report = no_report) -> bool:
    """Take a run out of the queue and start it; False: another process has taken it.

    Raises: GpusInUseError: it waits on. ClusterddpError: it cannot be started; that is then its recorded end.
    KeyboardInterrupt: the start was broken off; that is its recorded end likewise.
    """
    attempt = run.newest_attempt()
    if attempt.claim.exists():
        return False
    trouble = None
    try:
        plan_again(run, inherited_environment())
    except GpusInUseError:
        raise
    except (ClusterddpError, OSError) as error:
        trouble = error
    if not claim(attempt):
        return False
    try:
        submitter = dataclasses.asdict(ProcessIdentity.of())
        write_run(run, dataclasses.replace(read_run(run), queued=False, submitter=submitter))
        if trouble is not None:
            give_up_start(run, trouble)
        start_attempt(run, attempt.number, report, may_wait=True)
    except GpusInUseError:
        _put_back(run, attempt)
        raise
    except KeyboardInterrupt:
        if final_end(run) is None:
            record_end(run, cancelled("interrupted while it was being started"))
        raise
    return True


def queue_again(run: RunDir, view: RunView) -> None:
    """Let a run that has ended wait for its next attempt in the queue of its sweep.

    Raises: ClusterddpError: something is left of it that cannot be cleared away, or the file system refuses.
    """
    record = read_run(run)
    if view.state is RunState.LOST and record.queued and not run.attempts()[-1].claim.exists():
        return  # it waits already
    clear_away(run, record, inherited_environment())
    log_event(run, "queued", attempt=open_attempt(run, view, queued=True))


def is_left(run: RunDir, view: RunView) -> bool:
    """Return whether a run of a sweep has not been carried out: it was lost, cancelled, or never got as far as a rank.

    A run that failed has a result.
    """
    if view.state in {RunState.LOST, RunState.CANCELLED}:
        return True
    return view.state is RunState.FAILED and not any(attempt.start.exists() for attempt in run.attempts())


def _put_back(run: RunDir, attempt: AttemptDir) -> None:
    write_run(run, dataclasses.replace(read_run(run), queued=True))
    if run.cancel_file.exists():  # a cancel meanwhile found it being started
        end_run(run, cancelled(CANCELLED_IN_QUEUE))
        return
    attempt.claim.unlink(missing_ok=True)

"""Runs in the queue of a sweep: take one out and start it, or queue one that has ended again."""

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
    """Claim a run in the queue and start it; False: another process has claimed it.

    Raises: GpusInUseError: it has to wait. ClusterddpError: it cannot be started, which is recorded as its end.
    KeyboardInterrupt: the start was interrupted, which is recorded as its end, too.
    """
    attempt = run.newest_attempt()
    if attempt.claim.exists():
        return False
    plan_error = None
    try:
        plan_again(run, inherited_environment())
    except GpusInUseError:
        raise
    except (ClusterddpError, OSError) as error:
        plan_error = error
    if not claim(attempt):
        return False
    try:
        submitter = dataclasses.asdict(ProcessIdentity.of())
        write_run(run, dataclasses.replace(read_run(run), queued=False, submitter=submitter))
        if plan_error is not None:
            give_up_start(run, plan_error)
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
    """Queue a run that has ended for its next attempt.

    Raises: ClusterddpError: leftover processes cannot be ended, or the file system refuses.
    """
    record = read_run(run)
    if view.state is RunState.LOST and record.queued and not run.attempts()[-1].claim.exists():
        return  # it waits already
    clear_away(run, record, inherited_environment())
    log_event(run, "queued", attempt=open_attempt(run, view, queued=True))


def is_left(run: RunDir, view: RunView) -> bool:
    """Return whether a run of a sweep was lost, was cancelled, or failed before a rank was started."""
    if view.state in {RunState.LOST, RunState.CANCELLED}:
        return True
    return view.state is RunState.FAILED and not any(attempt.start.exists() for attempt in run.attempts())


def _put_back(run: RunDir, attempt: AttemptDir) -> None:
    write_run(run, dataclasses.replace(read_run(run), queued=True))
    if run.cancel_file.exists():  # it was cancelled during the start
        end_run(run, cancelled(CANCELLED_IN_QUEUE))
        return
    attempt.claim.unlink(missing_ok=True)

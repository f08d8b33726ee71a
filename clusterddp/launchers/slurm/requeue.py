"""The next attempt of a run on Slurm: the batch script requeues the job, or submits a follow-up job.

When its host is lost, Slurm requeues the job by itself (`--requeue`).
"""

from __future__ import annotations

import sys
import time

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launchers.slurm.carried import Carried
from clusterddp.launchers.slurm.jobs import find_job
from clusterddp.run.attempts import end_run
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import cancelled, failed
from clusterddp.run.record import JobAnswer, log_event, read_run, write_job_answer
from clusterddp.slurm.control import requeue_job, show_job
from clusterddp.slurm.identity import job_tag
from clusterddp.system.files import is_file
from clusterddp.system.storage import retry_outage

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def start_next_attempt(carried: Carried, attempt: AttemptDir) -> str:
    """Requeue the job, or submit a follow-up job, for the attempt after `attempt`; return what starts it.

    Retries for as long as this process lives when the controller does not answer. The job's number of restarts shows
    whether a requeue without an answer took effect.
    """
    run = carried.run
    pause_s = _FIRST_PAUSE_S
    while True:
        if retry_outage(run.newest_attempt).number > attempt.number:
            return "another start of the job"
        if is_file(run.cancel_file):
            end_run(run, cancelled("cancelled before it was started again"))
            return "nothing: the run was cancelled"
        try:
            return _try(carried, attempt)
        except SlurmError as error:
            if not error.transient:
                return _give_up(run, error)
            print(f"{error.message}; retrying in {pause_s:.0f} s", file=sys.stderr, flush=True)
        except (ClusterddpError, OSError) as error:
            return _give_up(run, error)
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def _try(carried: Carried, attempt: AttemptDir) -> str:
    """Try once; return what starts the next attempt.

    Raises: SlurmError: `transient`: the caller has to retry.
    """
    start, environ = carried.start, carried.environment
    job = show_job(start.job_id, environ)
    if job is not None and job.restarts > start.restart_count:
        return "the same job, requeued"
    if job is None:
        return _follow_up(carried, attempt, "Slurm no longer knows the job")
    try:
        requeue_job(start.job_id, environ)
    except SlurmError as error:
        if error.transient or "pending" in error.message.lower():
            raise SlurmError(error.message, transient=True) from error
        return _follow_up(carried, attempt, error.message)
    log_event(carried.run, "requeued", attempt=attempt.number, job_id=start.job_id)
    return "the same job, requeued"


def _follow_up(carried: Carried, attempt: AttemptDir, why: str) -> str:
    """Submit another job for the next attempt, unless an earlier try has submitted it.

    Raises: SlurmError: Slurm refuses it. `transient`: the caller has to retry.
    """
    from clusterddp.launchers.slurm.launcher import submit_attempt

    run, number = carried.run, attempt.number + 1
    job_id = _find_follow_up(carried, number)
    if job_id is None:
        job_id = submit_attempt(run, number, carried.environment, keep_variables=True).job_id
    log_event(run, "follow_up", attempt=number, job_id=job_id, why=why)
    return f"follow-up job {job_id} ({why})"


def _find_follow_up(carried: Carried, number: int) -> str | None:
    record = read_run(carried.run)
    if record.job_tag != job_tag(record.token, number):
        return None
    job = find_job(carried.run, record, carried.environment)
    if job is None:
        return None
    write_job_answer(carried.run, record.job_tag, JobAnswer(job_id=job.job_id, cluster=record.cluster))
    return job.job_id


def _give_up(run: RunDir, error: Exception) -> str:
    message = error.message if isinstance(error, ClusterddpError) else str(error)
    reason = f"could neither requeue the job nor submit a follow-up job: {message}"
    end_run(run, failed(reason, log="launcher/job.log"))
    return f"nothing: {message}"

"""How the next attempt of a Slurm run gets its start of a job: the same job requeued, or a follow-up job."""

from __future__ import annotations

import socket
import sys
import time

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launchers.slurm.carried import Carried, JobStart
from clusterddp.launchers.slurm.jobs import find_job
from clusterddp.run.attempts import end_run
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import cancelled, failed
from clusterddp.run.record import JobAnswer, log_event, read_run, write_job_answer
from clusterddp.slurm.control import requeue_job, show_job
from clusterddp.slurm.identity import job_tag
from clusterddp.system.files import is_file, write_json
from clusterddp.system.storage import retry_outage

_OTHERS_S = 30.0
"""How long another process that has taken it upon itself to requeue the job has for it, before we do it too."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def go_on(carried: Carried, attempt: AttemptDir) -> str:
    """See to it that the attempt after `attempt` gets its start of a job; return in words what does it.

    A controller that cannot be asked is asked again for as long as this process lives: whether an order without an
    answer was heard, the number of the job's restarts tells.
    """
    run = carried.run
    others_until = time.monotonic() + (0.0 if _claim_requeue(attempt, carried.start) else _OTHERS_S)
    pause_s = _FIRST_PAUSE_S
    while True:
        if retry_outage(run.newest_attempt).number > attempt.number:
            return "another start of the job"
        if is_file(run.cancel_file):
            end_run(run, cancelled("cancelled before it was started again"))
            return "nothing: it was cancelled"
        try:
            done = _try(carried, attempt, may_act=time.monotonic() >= others_until)
        except SlurmError as error:
            if not error.transient:
                return _give_up(run, error)
            print(f"{error.message}; asking again in {pause_s:.0f} s", file=sys.stderr, flush=True)
        except (ClusterddpError, OSError) as error:
            return _give_up(run, error)
        else:
            if done:
                return done
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def _claim_requeue(attempt: AttemptDir, start: JobStart) -> bool:
    claim = {
        "by": "batch",
        "host": socket.gethostname(),
        "job_id": start.job_id,
        "restart_count": start.restart_count,
        "time": time.time(),
    }
    return write_json(attempt.path / "requeue.json", claim, exclusive=True)


def _try(carried: Carried, attempt: AttemptDir, *, may_act: bool) -> str:
    """Do what is to be done now; empty when it has to be tried again.

    Raises: SlurmError.
    """
    start, environ = carried.start, carried.environment
    job = show_job(start.job_id, environ)
    if job is not None and job.restarts > start.restart_count:
        return "the same job, requeued"
    if not may_act:
        return ""
    if job is None:
        return _follow_up(carried, attempt, "Slurm does not know the job any more")
    try:
        requeue_job(start.job_id, environ)
    except SlurmError as error:
        if error.transient or "pending" in error.message.lower():
            raise SlurmError(error.message, transient=True) from error
        return _follow_up(carried, attempt, error.message)
    log_event(carried.run, "requeued", attempt=attempt.number, job_id=start.job_id)
    return "the same job, requeued"


def _follow_up(carried: Carried, attempt: AttemptDir, why: str) -> str:
    """Submit another job for the next attempt; one that an earlier try may have submitted is looked for first.

    Raises: SlurmError: it is refused; or `transient`: it has to be tried again.
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
    words = error.message if isinstance(error, ClusterddpError) else str(error)
    reason = f"the job could be neither requeued nor followed up: {words}"
    end_run(run, failed(reason, log="launcher/job.log"))
    return f"nothing: {words}"

"""The job of a run in Slurm's queue: found, cancelled and signalled by the tag in its name, never by its id alone."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.queue import Job, Phase, Slurm
from clusterddp.places.slurm.state import wanted_job
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_name
from clusterddp.run.record import RunRecord

_PATIENCE_S = 45.0
"""How long to retry when the controller does not answer."""
_LONGEST_PAUSE_S = 8.0
_POLL_S = 0.25


def find_job(run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> Job | None:
    """Query queue and accounting now for the job of a run.

    Raises: SlurmError: Slurm could not be asked.
    """
    wanted = wanted_job(run, record)
    return Slurm(environ, max_age_s=0.0).find(wanted) if wanted else None


def wait_for_job(run: RunDir, record: RunRecord, environ: Mapping[str, str], *, num_looks: int) -> Job | None:
    """Look up to `num_looks` times for a job that may be in the queue, with growing pauses; None if it never appears.

    Raises: SlurmError: the controller did not answer for 45 s.
    """
    give_up = time.monotonic() + _PATIENCE_S
    looks, pause_s = 0, 0.5
    while True:
        try:
            job = find_job(run, record, environ)
            looks += 1
            if job is not None or looks >= num_looks:
                return job
        except SlurmError as error:
            if not error.transient or time.monotonic() > give_up:
                raise
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def is_over(job: Job | None) -> bool:
    """Say whether a job has ended or was not found, so that it starts nothing more."""
    return job is None or job.phase is Phase.ENDED


def wait_for_end(run: RunDir, record: RunRecord, environ: Mapping[str, str], timeout_s: float) -> Job | None:
    """Wait until a job is over or `timeout_s` has passed; return its last state.

    Raises: SlurmError: Slurm could not be asked.
    """
    deadline = time.monotonic() + timeout_s
    while not is_over(job := find_job(run, record, environ)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return job


def cancel_job(name: str, record: RunRecord, job: Job, environ: Mapping[str, str]) -> None:
    """Cancel a job if it still has this name: Slurm may have reused its id for another user's job.

    "Invalid job id" is no error here: the job may have ended since. A busy controller can give that answer for a job
    that exists; the caller waits for the end of the job and so detects it.
    Raises: SlurmError: Slurm could not be asked.
    """
    try:
        run_slurm(["scancel", *_only(name, record), job.job_id], environ=environ)
    except SlurmError as error:
        if error.reason != "unknown job":
            raise


def signal_batch(name: str, record: RunRecord, job: Job, environ: Mapping[str, str]) -> None:
    """Send SIGUSR2 to a job's batch process only, which asks the run to checkpoint and stop.

    Raises: SlurmError: Slurm could not be asked.
    """
    run_slurm(["scancel", *_only(name, record), "--batch", "--signal=USR2", job.job_id], environ=environ)


def _only(name: str, record: RunRecord) -> list[str]:
    assert record.job_tag is not None
    return [f"--user={pwd.getpwuid(os.getuid()).pw_name}", f"--name={job_name(name, record.job_tag)}"]

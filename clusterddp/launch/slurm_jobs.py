"""A job of ours in Slurm's queue, found and ended by its name: the number alone is never trusted."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping

from clusterddp.errors import SlurmError
from clusterddp.slurm.commands import run_slurm

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
"""Between attempts to ask a controller that does not answer: a minute in all."""


def find_job(name: str, environ: Mapping[str, str]) -> str | None:
    """Ask the queue for the number of the job of this name, ended ones included as long as Slurm remembers them.

    Raises: SlurmError: it could not be asked.
    """
    query = ["squeue", "--noheader", "--states=all", f"--user={user()}", f"--name={name}", "--format=%A %j"]
    lines = run_slurm(query, environ=environ).splitlines()
    numbers = [line.split()[0] for line in lines if line.split()[1:] == [name]]
    return min(numbers, key=int) if numbers else None


def settle(name: str, environ: Mapping[str, str], *, num_looks: int) -> str | None:
    """Look for a job that may be in the queue; None when it is not there in so many looks, which are a while apart.

    Raises: SlurmError: the controller did not answer for a minute.
    """
    looks = 0
    for pause_s in (*_PAUSES_S, None):
        try:
            number = find_job(name, environ)
            looks += 1
            if number is not None or looks >= num_looks:
                return number
        except SlurmError as error:
            if not error.transient or pause_s is None:
                raise
        time.sleep(pause_s or 0.0)
    return None


def cancel_job(name: str, job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a job if it still has this name: Slurm may have given its number to somebody else's.

    Raises: SlurmError: it could not be asked.
    """
    run_slurm(["scancel", f"--user={user()}", f"--name={name}", job_id], environ=environ)


def ask_to_save(name: str, job_id: str, environ: Mapping[str, str]) -> None:
    """Signal a job's batch process, which asks the ranks for a checkpoint and the end.

    Raises: SlurmError: it could not be asked.
    """
    argv = ["scancel", f"--user={user()}", f"--name={name}", "--batch", "--signal=USR2", job_id]
    run_slurm(argv, environ=environ)


def user() -> str:
    """Return the name of the user whose jobs these are."""
    return pwd.getpwuid(os.getuid()).pw_name

"""What the controller says of one job of ours that runs, and the order to start it again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.slurm.commands import run_slurm

_UNKNOWN_JOB = "invalid job id"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobNow:
    """One job, as `scontrol show job` tells it."""

    name: str
    state: str
    """Slurm's own word; COMPLETING hides what a job has become until its last process has gone."""
    reason: str
    restarts: int
    """How often Slurm has started it again. Grows at once when it is requeued, while its processes still end."""
    preempted: bool
    """It is being preempted: it has been warned, or is being ended."""

    @property
    def ends(self) -> bool:
        """Its processes are being ended, or have been."""
        return self.state not in {"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING"}


def show_job(job_id: str, environ: Mapping[str, str]) -> JobNow | None:
    """Ask the controller for a job; None when it does not know it (any more).

    Raises: SlurmError: it could not be asked.
    """
    try:
        text = run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ)
    except SlurmError as error:
        if _UNKNOWN_JOB in error.message.lower():
            return None
        raise
    return read_job(text)


def requeue_job(job_id: str, environ: Mapping[str, str]) -> None:
    """Have Slurm end the job and start it again.

    Raises: SlurmError: it refuses (the job may not be requeued, or is already), or could not be asked.
    """
    run_slurm(["scontrol", "requeue", job_id], environ=environ)


def read_job(text: str) -> JobNow:
    """Read one line of `scontrol show job -o`.

    Raises: SlurmError: it is none.
    """
    # The name comes first, and anything may stand in it.
    name, found, rest = text.partition(" UserId=")
    state = _field("JobState", rest)
    if not found or not state:
        raise SlurmError(f"scontrol: show job: not understood: {text[:200].strip()}", transient=True)
    restarts = _field("Restarts", rest)
    return JobNow(
        name=name.partition("JobName=")[2],
        state=state,
        reason=_field("Reason", rest),
        restarts=int(restarts) if restarts.isdecimal() and len(restarts) <= 9 else 0,
        preempted=_field("PreemptTime", rest) not in {"", "None", "Unknown"},
    )


def _field(name: str, text: str) -> str:
    match = re.search(rf"\s{name}=(\S*)", text)
    return match[1] if match else ""

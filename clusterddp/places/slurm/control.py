"""One running job: its state and time left in the controller (`scontrol show job`), and its requeue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import run_slurm

END_TIME = "SLURM_JOB_END_TIME"
"""The variable in which tasks of Slurm 23.02 and newer find the end of their job, in seconds since the epoch."""
KILL_WAIT_S = 30.0
"""Slurm's default of KillWait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobNow:
    """One job, as `scontrol show job` prints it."""

    name: str
    state: str
    """Slurm's own word; COMPLETING hides how a job has ended until its last process has exited."""
    reason: str
    restarts: int
    """How often Slurm has started it again. It grows at the requeue, while the processes still end."""
    preempted: bool
    """True: it is being preempted: Slurm has warned it, or ends it."""

    @property
    def ends(self) -> bool:
        """True when Slurm ends its processes, or has ended them."""
        return self.state not in {"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING"}


def show_job(job_id: str, environ: Mapping[str, str]) -> JobNow | None:
    """Ask the controller for a job; None when it has no such job, or no longer."""
    try:
        text = run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ)
    except SlurmError as error:
        if error.reason == "unknown job":
            return None
        raise
    return read_job(text)


def read_job(text: str) -> JobNow:
    """Read one line of `scontrol show job -o`."""
    # The name comes first, and may contain any text.
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


def read_time_left_s(text: str) -> float | None:
    """Read from `scontrol show job -o` how many seconds the job may still run; None: no limit, or not known.

    Both times are Slurm's: EndTime, and StartTime + RunTime for the time of the answer. EndTime also includes an
    extension, and a reservation that ends earlier.
    """
    start, end = _time("StartTime", text), _time("EndTime", text)
    run_s = read_duration_s(_field("RunTime", text))
    if start is None or end is None or run_s is None or _field("SuspendTime", text) not in {"", "None", "Unknown"}:
        limit_s = read_duration_s(_field("TimeLimit", text))
        return None if limit_s is None or run_s is None else limit_s - run_s
    return (end - start).total_seconds() - run_s


def read_duration_s(text: str) -> int | None:
    """Read `2-03:04:05`, `03:04:05` or `04:05` in seconds; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def read_kill_wait_s(text: str) -> float:
    """Read from `scontrol show config` the seconds between SIGTERM and SIGKILL."""
    match = re.search(r"^KillWait\s*=\s*(\d{1,9}) sec", text, re.M)
    return float(match[1]) if match else KILL_WAIT_S


def _time(name: str, text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(_field(name, text)).replace(tzinfo=None)  # all are in Slurm's own zone
    except ValueError:
        return None


def _field(name: str, text: str) -> str:
    match = re.search(rf"\s{name}=(\S*)", text)
    return match[1] if match else ""

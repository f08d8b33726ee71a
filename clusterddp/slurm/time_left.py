"""How long a job may still run, and how long Slurm waits before it kills, as scontrol tells it."""

from __future__ import annotations

import re
from datetime import datetime

END_TIME = "SLURM_JOB_END_TIME"
"""The variable in which tasks of Slurm 23.02 and newer find when their job ends, in seconds since the epoch."""
KILL_WAIT_S = 30.0
"""Slurm's default."""


def read_time_left_s(text: str) -> float | None:
    """Read from `scontrol show job -o` how many seconds the job may still run; None: there is no limit, or no word.

    Slurm's own clock on both sides: EndTime, and StartTime + RunTime for the moment of the answer. EndTime also knows
    of an extension and of a reservation that ends earlier.
    """
    start, end = _time("StartTime", text), _time("EndTime", text)
    run_s = read_duration_s(_field("RunTime", text))
    if start is None or end is None or run_s is None or _field("SuspendTime", text) not in {"", "None", "Unknown"}:
        limit_s = read_duration_s(_field("TimeLimit", text))
        return None if limit_s is None or run_s is None else limit_s - run_s
    return (end - start).total_seconds() - run_s


def read_duration_s(text: str) -> float | None:
    """Read `2-03:04:05`, `03:04:05` or `04:05`; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_kill_wait_s(text: str) -> float:
    """Read from `scontrol show config` how long processes have between SIGTERM and SIGKILL."""
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

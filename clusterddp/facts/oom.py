"""Processes that the kernel has killed for want of memory: those of this Slurm job, or of the whole host."""

from __future__ import annotations

import re
from pathlib import Path

from clusterddp.facts.limits import OWN_GROUPS, ROOT_GROUP, groups, read_memory_limit
from clusterddp.facts.memory import in_gib

_VMSTAT = Path("/proc/vmstat")
_JOB = re.compile(r"job_\d+")
"""The name of the group in which Slurm keeps a job's processes on a node."""


def count_oom_kills(own: Path = OWN_GROUPS, root: Path = ROOT_GROUP, vmstat: Path = _VMSTAT) -> int | None:
    """Count the killed processes of this Slurm job here, where its memory has a group; else the host's.

    None: the kernel does not say.
    """
    job = _job_group(own, root)
    if job is None:
        return _read_count(vmstat)
    # Version 2 counts what happens below a group, version 1 does not.
    files = [job / "memory.events"] if (job / "memory.events").exists() else sorted(job.rglob("memory.oom_control"))
    counts = [count for count in map(_read_count, files) if count is not None]
    return sum(counts) if counts else _read_count(vmstat)


def explain_oom_kill(before: int | None, own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> str | None:
    """Say that the kernel has killed for want of memory since `before` was counted; None: it has not."""
    if (count_oom_kills(own, root) or 0) <= (before or 0):
        return None
    limit = read_memory_limit(own, root)
    if _job_group(own, root) is None or limit is None:
        return "the kernel has killed a process on this host for want of memory"
    words = f"the kernel has killed a process of this job, which has used up its {in_gib(limit)} of memory on this host"
    return f"{words}; ask for more with resources.memory_gb"


def _job_group(own: Path, root: Path) -> Path | None:
    found = (group for group in groups("memory", own, root) if _JOB.fullmatch(group.name))
    return next((group for group in found if group.is_dir()), None)


def _read_count(file: Path) -> int | None:
    try:
        lines = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
        return int(lines["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None

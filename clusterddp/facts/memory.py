"""The limits of memory and CPU time by control groups, the free memory, and the kernel's kills for lack of memory.

The limits of a group and of all its parents apply to a process. Those of shared memory, open files and processes
explain an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from clusterddp.system.units import format_bytes

ROOT_GROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
_NO_LIMIT = 2**60
"""Version 1 writes a large number for no limit."""
_NAMES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a group, in version 2 and version 1: its limit and its usage."""
_SHARED_MEMORY = Path("/dev") / "shm"
_LIMITS = (
    (r"Too many open files|received 0 items of ancdata", resource.RLIMIT_NOFILE, "for a process"),
    (
        r"can't start new thread|pthread_create failed|Errno 11\]",
        resource.RLIMIT_NPROC,
        "processes and threads of a user",
    ),
)
_JOB = re.compile(r"job_\d+")
"""The name of the group in which Slurm keeps a job's processes on a node."""


def read_cpu_limit(own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> float | None:
    """Return how many cores' worth of time this process may use; None: no limit."""
    limits = []
    for text in _read_all("cpu", "cpu.max", own, root):
        quota, period = text.split()
        if quota != "max":
            limits.append(int(quota) / int(period))
    quotas = _read_all("cpu", "cpu.cfs_quota_us", own, root)
    periods = _read_all("cpu", "cpu.cfs_period_us", own, root)
    limits += [int(quota) / int(period) for quota, period in zip(quotas, periods, strict=False) if int(quota) > 0]
    return min(limits, default=None)


def read_memory_limit(own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> int | None:
    """Return how many bytes the processes of this group may use; None: no limit."""
    texts = [*_read_all("memory", "memory.max", own, root), *_read_all("memory", "memory.limit_in_bytes", own, root)]
    return min((int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT), default=None)


def free_bytes(meminfo: Path = _MEMINFO, own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> int | None:
    """Return how many bytes can be allocated before the kernel swaps or kills; None: unknown."""
    free = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for group in _groups("memory", own, root):
        for limit, usage in _NAMES:
            # The file of a group without a limit has "max", or is missing.
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                free.append(most - int((group / usage).read_text()) + _reclaimable(group))
    return max(0, min(free)) if free else None


def count_oom_kills(own: Path = OWN_GROUPS, root: Path = ROOT_GROUP, vmstat: Path = _VMSTAT) -> int | None:
    """Count the processes killed for lack of memory: of this Slurm job if it has a memory group, else of the host.

    None: the kernel has no count.
    """
    job = _job_group(own, root)
    if job is None:
        return _read_count(vmstat)
    # Version 2 counts what happens below a group, version 1 does not.
    files = [job / "memory.events"] if (job / "memory.events").exists() else sorted(job.rglob("memory.oom_control"))
    counts = [count for count in map(_read_count, files) if count is not None]
    return sum(counts) if counts else _read_count(vmstat)


def explain_oom_kill(before: int | None, own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> str | None:
    """Return a sentence if the kernel has killed a process for lack of memory since the count `before`, else None."""
    if (count_oom_kills(own, root) or 0) <= (before or 0):
        return None
    limit = read_memory_limit(own, root)
    if _job_group(own, root) is None or limit is None:
        return "the kernel has killed a process on this host for lack of memory"
    return (
        f"the kernel has killed a process of this job, which has used up its {format_bytes(limit)} of memory on this "
        "host; ask for more with resources.memory_gb"
    )


def explain_limit(error: str) -> str:
    """Return this host's own limit where an error is of shared memory, open files or processes; else nothing."""
    if re.search(r"shared memory|unable to mmap \d+ bytes|SIGBUS", error) and "open files" not in error:
        with contextlib.suppress(OSError):
            found = os.statvfs(_SHARED_MEMORY)
            return f"{_SHARED_MEMORY} of this host has {format_bytes(found.f_blocks * found.f_frsize)}"
    for pattern, kind, what in _LIMITS:
        if re.search(pattern, error) and (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return f"the limit on this host is {limit} {what}"
    return ""


def _read_all(controller: str, name: str, own: Path, root: Path) -> Iterator[str]:
    """Read a setting of this process's group and of its parents."""
    for group in _groups(controller, own, root):
        with contextlib.suppress(OSError):
            yield (group / name).read_text().strip()


def _groups(controller: str, own: Path, root: Path) -> Iterator[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(top))


def _reclaimable(group: Path) -> int:
    """Return how many bytes of a group's usage are file pages, which the kernel drops when it needs memory."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(lines.get(f"total_{name}", lines.get(name, "0"))) for name in ("inactive_file", "active_file"))
    return 0


def _job_group(own: Path, root: Path) -> Path | None:
    found = (group for group in _groups("memory", own, root) if _JOB.fullmatch(group.name))
    return next((group for group in found if group.is_dir()), None)


def _read_count(file: Path) -> int | None:
    try:
        lines = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
        return int(lines["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None

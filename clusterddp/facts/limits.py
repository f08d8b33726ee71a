"""What the control groups of this process allow it, and all groups above it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT_GROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""Of version 1, which has no word for it."""


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
    """Return how many bytes this process and those beside it may use; None: no limit."""
    texts = [*_read_all("memory", "memory.max", own, root), *_read_all("memory", "memory.limit_in_bytes", own, root)]
    return min((int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT), default=None)


def _read_all(controller: str, name: str, own: Path, root: Path) -> Iterator[str]:
    """Read a setting of this process's group, and of those above it."""
    for group in groups(controller, own, root):
        with contextlib.suppress(OSError):
            yield (group / name).read_text().strip()


def groups(controller: str, own: Path, root: Path) -> Iterator[Path]:
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

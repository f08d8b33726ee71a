"""How much memory is free for a process here: what the machine has left, and what the control groups leave of that."""

from __future__ import annotations

import contextlib
from pathlib import Path

from clusterddp.facts.limits import OWN_GROUPS, ROOT_GROUP, groups

_MEMINFO = Path("/proc/meminfo")
_NAMES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of a group, in version 2 and version 1: its limit, and what it has charged."""


def free_bytes(meminfo: Path = _MEMINFO, own: Path = OWN_GROUPS, root: Path = ROOT_GROUP) -> int | None:
    """Return how many bytes may be allocated before something has to be killed or swapped; None: nothing says it."""
    free = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for group in groups("memory", own, root):
        for limit, usage in _NAMES:
            # A group without a limit says "max", or nothing.
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                free.append(most - int((group / usage).read_text()) + _reclaimable(group))
    return max(0, min(free)) if free else None


def in_gib(num_bytes: float) -> str:
    """Write bytes as people read them: 1.5 GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _reclaimable(group: Path) -> int:
    """Return how much of what is charged to a group are pages of files, which the kernel drops when it needs room."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(lines.get(f"total_{name}", lines.get(name, "0"))) for name in ("inactive_file", "active_file"))
    return 0

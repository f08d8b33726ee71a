"""Whether other machines can see a directory: told from the file system that it lies on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import UsageError

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "devpts", "proc", "sysfs", "hugetlbfs", "mqueue", "cgroup2"})
_SHARED = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "afs", "orangefs", "pvfs2",
        "panfs", "wekafs", "gfs2", "ocfs2", "9p", "virtiofs", "glusterfs", "quobyte", "dvs", "vast",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Where a directory lies."""

    point: str
    kind: str

    @property
    def shared(self) -> bool:
        """True where machines share the file system; False says nothing: a server sees its own disk as local."""
        return self.kind in _SHARED or self.kind.startswith("fuse.")

    @property
    def in_memory(self) -> bool:
        """It is gone when the machine is, and no other machine sees it."""
        return self.kind in _IN_MEMORY


def check_shared(directory: Path, what: str, hint: str) -> tuple[str, ...]:
    """Return notes about a directory that the nodes of a job have to see.

    Raises: UsageError: it is in the memory of this machine.
    """
    mount = find_mount(directory)
    if mount is None or mount.shared:
        return ()
    if mount.in_memory:
        raise UsageError(
            f"{directory}: lies on {mount.kind} ({mount.point}), in the memory of this machine; {what} must be where "
            "the nodes of the job see it",
            hint=hint,
        )
    return (f"{directory} lies on {mount.kind} ({mount.point}): the job's nodes must see the same directory there",)


def find_mount(directory: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """Find what is mounted where a directory lies, or will lie; None where that cannot be told."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = directory.resolve()
    best: Mount | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # Of several mounts on one point the last one is seen.
        if place.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point=point, kind=after.split()[0])
    return best

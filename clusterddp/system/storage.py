"""The storage that a directory is on: whether other machines see it, and how long a process waits while it is away."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.system.timeouts import HOST_SILENCE_S

_T = TypeVar("_T")
_RETRY_S = 0.25
_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EEXIST})
"""Answers of a file system that is there. Anything else that a run's own files meet is an outage: ENOENT, ESTALE, EIO,
ENOTCONN, ETIMEDOUT."""
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


class _Wait:
    timeout_s = HOST_SILENCE_S


def set_storage_timeout(host_silence_s: float | None) -> None:
    """Set how long this process waits for storage that is away: as long as the run that it serves waits for hosts."""
    _Wait.timeout_s = HOST_SILENCE_S if host_silence_s is None else host_silence_s


def storage_timeout_s() -> float:
    """Return how long this process waits for storage that is away: a server that restarts, a mount that comes back."""
    return _Wait.timeout_s


def is_outage(error: Exception) -> bool:
    """Say whether an error about a file that was there means that its storage is away for now."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None and cause.errno not in _REFUSALS


def retry_outage(action: Callable[[], _T], timeout_s: float | None = None) -> _T:
    """Do something with the files of a run; while their storage is away, try again, as long as `storage_timeout_s`.

    Raises: ClusterddpError, OSError: what the last try did.
    """
    deadline = time.monotonic() + (_Wait.timeout_s if timeout_s is None else timeout_s)
    while True:
        try:
            return action()
        except (ClusterddpError, OSError) as error:
            if not is_outage(error) or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)


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

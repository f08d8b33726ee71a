"""The storage of a directory: whether other machines share it, and how long a process retries during an outage.

The timeouts after which a host or a process counts as lost stand here, too: an outage may last as long.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from clusterddp.errors import ClusterddpError, UsageError

HOST_SILENCE_S = 30.0
"""network.host_silence: longer than a spanning tree, the restart of a switch or the failover of a bond takes."""
HEARTBEAT_TIMEOUT_S = 60.0
"""network.heartbeat_timeout: longer than a process usually waits for a file server."""


_T = TypeVar("_T")
_RETRY_S = 0.25
_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EEXIST})
"""Errors of a file system that works. For a run's own files any other error is an outage: ENOENT, ESTALE, EIO,
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
    """The file system of a directory."""

    point: str
    kind: str

    @property
    def shared(self) -> bool:
        """True if machines share the file system; False is not certain, since a server sees its own disk as local."""
        return self.kind in _SHARED or self.kind.startswith("fuse.")

    @property
    def in_memory(self) -> bool:
        """True if it is lost when the machine stops, and no other machine sees it."""
        return self.kind in _IN_MEMORY


class _Wait:
    timeout_s = HOST_SILENCE_S


def set_storage_timeout(host_silence_s: float | None) -> None:
    """Set how long this process retries during an outage of storage: `host_silence_s` of its run."""
    _Wait.timeout_s = HOST_SILENCE_S if host_silence_s is None else host_silence_s


def storage_timeout_s() -> float:
    """Return how long this process retries during an outage of storage, such as the restart of a file server."""
    return _Wait.timeout_s


def is_outage(error: Exception) -> bool:
    """Return whether an error about an existing file means an outage of its storage."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None and cause.errno not in _REFUSALS


def retry_outage(action: Callable[[], _T], timeout_s: float | None = None) -> _T:
    """Call `action`, which uses the files of a run; retry during an outage, by default for `storage_timeout_s`.

    Raises: ClusterddpError, OSError: the error of the last try.
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
    """Return notes about a directory that all nodes of a job must share.

    Raises: UsageError: it is in the memory of this machine.
    """
    mount = find_mount(directory)
    if mount is None or mount.shared:
        return ()
    if mount.in_memory:
        raise UsageError(
            f"{directory}: is on {mount.kind} ({mount.point}), in the memory of this machine; {what} must be where "
            "the nodes of the job see it",
            hint=hint,
        )
    return (f"{directory} is on {mount.kind} ({mount.point}): the job's nodes must see the same directory there",)


def find_mount(directory: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """Find the mount of a directory, which need not exist yet; None if it cannot be found out."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = directory.resolve()
    best: Mount | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        # Of several mounts at one point the last one is visible.
        if place.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point=point, kind=after.split()[0])
    return best

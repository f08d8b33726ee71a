"""Where on this host files are to go, and what its disk says to that."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.system.tree import show


def find_place(target: str) -> Path:
    """Say which directory a target means here: `~` is the home, and so is what a relative one begins from.

    Raises: ClusterddpError: it names somebody's home that is not known here.
    """
    try:
        return Path(os.path.realpath(Path.home() / Path(target).expanduser()))
    except (RuntimeError, ValueError) as error:
        raise ClusterddpError(f"{target}: names no place on this host: {error}") from error


def find_existing(place: Path) -> Path:
    """Find the directory nearest to a place that is there."""
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


@contextlib.contextmanager
def refusing_disk(place: Path, needed_bytes: int) -> Iterator[None]:
    """Say in words what the disk refuses; before anything is written, if it can be seen to be too small.

    Raises: ClusterddpError.
    """
    existing = find_existing(place)
    try:
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        if needed_bytes > free and disk.f_blocks:  # some file systems do not say how large they are
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        raise _explain(error, place, existing, needed_bytes) from error


def _explain(error: OSError, place: Path, existing: Path, needed_bytes: int) -> ClusterddpError:
    where = show(os.fsencode(place))
    if error.errno == errno.ENOSPC:
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        needed = f", {needed_bytes / 1e6:.1f} MB are needed" if needed_bytes else ""
        return ClusterddpError(
            f"{where}: the disk is full: {free / 1e6:.1f} MB are free{needed}",
            hint="clusterddp gc removes what old runs left on hosts; ssh.dir and the targets of ssh.send name places",
        )
    if error.errno == errno.EDQUOT:
        return ClusterddpError(f"{where}: your quota is used up", hint="`quota -s` there shows it")
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    hint = "another place, for example below ~, may be named in the spec: ssh.send, ssh.dir" if refused else None
    at = show(os.fsencode(error.filename)) if isinstance(error.filename, str | bytes) else where
    return ClusterddpError(f"{at}: {error.strerror or error}", hint=hint)

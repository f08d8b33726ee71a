"""Storage on this host: the place of a target, why a disk refuses files, the staging directory of an upload."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.system.file_set import show

PREFIX = ".clusterddp-incoming-"
_LOCK = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORGOTTEN_AFTER_S = 3600.0
"""Age from which one is removed when its writer cannot be checked: on another host, or without file locks."""


def find_place(target: str) -> Path:
    """Return the directory of a target: `~` is the home, and a relative one begins there.

    Raises: ClusterddpError: it names the home of a user that is not known here.
    """
    try:
        return Path(os.path.realpath(Path.home() / Path(target).expanduser()))
    except (RuntimeError, ValueError) as error:
        raise ClusterddpError(f"{target}: names no place on this host: {error}") from error


def find_existing(place: Path) -> Path:
    """Return the place, or its nearest parent that exists."""
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


@contextlib.contextmanager
def refusing_disk(place: Path, needed_bytes: int) -> Iterator[None]:
    """Explain errors of the disk; check its free space before anything is written.

    Raises: ClusterddpError.
    """
    existing = find_existing(place)
    try:
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        if needed_bytes > free and disk.f_blocks:  # some file systems do not report their size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        raise _explain(error, place, existing, needed_bytes) from error


@contextlib.contextmanager
def staging(beside: Path) -> Iterator[Path]:
    """Make an empty directory on the file system of `beside`, and remove it with its content at the end.

    Its writer holds a lock in it, by which the next writer recognises and removes the directory of a killed one.
    """
    remove_abandoned(beside)
    place = beside / f"{PREFIX}{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    descriptor = -1
    try:
        descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, _boot_id())  # from now on the lock shows whether the writer is alive
        tree = place / "tree"
        tree.mkdir()  # by the umask: it may become a directory that others read
        yield tree
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned(beside: Path) -> None:
    """Remove staging directories of this user's writers that no longer run."""
    uid = os.getuid()
    with contextlib.suppress(OSError):
        for entry in os.scandir(beside):
            if not entry.name.startswith(PREFIX) or entry.stat(follow_symlinks=False).st_uid != uid:
                continue
            if _is_abandoned(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(place: Path) -> bool:
    with contextlib.suppress(OSError), open(place / _LOCK, "rb+") as lock:
        if lock.read() == _boot_id():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True
    with contextlib.suppress(OSError):
        return time.time() - place.stat().st_mtime > _FORGOTTEN_AFTER_S
    return False


def _boot_id() -> bytes:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_bytes()
    return b"?"


def _explain(error: OSError, place: Path, existing: Path, needed_bytes: int) -> ClusterddpError:
    where = show(os.fsencode(place))
    if error.errno == errno.ENOSPC:
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        needed = f", {needed_bytes / 1e6:.1f} MB are needed" if needed_bytes else ""
        return ClusterddpError(
            f"{where}: the disk is full: {free / 1e6:.1f} MB are free{needed}",
            hint="clusterddp gc removes what old runs left on hosts; ssh.dir and ssh.send may name other places",
        )
    if error.errno == errno.EDQUOT:
        return ClusterddpError(f"{where}: your quota is used up", hint="`quota -s` there shows it")
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    hint = "another place, for example below ~, may be named in the spec: ssh.send, ssh.dir" if refused else None
    at = show(os.fsencode(error.filename)) if isinstance(error.filename, str | bytes) else where
    return ClusterddpError(f"{at}: {error.strerror or error}", hint=hint)

"""Directories in which files gather before they are seen: whatever ends the writer, what it left is recognised."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".clusterddp-incoming-"
_LOCK = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORGOTTEN_AFTER_S = 3600.0
"""When one is removed whose writer cannot be asked for: it is on another host, or the file system has no locks."""


@contextlib.contextmanager
def staging(beside: Path) -> Iterator[Path]:
    """Give an empty directory on the file system of `beside`; what is in it at the end is removed.

    It has a locked file for as long as it is written to, so that a killed writer's is told from a living one's.
    """
    remove_abandoned(beside)
    place = beside / f"{PREFIX}{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    descriptor = -1
    try:
        descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, _boot_id())  # from now on the lock says whether the writer is alive
        tree = place / "tree"
        tree.mkdir()  # as the umask says: it may become a directory that others read
        yield tree
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned(beside: Path) -> None:
    """Remove what dead writers of this user left here."""
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

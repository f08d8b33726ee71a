"""Give a file a name that no file has yet: of several writers, on several hosts, the first one wins.

link(2) does it on file systems with hard links. Without them (vfat, cifs, many FUSE file systems), renameat2(2) with
RENAME_NOREPLACE does. Without either, a lock on a file beside it does, if the file system passes locks to the other
hosts. docs/storage.md lists what that guarantees on which file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Literal

Method = Literal["link", "rename", "lock"]
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_UNSUPPORTED = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.ENOTTY})


def name_new(temporary: str, path: Path) -> bool:
    """Give a complete temporary file, in the same directory, its name; False: another writer has taken the name.

    The temporary name may be left as a second name; the caller removes it.
    """
    return _name_new(temporary, path)[0]


def probe_exclusive(directory: Path) -> Method:
    """Find out by a test which method works in this directory; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=directory) as place:
        temporary = Path(place, "temporary")
        temporary.touch()
        return _name_new(str(temporary), Path(place, "name"))[1]


def _name_new(temporary: str, path: Path) -> tuple[bool, Method]:
    try:
        return _link(temporary, path), "link"
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    try:
        return _rename_noreplace(temporary, path), "rename"
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return _rename_locked(temporary, path), "lock"


def _link(temporary: str, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then finds the link that it made before. Source: open(2).
        return os.stat(temporary).st_nlink > 1
    return True


def _rename_noreplace(temporary: str, path: Path) -> bool:
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:  # another C library than glibc, or an old one
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    raise OSError(number, os.strerror(number), str(path))


def _rename_locked(temporary: str, path: Path) -> bool:
    """Rename under a lock, which the kernel releases when its holder dies. The empty file of the lock stays."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.lexists(path):
            return False
        os.replace(temporary, path)
        return True
    finally:
        os.close(descriptor)

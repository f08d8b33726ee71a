"""Directories of this user: listed, measured, and removed. No symbolic link is followed.

A directory that is removed is renamed to `.removing-*`, checked once more, renamed to `.removed-*` and deleted: a
removal that is killed leaves nothing half under a name that anybody reads, and `finish_removals` deletes the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clusterddp.system.files import sync_directory
from clusterddp.system.own_directory import find_fault

REMOVED = ".removed-"
_REMOVING = ".removing-"
_ABANDONED_AFTER_S = 600.0
"""A removal that has not come further for so long was killed."""


def state_directory() -> Path:
    """Return the user's directory for what outlives commands: that of platformdirs, which not every host has."""
    return Path(os.environ.get("XDG_STATE_HOME", "").strip() or "~/.local/state").expanduser() / "clusterddp"


def own_directories(folder: Path) -> list[Path]:
    """List this user's directories in a folder; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(path for path in found if _is_ours(path))


def walk_files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a directory: the folder of each, and its status."""
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                yield folder, os.lstat(os.path.join(folder, name))


def unchanged_s(path: Path) -> float:
    """Return the seconds since the last change of a file or directory; infinite if it does not exist."""
    try:
        return max(0.0, time.time() - os.lstat(path).st_mtime)
    except FileNotFoundError:
        return float("inf")


def remove_directory(
    path: Path, *, hide_in: Path | None = None, check: Callable[[Path], bool] = lambda hidden: True
) -> bool:
    """Remove a directory; False: `check`, which gets its hidden path, has refused, and the directory is back.

    `hide_in`: the folder for its hidden name, on the same file system; by default its own.
    Raises: OSError: the file system refuses; what it refuses to delete stays hidden.
    """
    folder = hide_in or path.parent
    suffix = f"{path.name}-{secrets.token_hex(4)}"
    hidden = path.rename(folder / f"{_REMOVING}{suffix}")
    if not check(hidden):
        hidden.rename(path)
        return False
    removed = hidden.rename(folder / f"{REMOVED}{suffix}")
    sync_directory(folder)  # else a power cut might undo the rename of a directory that is half deleted
    _delete(removed)
    return True


def find_remnants(folder: Path) -> list[Path]:
    """List what removals that were killed have left in a folder; none where others can give a run such a name."""
    if find_fault(folder) is not None:
        return []
    hidden = [path for path in own_directories(folder) if is_hidden(path)]
    return [path for path in hidden if path.name.startswith(REMOVED) or _is_abandoned(path)]


def finish_removals(folder: Path) -> None:
    """Delete what removals that were killed have left in a folder."""
    for path in find_remnants(folder):
        with contextlib.suppress(OSError):
            _delete(path)


def is_hidden(path: Path) -> bool:
    """Return whether a directory has the hidden name of one that is being removed."""
    return path.name.startswith((REMOVED, _REMOVING))


def _delete(path: Path) -> None:
    """Delete a directory with read-only ones in it, also while another process deletes it.

    Raises: OSError: it cannot be deleted, or is a link.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(FileNotFoundError):
            if not os.lstat(folder).st_mode & stat.S_IWUSR:
                Path(folder).chmod(0o700)
    while True:
        try:
            shutil.rmtree(path)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return


def _is_ours(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _is_abandoned(path: Path) -> bool:
    try:
        return time.time() - os.lstat(path).st_ctime > _ABANDONED_AFTER_S
    except FileNotFoundError:
        return False

"""Removes ended runs from a runs directory, and snapshots of code to which no run there links.

A directory is renamed to `.removing-*`, checked once more, renamed to `.removed-*` and deleted: a removal that is
killed leaves no half run that is listed, and the next one deletes the rest. No symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import STORE_NAME, SWEEP_RECORD, RunDir
from clusterddp.run.snapshot import store_of
from clusterddp.run.usage import measure
from clusterddp.system.files import is_file, sync_directory

_REMOVING = ".removing-"
_REMOVED = ".removed-"
_ABANDONED_AFTER_S = 600.0
"""A removal that has not come further for so long was killed."""
CODE_GRACE_S = 3600.0
"""A snapshot that was made or used within this time may be that of a submit under way."""
_NO_LINK = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One snapshot of code in the store of a runs directory."""

    path: Path
    size: int
    unused: bool
    """No run links to it, and no submit under way may need it."""


def fingerprint(place: Path) -> tuple[object, ...]:
    """Return what changes when a run, or a run or the queue of a sweep, is started again."""
    members = [RunDir(path) for path in _directories(place) if is_file(RunDir(path).record)]
    files = [RunDir(place).record, place / "queue.json", *(member.record for member in members)]
    attempts = [attempt.number for run in (RunDir(place), *members) for attempt in run.attempts()]
    return (*(os.stat(file).st_mtime_ns if is_file(file) else None for file in files), *attempts)


def hide_place(path: Path, runs_dir: Path, *, seen: tuple[object, ...]) -> Path:
    """Rename the directory of a run or sweep that is to be deleted; `seen`: its fingerprint when it had ended.

    Raises: UsageError: it is not a directory of `runs_dir`, or has been started again. ClusterddpError: the file
    system refuses.
    """
    check_inside(path, runs_dir)
    hidden = runs_dir / f"{_REMOVING}{path.name}-{secrets.token_hex(4)}"
    try:
        path.rename(hidden)
        if fingerprint(hidden) != seen:
            hidden.rename(path)
            raise UsageError(f"{path.name}: has been started again, and was not removed")
        return _mark_removed(hidden)
    except OSError as error:
        raise _refusal(path.name, error) from error


def delete_places(hidden: Mapping[str, Path], runs_dir: Path) -> dict[str, ClusterddpError]:
    """Delete hidden directories; return, by the name of the run or sweep, why one is not deleted whole."""
    failed: dict[str, ClusterddpError] = {}
    sync_directory(runs_dir)  # else a power cut might undo the rename of a directory that is half deleted
    for name, path in hidden.items():
        try:
            delete_tree(path)
        except OSError as error:
            failed[name] = _refusal(name, error)
    return failed


def check_inside(path: Path, runs_dir: Path) -> None:
    """Check that a path is a directory of `runs_dir`, or of a sweep there, and that no part of it is a link.

    Raises: UsageError: it is not.
    """
    if path.is_symlink() or (path.parent.is_symlink() and not _same(path.parent, runs_dir)):
        raise UsageError(
            f"{path}: is a symbolic link, to {path.resolve()}", hint="remove the link and its target by hand"
        )
    folder = path.parent.parent if is_file(path.parent / SWEEP_RECORD) else path.parent
    if not _same(folder, runs_dir):
        raise UsageError(f"{path.name} is not in {runs_dir}", hint=f"--runs {folder} names its directory")


def finish_removals(runs_dir: Path) -> None:
    """Delete what removals that were killed have left."""
    for folder in (runs_dir, store_of(runs_dir)):
        for path in remnants(folder):
            with contextlib.suppress(OSError):
                delete_tree(path)


def remnants(folder: Path) -> list[Path]:
    """List this user's directories of removals that were killed."""
    hidden = [path for path in _directories(folder) if path.name.startswith((_REMOVED, _REMOVING))]
    return [path for path in hidden if path.name.startswith(_REMOVED) or _unchanged_s(path) > _ABANDONED_AFTER_S]


def find_snapshots(runs_dir: Path, *, without: Collection[Path] = ()) -> list[Snapshot]:
    """List this user's snapshots; `without`: as if these runs and sweeps were removed.

    Raises: OSError: not every run can be looked at.
    """
    linked = set(_linked(runs_dir, frozenset(without)))
    return [
        Snapshot(path=path, size=measure(path), unused=path.name not in linked and _age_s(path) >= CODE_GRACE_S)
        for path in _directories(store_of(runs_dir))
        if not path.name.startswith((_REMOVED, _REMOVING))
    ]


def remove_snapshots(snapshots: Collection[Snapshot], runs_dir: Path) -> list[Snapshot]:
    """Remove snapshots that are still unused; return those that were removed."""
    removed = []
    for snapshot in snapshots:
        path = snapshot.path
        hidden = path.with_name(f"{_REMOVING}{path.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            # A submit that takes a snapshot from the store sets its time first, and makes a new one if it is away.
            if _age_s(hidden) < CODE_GRACE_S or path.name in set(_linked(runs_dir, frozenset())):
                with contextlib.suppress(OSError):
                    hidden.rename(path)
                continue
            delete_tree(_mark_removed(hidden))
            removed.append(snapshot)
    return removed


def delete_tree(path: Path) -> None:
    """Delete a directory with read-only ones in it, also while another process deletes it.

    Raises: OSError: it cannot be deleted, or is a link; none is followed.
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


def _mark_removed(hidden: Path) -> Path:
    """Rename a hidden directory for the last time: from now on it may be deleted, here or by a later removal."""
    return hidden.rename(hidden.with_name(hidden.name.replace(_REMOVING, _REMOVED, 1)))


def _refusal(name: str, error: OSError) -> ClusterddpError:
    return ClusterddpError(f"{name}: cannot be removed: {error.filename}: {error.strerror}")


def _linked(runs_dir: Path, without: frozenset[Path]) -> Iterator[str]:
    """Yield the names of the snapshots to which runs, sweeps and submits under way link."""
    for entry in os.scandir(runs_dir):
        path = Path(entry.path)
        if entry.name.startswith((STORE_NAME, _REMOVED)) or path in without or not entry.is_dir():
            continue
        try:
            inner = [Path(each.path) for each in os.scandir(path) if each.is_dir(follow_symlinks=False)]
        except PermissionError:
            if entry.stat().st_uid == os.geteuid():
                raise
            continue  # another user's run has its code in that user's store
        except FileNotFoundError:
            continue
        for place in (path, *inner):
            if place not in without:
                yield from filter(None, map(_name_of, (RunDir(place).snapshot, RunDir(place).code)))


def _name_of(link: Path) -> str | None:
    try:
        return link.readlink().name
    except OSError as error:
        if error.errno in _NO_LINK:
            return None
        raise


def _directories(folder: Path) -> list[Path]:
    """List this user's directories in a folder, without symbolic links."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(path for path in found if _is_ours(path))


def _is_ours(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _age_s(path: Path) -> float:
    return time.time() - os.lstat(path).st_mtime


def _unchanged_s(path: Path) -> float:
    """Return the seconds since a directory was renamed or changed."""
    try:
        return time.time() - os.lstat(path).st_ctime
    except FileNotFoundError:
        return 0.0

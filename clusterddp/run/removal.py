"""Removes ended runs from a runs directory, and snapshots of code to which no run there links."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.code import store_of
from clusterddp.run.directory import STORE_NAME, SWEEP_RECORD, RunDir
from clusterddp.run.usage import measure
from clusterddp.system.directories import REMOVED, is_hidden, own_directories, remove_directory, unchanged_s
from clusterddp.system.files import is_file

CODE_GRACE_S = 3600.0
"""A snapshot that was made or used within this time may be that of a submit under way."""
_NO_LINK = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One snapshot of code in the store of a runs directory."""

    path: Path
    size: int


def fingerprint(place: Path) -> tuple[object, ...]:
    """Return what changes when a run, or a run or the queue of a sweep, is started again."""
    members = [RunDir(path) for path in own_directories(place) if is_file(RunDir(path).record)]
    files = [RunDir(place).record, place / "queue.json", *(member.record for member in members)]
    attempts = [attempt.number for run in (RunDir(place), *members) for attempt in run.attempts()]
    return (*(os.stat(file).st_mtime_ns if is_file(file) else None for file in files), *attempts)


def remove_place(path: Path, runs_dir: Path, *, seen: tuple[object, ...]) -> None:
    """Remove the directory of a run or sweep; `seen`: its fingerprint when it had ended.

    Raises: UsageError: it is not a directory of `runs_dir`, or has been started again. ClusterddpError: the file
    system refuses.
    """
    check_inside(path, runs_dir)
    try:
        if not remove_directory(path, hide_in=runs_dir, check=lambda hidden: fingerprint(hidden) == seen):
            raise UsageError(f"{path.name}: has been started again, and was not removed")
    except OSError as error:
        raise ClusterddpError(f"{path.name}: cannot be removed: {error.filename}: {error.strerror}") from error


def check_inside(path: Path, runs_dir: Path) -> None:
    """Check that a path is a directory of `runs_dir`, or of a sweep there, and that no part of it is a link.

    Raises: UsageError: it is not.
    """
    if path.is_symlink() or (path.parent.is_symlink() and path.parent.resolve() != runs_dir.resolve()):
        raise UsageError(
            f"{path}: is a symbolic link, to {path.resolve()}", hint="remove the link and its target by hand"
        )
    folder = path.parent.parent if is_file(path.parent / SWEEP_RECORD) else path.parent
    if folder.resolve() != runs_dir.resolve():
        raise UsageError(f"{path.name} is not in {runs_dir}", hint=f"--runs {folder} names its directory")


def find_unused_snapshots(runs_dir: Path, *, without: Collection[Path] = ()) -> list[Snapshot]:
    """List this user's snapshots that no run and no submit under way needs; `without`: as if these were removed.

    Raises: OSError: not every run can be looked at.
    """
    linked = set(_linked(runs_dir, frozenset(without)))
    return [
        Snapshot(path=path, size=measure(path))
        for path in own_directories(store_of(runs_dir))
        if not is_hidden(path) and path.name not in linked and unchanged_s(path) >= CODE_GRACE_S
    ]


def remove_snapshots(snapshots: Collection[Snapshot], runs_dir: Path) -> list[Snapshot]:
    """Remove snapshots that are still unused; return those that were removed."""

    removed = []
    for snapshot in snapshots:
        with contextlib.suppress(OSError):
            if remove_directory(snapshot.path, check=partial(_is_unused, snapshot.path.name, runs_dir)):
                removed.append(snapshot)
    return removed


def _is_unused(name: str, runs_dir: Path, hidden: Path) -> bool:
    # A submit that takes a snapshot from the store sets its time first, and makes a new one if it is away.
    return unchanged_s(hidden) >= CODE_GRACE_S and name not in set(_linked(runs_dir, frozenset()))


def _linked(runs_dir: Path, without: frozenset[Path]) -> Iterator[str]:
    """Yield the names of the snapshots to which runs, sweeps and submits under way link."""
    for entry in os.scandir(runs_dir):
        path = Path(entry.path)
        if entry.name.startswith((STORE_NAME, REMOVED)) or path in without or not entry.is_dir():
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

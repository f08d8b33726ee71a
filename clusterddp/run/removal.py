"""What runs take on disk, how long they are kept, and their removal: in a runs directory, and on a host.

A runs directory contains runs, sweeps, and the store of the snapshots of code to which they link. On a host, the
directory of clusterddp contains `runs/<run>.<8 of its token>/`, `code/<sha256>/` and `packages/<sha256>/`. A run's own
copy of the code consists of hard links, so a snapshot whose files have no second link is unused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.ranks.environment import COOKIE
from clusterddp.run.attempts import read_end
from clusterddp.run.code import store_of
from clusterddp.run.directory import STORE_NAME, SWEEP_RECORD, RunDir
from clusterddp.system.directories import REMOVED, is_hidden, own_directories, remove_directory, unchanged_s, walk_files
from clusterddp.system.files import is_file
from clusterddp.system.own_directory import demand_own
from clusterddp.system.processes import find_carriers, read_environment

Kind = Literal["run", "code", "package", "remnant"]
CODE_GRACE_S = 3600.0
"""A snapshot that was made or used within this time may be that of a submit under way."""
_NO_LINK = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
_SLOWEST_TRANSFER_S = 86_400.0
"""A hidden directory that is older belongs to no running transfer."""
_KEEP = ".keep"
_SHARED: dict[str, Kind] = {"code": "code", "packages": "package"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Bytes on disk of one run, by what they are for."""

    checkpoints: int = 0
    logs: int = 0
    output: int = 0
    tensorboard: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.checkpoints + self.logs + self.output + self.tensorboard + self.other


def measure_run(run: RunDir) -> Usage:
    """Add up what a run has on disk; a file with several hard links counts once, and in `code` it is the snapshot's."""
    sizes = dict.fromkeys(("checkpoints", "logs", "output", "tensorboard", "other"), 0)
    kinds = {"checkpoints": "checkpoints", "output": "output", "tb": "tensorboard", "launcher": "logs"}
    counted: set[tuple[int, int]] = set()
    for folder, status in walk_files(run.path):
        parts = Path(folder).relative_to(run.path).parts
        if parts[:1] == (run.code.name,) and status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
            continue
        of_attempt = parts[:1] == ("attempts",) and parts[2:3] == ("logs",)
        kind = "logs" if of_attempt else kinds.get(parts[0], "other") if parts else "other"
        if (status.st_dev, status.st_ino) not in counted:
            sizes[kind] += status.st_blocks * 512
        if status.st_nlink > 1:
            counted.add((status.st_dev, status.st_ino))
    return Usage(**sizes)


def measure(path: Path) -> int:
    """Add up the bytes on disk below a directory."""
    return sum(status.st_blocks * 512 for _, status in walk_files(path))


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

    Raises: UsageError: it is not. ClusterddpError: another user can put another directory there.
    """
    if path.is_symlink() or (path.parent.is_symlink() and path.parent.resolve() != runs_dir.resolve()):
        raise UsageError(
            f"{path}: is a symbolic link, to {path.resolve()}", hint="remove the link and its target by hand"
        )
    folder = path.parent.parent if is_file(path.parent / SWEEP_RECORD) else path.parent
    if folder.resolve() != runs_dir.resolve():
        raise UsageError(f"{path.name} is not in {runs_dir}", hint=f"--runs {folder} names its directory")
    demand_own(folder)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One directory that can be removed."""

    place: str
    """Relative to clusterddp's directory: `runs/brisk-otter-3.3f9a12bc`."""
    kind: Kind
    """`remnant`: the files of an interrupted transfer."""
    age_s: float
    """Seconds since the run ended, or since the directory was made."""
    size: int
    """Bytes on disk that its removal frees, without files that have other hard links."""
    checkpoints: int = 0
    """The part of `size` that is checkpoints, which `resume` needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """The result of the removal of one directory."""

    place: str
    size: int
    error: str | None = None
    """Why it is still there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """The directories that can be removed, and the old runs that stay."""

    root: str
    removable: tuple[Stored, ...]
    unfinished: tuple[str, ...] = ()
    """Old runs without a recorded end here, as after a power cut; their owner decides."""


def find_stored(root: Path, *, older_than_s: float, in_use: Collection[str] = ()) -> Storage:
    """Find what can be removed; `in_use`: names of packages that stay at any age."""
    links: dict[tuple[int, int], int] = {}
    runs, unfinished = _old_runs(root, older_than_s, links)
    kept = {*in_use, *_packages_in_use()}
    others = [
        _stored(root, path, kind, size=measure(path))
        for folder, kind in _SHARED.items()
        for path in _directories(root / folder)
        if unchanged_s(path) >= older_than_s
        and not (path.name in kept or path.with_name(f"{path.name}{_KEEP}").exists())
        and not (kind == "code" and _is_linked(path, links))
    ]
    remnants = [
        _stored(root, path, "remnant", size=_disk_usage(path))
        for folder in ("runs", *_SHARED)
        for path in _directories(root / folder, hidden=True)
        if unchanged_s(path) >= max(older_than_s, _SLOWEST_TRANSFER_S)
    ]
    return Storage(root=str(root), removable=(*runs, *others, *remnants), unfinished=tuple(unfinished))


def remove_stored(
    root: Path, places: Collection[str], *, older_than_s: float | None, in_use: Collection[str] = ()
) -> list[Removed]:
    """Remove these directories, if they can still be removed; each is renamed first, so none is seen in part.

    `older_than_s` None: of ended runs, at any age.
    """
    if older_than_s is None:
        return [_remove_run(root, place) for place in places]
    removable = {each.place: each for each in find_stored(root, older_than_s=older_than_s, in_use=in_use).removable}
    removed = []
    for place in places:
        if place in removable:
            removed.append(_remove(root, place, removable[place].size))
        elif (root / place).exists():
            removed.append(Removed(place=place, size=0, error="is in use again"))
        else:  # another host that shares this storage has removed it
            removed.append(Removed(place=place, size=0))
    return removed


def keep_package(package: Path) -> None:
    """Mark a package to stay at any age: Slurm jobs import it on other hosts, at any later time."""
    package.with_name(f"{package.name}{_KEEP}").touch(mode=0o600)


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


def _remove_run(root: Path, place: str) -> Removed:
    """Remove the directory of one run, unless processes of it live here."""
    path = root / place
    if path not in _directories(root / "runs"):
        return Removed(place=place, size=0, error="is not your directory" if os.path.lexists(path) else None)
    if _token_of(path) in _tokens_alive():
        return Removed(place=place, size=0, error="processes of it are alive")
    return _remove(root, place, _disk_usage(path))


def _old_runs(root: Path, older_than_s: float, links: dict[tuple[int, int], int]) -> tuple[list[Stored], list[str]]:
    """Find the runs that ended that long ago, and runs of that age without a recorded end."""
    ended_runs: list[Stored] = []
    unfinished: list[str] = []
    alive = _tokens_alive()
    for path in _directories(root / "runs"):
        run = RunDir(path)
        try:
            attempts = run.attempts()
        except OSError:  # another host that shares this storage has just removed it
            continue
        newest = attempts[-1].path if attempts else path
        age_s = min(unchanged_s(path), unchanged_s(newest), unchanged_s(newest / "end.json"))
        if not run.record.is_file() or age_s < older_than_s or _token_of(path) in alive:
            continue
        if not _has_ended(run):
            unfinished.append(path.name)
            continue
        checkpoints = _disk_usage(run.checkpoints)
        ended_runs.append(
            _stored(root, path, "run", size=_disk_usage(path, links), checkpoints=checkpoints, age_s=age_s)
        )
    return ended_runs, sorted(unfinished)


def _has_ended(run: RunDir) -> bool:
    try:
        attempts = run.attempts()
        end = read_end(attempts[-1]) if attempts else None
    except (ClusterddpError, OSError, TypeError):
        return False
    return end is not None and not end.will_restart


def _stored(
    root: Path, path: Path, kind: Kind, *, size: int, checkpoints: int = 0, age_s: float | None = None
) -> Stored:
    age = unchanged_s(path) if age_s is None else age_s
    return Stored(place=str(path.relative_to(root)), kind=kind, age_s=round(age), size=size, checkpoints=checkpoints)


def _remove(root: Path, place: str, size: int) -> Removed:
    try:
        remove_directory(root / place)
    except FileNotFoundError:
        return Removed(place=place, size=0)
    except OSError as error:
        return Removed(place=place, size=0, error=f"{error.filename or root / place}: {error.strerror}")
    return Removed(place=place, size=size)


def _directories(folder: Path, *, hidden: bool = False) -> list[Path]:
    return [path for path in own_directories(folder) if path.name.startswith(".") == hidden]


def _disk_usage(path: Path, links: dict[tuple[int, int], int] | None = None) -> int:
    """Add up the bytes on disk below a directory, without files that have several hard links.

    `links`: counts, for each such file, its links below the directory.
    """
    total = 0
    for _, status in walk_files(path):
        if status.st_nlink > 1 and links is not None:
            inode = (status.st_dev, status.st_ino)
            links[inode] = links.get(inode, 0) + 1
        if status.st_nlink == 1:
            total += status.st_blocks * 512
    return total


def _is_linked(path: Path, links: dict[tuple[int, int], int]) -> bool:
    """Return whether a run that stays has hard links to the files of a snapshot."""
    return any(status.st_nlink - links.get((status.st_dev, status.st_ino), 0) > 1 for _, status in walk_files(path))


def _token_of(path: Path) -> str:
    """Return the first 8 characters of a run's token, the end of its directory's name."""
    return path.name.rpartition(".")[2]


def _tokens_alive() -> set[str]:
    return {cookie[:8] for cookie in _environments(COOKIE)}


def _packages_in_use() -> set[str]:
    """Return the names of the packages that live processes of runs import from."""
    paths = [path for text in _environments("PYTHONPATH") for path in text.split(os.pathsep)]
    return {Path(path).name for path in paths if Path(path).parent.name == "packages"}


def _environments(variable: str) -> list[str]:
    """Read a variable of every process of a run of this user."""
    carriers = find_carriers(COOKIE, lambda cookie: True, uid=os.getuid())
    return [read_environment(process.pid).get(variable, "") for process in carriers]

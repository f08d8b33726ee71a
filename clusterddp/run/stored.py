"""Old files on a host that can be removed: directories of ended runs, unused snapshots and packages.

clusterddp's directory on a host contains `runs/<run>.<8 of its token>/`, `code/<sha256>/` and `packages/<sha256>/`. A
run's own copy of the code consists of hard links, so a snapshot whose files have no second link is unused.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import COOKIE
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.usage import measure
from clusterddp.system.directories import own_directories, remove_directory, unchanged_s, walk_files
from clusterddp.system.processes import find_carriers, read_environment

Kind = Literal["run", "code", "package", "remnant"]
_SLOWEST_TRANSFER_S = 86_400.0
"""A hidden directory that is older belongs to no running transfer."""
_KEEP = ".keep"
_SHARED: dict[str, Kind] = {"code": "code", "packages": "package"}


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


def _remove_run(root: Path, place: str) -> Removed:
    """Remove the directory of one run, unless processes of it live here."""
    path = root / place
    if path not in _directories(root / "runs"):
        return Removed(place=place, size=0, error="is not a directory of yours" if os.path.lexists(path) else None)
    if _token_of(path) in _tokens_alive():
        return Removed(place=place, size=0, error="processes of it are alive")
    return _remove(root, place, _disk_usage(path))


def keep_package(package: Path) -> None:
    """Mark a package to stay at any age: Slurm jobs import it on other hosts, at any later time."""
    package.with_name(f"{package.name}{_KEEP}").touch(mode=0o600)


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

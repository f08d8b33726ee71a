"""Which files the snapshot of the code contains, a copy made at submit, which the run executes.

In a git repository they are the tracked files, with uncommitted changes, and the untracked files that are not ignored;
around a script outside git they are what lies beside and below the script. What git ignores and a program may need
(data, checkpoints, compiled modules) is linked.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import STAGING_PREFIX, STORE_NAME, SWEEP_RECORD, RunDir
from clusterddp.run.find import list_places
from clusterddp.run.git import find_root, list_git_files, list_ignored
from clusterddp.run.sent import find_sent

_MAX_LINKS = 200
_CACHES = ("__pycache__", "node_modules")
_MARKS = ("pyvenv.cfg", "conda-meta", RunDir(Path()).record.name, SWEEP_RECORD)
_COMPILED = (".pyc", ".pyo", ".egg-info")
MAX_BYTES = 200 * 1000 * 1000
MAX_SCRIPT_FILES = 2_000
"""The most files that the snapshot of a script outside git contains."""
MAX_SCRIPT_BYTES = 50 * 1000 * 1000
_MAX_WALKED = 10_000
_KEY = re.compile(
    r"(\.(pem|key|p12|pfx|jks|kdbx|ppk)|(^|/)(id_(rsa|dsa|ecdsa|ed25519)|credentials\.json|kaggle\.json))$"
)
"""Names of private keys and of credentials, which a snapshot of a directory that git does not know leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """The files beside a script that are more than a snapshot takes."""

    files: int
    bytes: int
    largest: tuple[str, ...]
    """Up to three, each with its size."""
    at_least: bool = False
    """There are more, which were not counted."""

    def __str__(self) -> str:
        more = "more than " if self.at_least else ""
        largest = f" (largest: {', '.join(self.largest)})" if self.largest else ""
        return f"{more}{self.files:,} file{'s' * (self.files != 1)}, {_megabytes(self.bytes)}{largest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """Which files a snapshot takes, relative to `root`."""

    source: str
    """`git`, or the path of the script around which the files were chosen."""
    root: Path
    files: tuple[str, ...]
    total_bytes: int
    notes: tuple[str, ...] = ()
    """What is not in the snapshot, and why."""
    ignored: tuple[str, ...] = ()
    """What git ignores, and repositories within the repository: a run on this file system gets links to them."""
    unlinked: tuple[str, ...] = ()
    """Directories in which git ignores too many single files for a link to each."""
    left_out: LeftOut | None = None
    """Of a script outside git: what is left out since all of it would be too much."""


def plan_snapshot(start: Path, *, runs_dir: Path, environ: Mapping[str, str]) -> SnapshotPlan | None:
    """Choose the files of the git repository around `start`; None if there is none.

    Uploaded code counts as a repository: all its files are chosen.
    Raises: ClusterddpError: git fails, or the files are larger than `MAX_BYTES`.
    """
    if sent := find_sent(start):
        return _plan_files(sent.root, _measure(sent.root, sent.files))
    root = find_root(start, environ)
    if root is None:
        return None
    places = _places_of_runs(root, runs_dir.resolve())
    measured = _measure(root, [name for name in list_git_files(root, environ) if not _below(root / name, places)])
    ignored, unlinked = _list_linked(root, measured.sizes, places, environ)
    return _plan_files(root, measured, ignored=(*measured.repositories, *ignored), unlinked=unlinked)


def plan_script_snapshot(script: Path, *, runs_dir: Path) -> SnapshotPlan:
    """Choose a script that belongs to no git repository, and the files beside and below it.

    Of more than `MAX_SCRIPT_FILES` files or `MAX_SCRIPT_BYTES` bytes it takes the *.py files, then the smallest ones.
    """
    root = script.resolve().parent
    places = _places_of_runs(root, runs_dir.resolve())
    names, walked = {script.name}, 0
    for folder, folders, files in os.walk(root):
        walked += len(folders) + len(files)
        here = Path(folder)
        kept = [name for name in folders if _is_wanted_directory(here / name) and not _below(here / name, places)]
        folders[:] = [name for name in kept if not (here / name).is_symlink()]
        links = set(kept) - set(folders)
        names |= {os.path.relpath(here / name, root) for name in (*files, *links) if _is_wanted(name)}
        if walked > _MAX_WALKED:
            # The script may lie in a home directory, which must not be copied.
            return _only_beside(script, root, names)
    keys = {name for name in names if _KEY.search(name.lower())} - {script.name}
    measured = _measure(root, sorted(names - keys), needs_reading=True)
    chosen = _those_that_fit(script.name, measured.sizes)
    return SnapshotPlan(
        source=str(script),
        root=root,
        files=tuple(name for name in measured.sizes if name in chosen),
        total_bytes=sum(measured.sizes[name] for name in chosen),
        notes=(*measured.notes, *_key_notes(sorted(keys))),
        left_out=_sum_up({name: size for name, size in measured.sizes.items() if name not in chosen}),
    )


def _places_of_runs(root: Path, runs_dir: Path) -> tuple[Path, ...]:
    """Return the paths of runs, which are not code: usually the runs directory lies in the repository."""
    if runs_dir != root and runs_dir.is_relative_to(root):
        return (runs_dir,)
    with contextlib.suppress(OSError):
        ours = (STORE_NAME, STAGING_PREFIX)
        hidden = [Path(entry.path) for entry in os.scandir(runs_dir) if entry.name.startswith(ours)]
        return (runs_dir / STORE_NAME, *hidden, *list_places(runs_dir))
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    sizes: dict[str, int]
    """The names that exist and can be copied."""
    repositories: tuple[str, ...]
    notes: tuple[str, ...]


def _measure(root: Path, names: Collection[str], *, needs_reading: bool = False) -> _Measured:
    """Read the sizes of files and links; `needs_reading`: leave out what this user may not read."""
    sizes: dict[str, int] = {}
    repositories, notes, closed = [], [], []
    for name in names:
        try:
            status = os.lstat(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, and deleted in the work tree
        if stat.S_ISREG(status.st_mode) and needs_reading and not os.access(root / name, os.R_OK):
            closed.append(name)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
        elif stat.S_ISDIR(status.st_mode):
            repositories.append(name.rstrip("/"))
        else:
            notes.append(f"{name}: neither a file nor a link, not in the snapshot of the code")
    if closed:
        more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
        notes.append(f"{closed[0]}{more}: you may not read it, not in the snapshot of the code")
    return _Measured(sizes=sizes, repositories=tuple(repositories), notes=tuple(notes))


def _plan_files(
    root: Path, measured: _Measured, *, ignored: tuple[str, ...] = (), unlinked: tuple[str, ...] = ()
) -> SnapshotPlan:
    """Plan the snapshot of all the files of a repository."""
    total, largest = sum(measured.sizes.values()), _largest(measured.sizes)
    if total > MAX_BYTES:
        raise ClusterddpError(
            f"{root}: the snapshot of the code would hold {total / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB; "
            f"largest: {', '.join(largest)}",
            hint="let .gitignore leave out what is no code, or write `snapshot: false` in the spec",
        )
    files = tuple(measured.sizes)
    return SnapshotPlan(
        source="git",
        root=root,
        files=files,
        total_bytes=total,
        notes=measured.notes,
        ignored=ignored,
        unlinked=unlinked,
    )


def _only_beside(script: Path, root: Path, found: Collection[str]) -> SnapshotPlan:
    """Choose the script and the *.py files beside it; `found`: names below `root`, as far as they were counted."""
    chosen = [name for name in found if os.sep not in name and (name.endswith(".py") or name == script.name)]
    measured = _measure(root, sorted(chosen), needs_reading=True)
    others = _measure(root, [name for name in found if name not in chosen]).sizes
    left_out = LeftOut(files=len(others), bytes=sum(others.values()), largest=_largest(others), at_least=True)
    files, total = tuple(measured.sizes), sum(measured.sizes.values())
    return SnapshotPlan(
        source=str(script), root=root, files=files, total_bytes=total, notes=measured.notes, left_out=left_out
    )


def _those_that_fit(script: str, sizes: Mapping[str, int]) -> set[str]:
    """Choose within the limits: the script, then *.py files, then other files; of each kind the smallest first."""
    chosen: set[str] = set()
    total = 0
    for name in sorted(sizes, key=lambda name: (name != script, not name.endswith(".py"), sizes[name], name)):
        if len(chosen) == MAX_SCRIPT_FILES or total + sizes[name] > MAX_SCRIPT_BYTES:
            break
        chosen.add(name)
        total += sizes[name]
    return chosen


def _key_notes(names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: a key by its name, not in the snapshot of the code"


def _sum_up(sizes: Mapping[str, int]) -> LeftOut | None:
    return LeftOut(files=len(sizes), bytes=sum(sizes.values()), largest=_largest(sizes)) if sizes else None


def _largest(sizes: Mapping[str, int]) -> tuple[str, ...]:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return tuple(f"{name} ({_megabytes(sizes[name])})" for name in largest)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_wanted(name: str) -> bool:
    """Return whether a file or directory with this name may belong to a program: it is not hidden and no cache."""
    return not (name.startswith(".") or name in _CACHES or name.endswith(_COMPILED))


def _is_wanted_directory(path: Path) -> bool:
    """Return whether a directory may belong to a program: it has such a name, and is no virtual environment or run."""
    return _is_wanted(path.name) and not any((path / mark).exists() for mark in _MARKS)


def _list_linked(
    root: Path, files: Collection[str], places: tuple[Path, ...], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List what git ignores: the names to link, and the directories of more single files than `_MAX_LINKS` allow.

    `files`: those of the snapshot. `places`: of runs. A directory whose only tracked files are hidden (.gitkeep)
    counts as ignored.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in list_ignored(root, environ):
        if _may_be_needed(root, name, places):
            path = Path(name)
            by_folder[str(path.parent)].append(str(path))
    visible = {folder for name in files if not _is_hidden(name) for folder in _parents(name)}
    names: list[str] = []
    unlinked: list[str] = []
    for folder, ignored in sorted(by_folder.items(), key=lambda item: (len(item[1]), item[0])):
        whole = folder != "." and folder not in visible
        chosen = [folder] if whole else ignored
        if len(names) + len(chosen) <= _MAX_LINKS:
            names += chosen
        else:
            unlinked.append(f"{folder}/ ({len(ignored):,} files)")
    return _outermost(names), tuple(unlinked)


def _may_be_needed(root: Path, name: str, places: tuple[Path, ...]) -> bool:
    path = root / name
    if any(path.is_relative_to(place) for place in places) or not all(map(_is_wanted, Path(name).parts)):
        return False
    return not name.endswith("/") or (_is_wanted_directory(path) and not list_places(path))


def _is_hidden(name: str) -> bool:
    return Path(name).name.startswith(".")


def _parents(name: str) -> list[str]:
    return [str(parent) for parent in Path(name).parents][:-1]


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Leave out names below another one, which its link makes present."""
    kept: list[str] = []
    for name in sorted(names, key=lambda name: Path(name).parts):
        if not (kept and Path(name).is_relative_to(kept[-1])):
            kept.append(name)
    return tuple(kept)

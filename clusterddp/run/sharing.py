"""Sharing: which files of a run a group may read, and copies without secrets of the records that have some.

A file that is not named here stays closed. docs/storage.md has the list, with the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import RunDir, is_of_another_user
from clusterddp.run.record import read_run
from clusterddp.run.snapshot import find_stored
from clusterddp.run.sweep import SweepDir, read_sweep
from clusterddp.spec.secret_values import HIDDEN, hide_secret_arguments
from clusterddp.system.files import SHARED_COPIES, read_json, write_json

_OPEN = ("attempts", "checkpoints", "code", "output", "tb")
"""Directories that are shared whole."""
_OPEN_FILES = ("CANCEL", "env.json", "events.jsonl", "metrics.jsonl", "report.html", "summary.json")
_OPEN_OF_LAUNCHER = ("head-events.jsonl", "hosts.json", "job-*.json", "*.log")
_NO_TOKEN = "0" * 32
"""Stands for a token in a shared copy; it finds no process and signs nothing."""
_PLAN_KEYS = ("run", "name", "launcher", "runs_dir", "working_dir", "notes", "snapshot", "parent")
_CLOSED_SECTIONS = ("env", "notify")
"""Sections of a spec whose values are not shared."""
_READ, _ENTER = 0o040, 0o010
_GROUP = 0o070


def share(run: RunDir, group: int | None) -> None:
    """Let a group read a run; `group` None: the group that its directory has.

    Raises: UsageError: the run belongs to another user, or the caller is not in the group. ClusterddpError: the files
    cannot be changed.
    """
    _refuse_foreign(run.path)
    group = os.stat(run.path).st_gid if group is None else group
    _write_copies(run)
    with _explaining(run.path):
        for path in _open_paths(run):
            _open_to(path, group)
        if (stored := find_stored(run)) is not None:
            _open_to(stored.parent, group, read=False)
            for path in _tree(stored):
                _open_to(path, group)
        _open_to(run.launcher_dir, group)
        _open_to(run.path, group)


def share_sweep(sweep: SweepDir, group: int | None) -> None:
    """Let a group read a sweep and its runs; raises as `share`."""
    _refuse_foreign(sweep.path)
    group = os.stat(sweep.path).st_gid if group is None else group
    copies = _make_copies(sweep.path)
    write_json(copies / sweep.record.name, dataclasses.asdict(read_sweep(sweep)) | {"token": _NO_TOKEN})
    for run in sweep.runs():
        share(run, group)
    with _explaining(sweep.path):
        for path in (*_tree(copies), sweep.tasks, sweep.path):
            _open_to(path, group)


def close(path: Path) -> None:
    """Take a run or a sweep back: no group may read it.

    The snapshot of the code stays open, for other runs may share it.
    Raises: as `share`.
    """
    _refuse_foreign(path)
    with _explaining(path):
        _change(path, _closed)  # first: no path leads inside from here on
        for inner in _tree(path):
            if inner.is_dir() or inner.lstat().st_nlink == 1:  # another name of a file may be in the store of snapshots
                _change(inner, _closed)
        for copy in _tree(path / SHARED_COPIES):
            if copy.is_file():
                copy.unlink()
    with contextlib.suppress(OSError):
        (path / SHARED_COPIES).rmdir()


def closed_parents(path: Path, group: int) -> list[tuple[Path, str]]:
    """List the directories above a path that members of a group cannot enter, each with the chmod that lets them."""
    closed = []
    for folder in path.resolve().parents:
        found = os.stat(folder)
        is_theirs = found.st_gid == group
        if not found.st_mode & (stat.S_IXGRP if is_theirs else stat.S_IXOTH):
            closed.append((folder, f"chmod {'g' if is_theirs else 'o'}+x {folder}"))
    return closed[::-1]


def _refuse_foreign(path: Path) -> None:
    if is_of_another_user(path):
        owner = os.stat(path).st_uid
        raise UsageError(f"{path.name} belongs to another user (uid {owner}); only that user can share it")


def _write_copies(run: RunDir) -> None:
    """Write copies of the records that have the token, by which the run is commanded, or values of variables."""
    copies = _make_copies(run.path)
    write_json(copies / run.record.name, dataclasses.asdict(read_run(run)) | {"token": _NO_TOKEN})
    plan = read_json(run.plan)
    if not isinstance(plan, dict) or not isinstance(plan.get("gang"), dict) or not isinstance(plan.get("spec"), dict):
        raise ClusterddpError(f"{run.plan}: found no plan in it")
    spec, gang = (_without_secrets(plan[part]) for part in ("spec", "gang"))
    gang |= {"token": _NO_TOKEN, "notify": None}
    kept = {key: plan[key] for key in _PLAN_KEYS if key in plan}
    write_json(
        copies / run.plan.name, kept | {"spec": spec, "gang": gang, "token": _NO_TOKEN, "ssh": None, "slurm": None}
    )


def _make_copies(path: Path) -> Path:
    copies = path / SHARED_COPIES
    with _explaining(path):
        copies.mkdir(mode=0o700, exist_ok=True)
    return copies


def _without_secrets(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec or a gang without the values of variables, and with secret arguments of its program hidden."""
    shown = {key: _masked(value) if key in _CLOSED_SECTIONS else value for key, value in part.items()}
    entry = shown.get("entry")
    return shown | ({"entry": hide_secret_arguments(entry)} if isinstance(entry, Mapping) else {})


def _masked(value: Any) -> Any:
    return dict.fromkeys(value, HIDDEN) if isinstance(value, Mapping) else value and HIDDEN


def _has_values(run: RunDir) -> bool:
    """Return whether the spec has values that are not shared."""
    spec = (read_json(run.plan) or {}).get("spec") or {}
    entry = spec.get("entry") or {}
    return hide_secret_arguments(entry) != entry or any(spec.get(section) for section in _CLOSED_SECTIONS)


def _open_paths(run: RunDir) -> Iterator[Path]:
    for name in (*_OPEN, SHARED_COPIES):
        if not (run.path / name).is_symlink():
            yield from _tree(run.path / name)
    yield from (run.path / name for name in _OPEN_FILES)
    if not _has_values(run):
        yield run.spec
    with os.scandir(run.launcher_dir) as entries:
        names = [entry.name for entry in entries]
    yield from (
        run.launcher_dir / name for name in names if any(fnmatch(name, pattern) for pattern in _OPEN_OF_LAUNCHER)
    )


def _tree(top: Path) -> Iterator[Path]:
    """Yield what is in a directory, and the directory last; no link is followed."""
    for folder, _, names in os.walk(top, topdown=False):
        yield from (Path(folder, name) for name in names)
        yield Path(folder)


def _closed(mode: int) -> int:
    return mode & ~_GROUP


def _open_to(path: Path, group: int, *, read: bool = True) -> None:
    def opened(mode: int) -> int:
        return mode | (_READ if read else 0) | (_ENTER if mode & stat.S_IXUSR else 0)

    _change(path, opened, group)


def _change(path: Path, changed: Callable[[int], int], group: int | None = None) -> None:
    """Change the mode and the group of a file or directory; a link, and what is gone, is left as it is."""
    if not (path.is_file() or path.is_dir()) or path.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if group is not None and found.st_gid != group:
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, changed(stat.S_IMODE(found.st_mode)))
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise UsageError(
            f"{error.filename or path.name}: {error.strerror}",
            hint="you can share with a group that you are in: id -Gn",
        ) from error
    except OSError as error:
        raise ClusterddpError(f"{error.filename or path}: cannot be shared: {error.strerror}") from error

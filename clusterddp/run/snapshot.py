"""The snapshot of the code: a copy made at submit, which the run executes.

It contains the tracked files of the git repository, with uncommitted changes, and the untracked files that are not
ignored. The store is addressed by content, so runs of the same code share one copy.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import STAGING_PREFIX
from clusterddp.run.find import list_places
from clusterddp.run.git import find_root, list_git_files
from clusterddp.run.sent import find_sent
from clusterddp.system.file_set import has_digest, list_files
from clusterddp.system.files import sync_directory

STORE_NAME = ".code"
MAX_BYTES = 200 * 1000 * 1000
_MAX_WALKED = 10_000


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


def plan_snapshot(start: Path, *, runs_dir: Path, environ: Mapping[str, str]) -> SnapshotPlan | None:
    """Choose the files of the git repository around `start`; None if there is none.

    Uploaded code counts as a repository: all its files are chosen.
    Raises: ClusterddpError: git fails, or the files are larger than `MAX_BYTES`.
    """
    if sent := find_sent(start):
        return _measure("git", sent.root, list(sent.files))
    root = find_root(start, environ)
    if root is None:
        return None
    left_out = _left_out(root, runs_dir.resolve())
    names = [name for name in list_git_files(root, environ) if not _below(root / name, left_out)]
    return _measure("git", root, names)


def plan_script_snapshot(script: Path, *, runs_dir: Path) -> SnapshotPlan:
    """Choose a script that belongs to no git repository, and the Python files beside and below it.

    Raises: ClusterddpError: they are larger than `MAX_BYTES`.
    """
    root = script.resolve().parent
    left_out = _left_out(root, runs_dir.resolve())
    names, walked = {script.name}, 0
    for folder, folders, files in os.walk(root):
        walked += len(folders) + len(files)
        if walked > _MAX_WALKED:
            # The script may lie in a home directory, which must not be copied.
            beside = {name for name in os.listdir(root) if name.endswith(".py")}
            note = (
                f"{root}: more than {_MAX_WALKED:,} files lie below it; the snapshot has only {script.name} and the "
                "*.py files beside it"
            )
            return _measure(str(script), root, sorted(beside | {script.name}), note)
        here = Path(folder)
        folders[:] = [name for name in folders if _may_hold_code(here / name) and not _below(here / name, left_out)]
        names |= {os.path.relpath(here / name, root) for name in files if name.endswith(".py")}
    return _measure(str(script), root, sorted(names))


def write_snapshot(plan: SnapshotPlan, store: Path, link: Path) -> str:
    """Copy the files into `store` unless it has them, make `link` a symlink to them, and return their digest.

    The copy is made beside `link` and renamed, so the store never contains a partial one. The digest of a copy in the
    store is checked before it is used.
    Raises: ClusterddpError: a file cannot be read, or the disk is full.
    """
    staging = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
    try:
        staging.mkdir(mode=0o700)
        for name in plan.files:
            _copy(plan.root / name, staging / name)
        digest = list_files(staging).digest()
        store.mkdir(mode=0o700, exist_ok=True)
        if not has_digest(store / digest, digest):
            _install(staging, store / digest)
        link.symlink_to(os.path.relpath(store / digest, link.parent))
        return digest
    except OSError as error:
        place = error.filename or store
        raise ClusterddpError(f"{place}: the snapshot of the code failed: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def store_of(runs_dir: Path) -> Path:
    """Return the directory of this user's snapshots in a runs directory, which several users may share.

    It is never another user's directory, since that user could change the code that the ranks execute.
    """
    store = runs_dir / STORE_NAME
    with contextlib.suppress(FileNotFoundError):
        found = store.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return runs_dir / f"{STORE_NAME}-{os.geteuid()}"
    return store


def _left_out(root: Path, runs_dir: Path) -> tuple[Path, ...]:
    """Return the paths of runs, which are not code: usually the runs directory lies in the repository."""
    if runs_dir != root and runs_dir.is_relative_to(root):
        return (runs_dir,)
    with contextlib.suppress(OSError):
        ours = (STORE_NAME, STAGING_PREFIX)
        hidden = [Path(entry.path) for entry in os.scandir(runs_dir) if entry.name.startswith(ours)]
        return (runs_dir / STORE_NAME, *hidden, *list_places(runs_dir))
    return ()


def _measure(source: str, root: Path, names: list[str], *notes: str) -> SnapshotPlan:
    """Keep the names that exist and can be copied, and sum up their sizes."""
    sizes: dict[str, int] = {}
    strange = []
    for name in names:
        try:
            status = os.lstat(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, and deleted in the work tree
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
        elif stat.S_ISDIR(status.st_mode):
            strange.append(f"{name.rstrip('/')}: a repository of its own, not in the snapshot of the code")
        else:
            strange.append(f"{name}: neither a file nor a link, not in the snapshot of the code")
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        raise ClusterddpError(
            f"{root}: the snapshot of the code would hold {total / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB; "
            f"largest: {', '.join(f'{name} ({sizes[name] / 1e6:.1f} MB)' for name in largest)}",
            hint="let .gitignore leave out what is no code, or write `snapshot: false` in the spec",
        )
    return SnapshotPlan(source=source, root=root, files=tuple(sizes), total_bytes=total, notes=(*notes, *strange))


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a link; one that was deleted since it was listed is left out."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if source.is_symlink():
            target.symlink_to(source.readlink())
            return
        with open(source, "rb") as original:
            executable = os.fstat(original.fileno()).st_mode & stat.S_IXUSR
            # Read-only: an editor refuses to change the snapshot by mistake.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o500 if executable else 0o400)
            with open(descriptor, "wb") as copy:
                shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())


def _install(staging: Path, target: Path) -> None:
    """Move a complete copy into the store; of several writers of the same content any may win."""
    if target.exists():
        target.rename(target.with_name(f".damaged-{target.name}-{secrets.token_hex(4)}"))
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    sync_directory(target.parent)


def _may_hold_code(folder: Path) -> bool:
    """Return whether a folder may contain code: it is no virtual environment, cache or hidden folder."""
    return not folder.name.startswith(".") and folder.name != "__pycache__" and not (folder / "pyvenv.cfg").exists()


def _below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)

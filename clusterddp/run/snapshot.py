"""The copy of the code that a submit makes, and the store of copies.

The store is addressed by content, so runs of the same code share one copy.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.code_files import SnapshotPlan
from clusterddp.run.directory import STORE_NAME, RunDir
from clusterddp.system.file_set import has_digest, list_files
from clusterddp.system.files import sync_directory


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
        if not (_mark_used(store / digest) and has_digest(store / digest, digest)):
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


def find_stored(run: RunDir) -> Path | None:
    """Find the snapshot of a run in its store; None where no link leads into one: there is none, or it is foreign."""
    links = [link for link in (run.snapshot, run.code) if link.is_symlink()]
    places = [Path(os.path.realpath(link)) for link in links]
    return next((path for path in places if path.parent.name.startswith(STORE_NAME) and path.is_dir()), None)


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


def _mark_used(target: Path) -> bool:
    """Set the time of a snapshot to now, so that `rm` leaves it to this submit; return whether there is one."""
    try:
        os.utime(target)
    except FileNotFoundError:
        return False
    return True


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

"""Downloads what has changed of one run on one host: new ends of logs, whole records, the end of the run last."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.remote.download import (
    PIECE_BYTES,
    Asks,
    Copy,
    Listed,
    append_pieces,
    read_listed,
    read_parts,
    set_aside,
)
from clusterddp.results.host_run import HostRun, Kind
from clusterddp.run.directory import RunDir
from clusterddp.system.files import MAX_RECORD_BYTES, write_bytes

_TURN_BYTES = 64 << 20
"""How many bytes of growing files are downloaded before the records."""
_MAX_PARTS = 256
"""How many small files one request asks for."""
_LOCK_S = 5.0
_LOCK_POLL_S = 0.05


@dataclass(kw_only=True, slots=True)
class Downloaded:
    """The result of a download."""

    complete: bool = True
    """False: the host has more."""
    is_locked: bool = False
    """True: another process downloads this run, and this one did nothing."""
    notes: list[str] = field(default_factory=list)
    """What cannot be downloaded, and why."""
    problem: ClusterddpError | None = None
    """Why something could not be written locally."""


def download_records(session: Asks, host_run: HostRun, files: Mapping[str, Listed]) -> Downloaded:
    """Download the small and the growing files of a run that are wanted, out of `files`, which the host lists.

    Raises: SshError.
    """
    by_kind: dict[Kind, dict[str, Listed]] = {}
    for path, listed in files.items():
        kind = host_run.kind_of(path)
        if kind is not None and (kind != "events" or listed[0] <= MAX_RECORD_BYTES):
            by_kind.setdefault(kind, {})[path] = listed
    # A lock per host: hosts do not wait for each other, and two never write the same file.
    with downloading(host_run.run, f"mirror-{min(host_run.nodes)}") as done:
        if done.is_locked:
            return done
        growing = by_kind.get("grows", {}) | by_kind.get("events", {})
        copies = {
            path: Copy(place=host_run.place_of(path), listed=listed, start_again=set_aside)
            for path, listed in growing.items()
        }
        done.complete = append_pieces(session, host_run.name, copies, max_bytes=_TURN_BYTES)
        if "events" in by_kind:
            _merge_events(host_run)
        _replace(session, host_run, by_kind.get("whole", {}))
        # Last: a reader that sees the end also sees everything that was written before it.
        _replace(session, host_run, by_kind.get("end", {}), only_missing=True)
    return done


@contextlib.contextmanager
def downloading(run: RunDir, what: str, lock_timeout_s: float = _LOCK_S) -> Iterator[Downloaded]:
    """Hold the lock `what` of a run while the block lasts; a local error becomes the `problem`.

    Raises: SshError.
    """
    done = Downloaded()
    try:
        with locked(run, what, lock_timeout_s) as free:
            done.is_locked, done.complete = not free, free
            yield done
    except SshError:
        raise
    except OSError as error:
        done.problem, done.complete = unwritable(run, error), False
    except ClusterddpError as error:
        done.problem, done.complete = error, False


@contextlib.contextmanager
def locked(run: RunDir, what: str, timeout_s: float = _LOCK_S) -> Iterator[bool]:
    """Hold a lock on the local copy of a run; False: another process holds it after `timeout_s`.

    Raises: ClusterddpError: the file system refuses.
    """
    try:
        file = os.open(run.launcher_dir / f".{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        yield _take_lock(file, time.monotonic() + timeout_s)
    finally:
        os.close(file)  # which releases the lock


def unwritable(run: RunDir, error: OSError) -> ClusterddpError:
    return ClusterddpError(
        f"{error.filename or run.path}: the download cannot be written: {error.strerror}",
        hint="the run goes on and its hosts keep the files; the next command downloads them",
    )


def _take_lock(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def _replace(session: Asks, host_run: HostRun, files: Mapping[str, Listed], *, only_missing: bool = False) -> None:
    """Download small files that differ from the local ones; with `only_missing`, only those that are not here."""
    changed = [path for path, listed in files.items() if _differs(host_run, path, listed, only_missing=only_missing)]
    while changed:
        batch, changed = changed[:_MAX_PARTS], changed[_MAX_PARTS:]
        parts = [{"path": path, "offset": 0, "limit": PIECE_BYTES} for path in batch]
        for part, answer, data in read_parts(session, host_run.name, parts):
            if answer["gone"] or answer["length"] < answer["size"]:
                continue  # it is being replaced, too large for a record, or the answer was full: retried next time
            place = host_run.place_of(part["path"])
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(place, data, exclusive=only_missing)
            with contextlib.suppress(FileNotFoundError):
                os.utime(place, ns=(answer["mtime_ns"], answer["mtime_ns"]))


def _differs(host_run: HostRun, path: str, listed: Listed, *, only_missing: bool) -> bool:
    found = read_listed(host_run.place_of(path))
    return found is None or (not only_missing and found != tuple(listed))


def _merge_events(host_run: HostRun) -> None:
    """Add the head's rows to the run's local history, which also has rows of this machine; add none twice."""
    theirs = host_run.place_of("events.jsonl")
    ours = host_run.run.events
    known = set(ours.read_bytes().splitlines()) if ours.exists() else set()
    whole_lines = theirs.read_bytes().rpartition(b"\n")[0].splitlines() if theirs.exists() else []
    added = b"".join(line + b"\n" for line in whole_lines if line not in known)
    if added:
        with open(os.open(ours, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(added)

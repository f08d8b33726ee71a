"""Downloads a run from a host: the bytes of a file from an offset on, records whole, large files beside their places.

A copy holds the state of its own download: its size is the next offset, and it has the host's mtime once it is
complete. So a broken connection or a killed process loses no byte and doubles none. What grows comes first, then
records, then the end of the attempt: a reader who sees an end sees everything that was written before it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.places.base import Report
from clusterddp.places.ssh.host_run import HostRun, Kind, Listed, checkpoints_among, locked, unwritable
from clusterddp.system.files import MAX_RECORD_BYTES, sync_directory, write_bytes
from clusterddp.wire import read_object

if TYPE_CHECKING:
    from clusterddp.places.ssh.agent.operations import Piece
    from clusterddp.places.ssh.session import Session

ASK_TIMEOUT_S = 10.0
"""How long a host may send no byte."""
PIECE_BYTES = 4 << 20
"""How much is requested at once, and held in memory."""
_TURN_BYTES = 64 << 20
"""How many bytes of growing files are downloaded before the records."""
_SPARE_BYTES, _MAX_SPARE_BYTES = 16 << 20, 512 << 20
"""How much of the disk stays free: 5 % of it, within these bounds; of records at most the first. Hosts may send on."""
_OVERLAP_BYTES = 256
"""How much of the end of a copy is requested again: a file that has other bytes there was replaced."""
_MAX_PARTS = 256
"""How many small files one request asks for."""
_MAX_ASIDE = 16
_LARGE_LOCK_S = 1.0


@dataclass(kw_only=True, slots=True)
class Downloaded:
    """The result of a download."""

    has_records: bool = False
    """True: the logs and records that the host has listed are here, or too many to come at once."""
    is_complete: bool = False
    """True: everything that is wanted is here."""
    goes_on: bool = False
    """True: the host has more, or another process downloads it now."""
    problem: ClusterddpError | None = None
    """Why something could not be written locally."""


class _GoneError(Exception):
    """The host no longer has the file, or has another one in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """A local copy of a file on a host."""

    place: Path
    listed: Listed
    exact: bool = False
    """True: the copy is of the file as listed; False: the file may have grown since, or begun anew."""
    is_tail: bool = False
    """True: it has zeros, which take no room, in place of what is before the end of the file."""


def _copy_of(host_run: HostRun, path: str, listed: Listed) -> _Copy:
    place, tails = host_run.place_of(path), host_run.wants.tails
    if tails is None or not path.endswith((".out", ".err")) or listed[0] - _size_of(place) <= tails[1]:
        return _Copy(place=place, listed=listed)
    place = tails[0] / path
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb") as file:
            file.truncate(listed[0] - tails[1])
    return _Copy(place=place, listed=listed, is_tail=True)


def download(session: Session, host_run: HostRun, files: Mapping[str, Listed], report: Report) -> Downloaded:
    """Download what is wanted of a run, out of `files`, which the host lists; `report` receives what takes long.

    Raises: SshError.
    """
    by_kind: dict[Kind, dict[str, Listed]] = {"grows": {}, "rows": {}, "whole": {}, "end": {}, "large": {}}
    for path, listed in files.items():
        kind = host_run.kind_of(path)
        if kind is not None and (kind != "rows" or listed[0] <= MAX_RECORD_BYTES):
            by_kind[kind][path] = listed
    done = Downloaded()
    try:
        # A lock per host: hosts do not wait for each other, and two commands never write the same file.
        with locked(host_run.run, f"mirror-{host_run.node.node_rank}") as free:
            if not free:
                done.goes_on = True
                return done
            growing = by_kind["grows"] | by_kind["rows"]
            copies = {path: _copy_of(host_run, path, listed) for path, listed in growing.items()}
            is_whole = _append(session, host_run.name, copies, max_bytes=_TURN_BYTES)
            if by_kind["rows"]:
                with locked(host_run.run, "rows") as may_merge:
                    for path in by_kind["rows"] if may_merge else ():
                        _merge_rows(host_run.place_of(path), host_run.run.path / path)
            _replace(session, host_run, by_kind["whole"])
            _replace(session, host_run, by_kind["end"], only_missing=True)
        done.has_records, done.goes_on = True, not is_whole
        if is_whole:
            done.is_complete = _download_large(session, host_run, by_kind["large"], report)
            done.goes_on = not done.is_complete
    except SshError:
        raise
    except OSError as error:
        done.problem, done.goes_on = unwritable(host_run.run, error), False
    except ClusterddpError as error:
        done.problem, done.goes_on = error, False
    return done


def _read_parts(
    session: Session, run_name: str, parts: list[dict[str, Any]]
) -> Iterable[tuple[dict[str, Any], Piece, bytes]]:
    """Request pieces of files of a run; yield for each the request, the host's answer, and the bytes.

    Raises: SshError.
    """
    reply = session.ask("run.read", {"name": run_name, "parts": parts}, timeout_s=ASK_TIMEOUT_S)
    answers: list[Piece] = reply.facts["parts"]
    if len(answers) != len(parts) or sum(answer["length"] for answer in answers) != len(reply.data):
        raise NonsenseError(session.host, f"{len(answers)} parts of {len(parts)}, with {len(reply.data):,} bytes")
    begin = 0
    for part, answer in zip(parts, answers, strict=True):
        if not 0 <= answer["length"] <= (0 if answer["gone"] else part["limit"]) or answer["size"] < 0:
            raise NonsenseError(session.host, f"{answer['length']:,} bytes of {part['path']}")
        yield part, answer, reply.data[begin : begin + answer["length"]]
        begin += answer["length"]


def _append(session: Session, run_name: str, copies: Mapping[str, _Copy], *, max_bytes: int | None = None) -> bool:
    """Update copies to the host's listing; `copies`: path on the host -> copy.

    Return False when some bytes came and more are left. A host that sends no byte is not asked again before the next
    listing.
    Raises: SshError. _GoneError: a file differs from its listing, and its copy is exact. OSError: of the disk.
    """
    received_bytes, is_whole = 0, True
    todo = {path: copy for path, copy in copies.items() if _read_listed(copy.place) != tuple(copy.listed)}
    while todo:
        if max_bytes is not None and received_bytes >= max_bytes:
            return False
        parts, room = [], PIECE_BYTES
        for path, copy in todo.items():
            if room > 0:
                size = _size_of(copy.place)
                known = 0 if copy.is_tail else min(size, _OVERLAP_BYTES)
                parts.append({"path": path, "offset": size - known, "limit": known + room})
                room -= max(copy.listed[0] - size, 1)
        for part, answer, data in _read_parts(session, run_name, parts):
            path = part["path"]
            before = _size_of(todo[path].place)
            progress = _append_part(session.host, part, answer, data, todo[path])
            received_bytes += max(0, _size_of(todo[path].place) - before)
            if progress != "more":
                todo.pop(path)
            is_whole = is_whole and progress != "short"
    return is_whole or received_bytes == 0


def _append_part(host: str, part: Mapping[str, Any], answer: Piece, data: bytes, copy: _Copy) -> str:
    """Write a piece; return `more`, `done`, or `short`: the next listing shows what is left."""
    if copy.exact and (answer["gone"] or (answer["size"], answer["mtime_ns"]) != tuple(copy.listed)):
        copy.place.unlink(missing_ok=True)
        raise _GoneError
    if answer["gone"]:
        return "done"  # the copy stays
    size = _size_of(copy.place)
    known = size - part["offset"]
    ours = _read_from(copy.place, part["offset"]) if known else b""
    if data[:known] != ours:
        if ours.startswith(data[:known]) and answer["size"] >= size:
            return "short"  # the answer was full
        if copy.exact:
            copy.place.unlink()
            raise _GoneError
        _set_aside(copy.place)
        return "more"
    new = data[known:]
    if not new and size != answer["size"]:
        if copy.exact:
            raise NonsenseError(host, f"nothing of {part['path']}")
        return "short"
    end = size + len(new)
    _write_piece(copy.place, size, new, answer["mtime_ns"] if end == answer["size"] else None)
    return "done" if end == answer["size"] or end >= copy.listed[0] else "more"


def _set_aside(path: Path) -> None:
    """Keep a copy whose bytes the host's file no longer begins with, under the next free name: `rank-000.out.1`.

    Raises: ClusterddpError: too many are kept already.
    """
    names = (path.with_name(f"{path.name}.{number}") for number in range(1, _MAX_ASIDE + 1))
    free = next((name for name in names if not name.exists()), None)
    if free is None:
        raise ClusterddpError(f"{path}: the host's file has begun anew {_MAX_ASIDE} times; no more are kept")
    path.rename(free)


def _write_piece(path: Path, offset: int, data: bytes, mtime_ns: int | None) -> None:
    """Write a piece at its offset; `mtime_ns`: the file's mtime, when the piece completes it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _demand_room(path, len(data), _spare_of(path.parent))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            offset, view = offset + written, view[written:]
        if mtime_ns is not None:
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _replace(session: Session, host_run: HostRun, files: Mapping[str, Listed], *, only_missing: bool = False) -> None:
    """Download small files that differ from the local ones; with `only_missing`, only those that are not here."""

    def differs(path: str) -> bool:
        found = _read_listed(host_run.place_of(path))
        return found is None or (not only_missing and found != tuple(files[path]))

    changed = [path for path in files if differs(path)]
    while changed:
        batch, changed = changed[:_MAX_PARTS], changed[_MAX_PARTS:]
        parts = [{"path": path, "offset": 0, "limit": PIECE_BYTES} for path in batch]
        for part, answer, data in _read_parts(session, host_run.name, parts):
            if answer["gone"] or answer["length"] < answer["size"]:
                continue  # it is being replaced, too large for a record, or the answer was full: retried next time
            place = host_run.place_of(part["path"])
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _demand_room(place, len(data), min(_SPARE_BYTES, shutil.disk_usage(place.parent).total // 20))
            write_bytes(place, data, exclusive=only_missing)
            with contextlib.suppress(FileNotFoundError):
                os.utime(place, ns=(answer["mtime_ns"], answer["mtime_ns"]))


def _merge_rows(theirs: Path, ours: Path) -> None:
    """Add a head's rows to the local ones, which are of this machine and of other heads, too; add none twice.

    Metrics stand in the order of their attempts: those of a head that was lost may come late.
    """
    lines = ours.read_bytes().splitlines() if ours.exists() else []
    known = set(lines)
    whole_lines = theirs.read_bytes().rpartition(b"\n")[0].splitlines() if theirs.exists() else []
    added = [line for line in whole_lines if line not in known]
    if lines and added and ours.name == "metrics.jsonl" and _attempt_in(added[0]) < _attempt_in(lines[-1]):
        merged = sorted([*lines, *added], key=_attempt_in)
        write_bytes(ours, b"".join(line + b"\n" for line in merged))
    elif added:
        with open(os.open(ours, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(b"".join(line + b"\n" for line in added))


def _attempt_in(line: bytes) -> int:
    """Return the attempt of a row; 0 of one that has none."""
    with contextlib.suppress(ValueError):
        attempt = read_object(line).get("attempt")
        return attempt if isinstance(attempt, int) else 0
    return 0


def _download_large(session: Session, host_run: HostRun, files: Mapping[str, Listed], report: Report) -> bool:
    """Download output and checkpoints, each complete with its manifest or not at all; return whether all are here.

    The newest checkpoint comes first, then the older ones, then the other files.
    """
    if not files:
        return True
    with locked(host_run.run, "fetch", _LARGE_LOCK_S) as free:
        if not free:
            return False
        missing = {path: listed for path, listed in files.items() if not _is_here(host_run.place_of(path), listed)}
        if not missing:
            return True
        num_bytes = sum(listed[0] for listed in missing.values())
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        report(f"downloading {count}, {num_bytes / 1e6:.1f} MB, from {host_run.host}")
        _check_room(host_run, num_bytes)
        # A manifest comes after its data: without it there is no checkpoint. Whoever loads one checks its sum.
        groups = []
        for name in reversed(checkpoints_among(missing)):
            shards = [path for path in files if path.startswith(f"checkpoints/{name}.shard-")]
            groups.append([f"checkpoints/{name}.pt", *shards, f"checkpoints/{name}.json"])
        groups += [[path] for path in missing.keys() - {path for group in groups for path in group}]
        is_complete = True
        for group in groups:
            try:
                for path in group:
                    if path not in files:
                        raise _GoneError
                    if path in missing:
                        _download_file(session, host_run, path, missing[path])
            except _GoneError:
                is_complete = False  # it changes, or a newer one has replaced it; the next listing has its new size
        return is_complete


def _download_file(session: Session, host_run: HostRun, path: str, listed: Listed) -> None:
    """Download one file beside its place, and rename it there; a later try goes on where this one breaks off.

    Raises: _GoneError: it is no longer there, or was replaced.
    """
    place = host_run.place_of(path)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{listed[1]}.part")
    for other in place.parent.glob(f".{glob.escape(place.name)}.*.part"):
        if other != partial:
            other.unlink(missing_ok=True)
    try:
        _append(session, host_run.name, {path: _Copy(place=partial, listed=listed, exact=True)})
    except OSError:
        partial.unlink(missing_ok=True)  # the disk is full: free what the download took
        raise
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(place)
    sync_directory(place.parent)


def _check_room(host_run: HostRun, num_bytes: int) -> None:
    """Raises: ClusterddpError: the disk has too little room."""
    free = shutil.disk_usage(host_run.run.path).free
    if num_bytes + _spare_of(host_run.run.path) > free:
        raise ClusterddpError(
            f"{host_run.run.path}: {num_bytes / 1e6:.1f} MB to download from {host_run.host}, {free / 1e6:.1f} MB free",
            hint=f"free some space, then clusterddp status {host_run.run.name} downloads them",
        )


def _spare_of(directory: Path) -> int:
    """Return how many bytes of its disk stay free."""
    return max(_SPARE_BYTES, min(_MAX_SPARE_BYTES, shutil.disk_usage(directory).total // 20))


def _demand_room(path: Path, num_bytes: int, spare: int) -> None:
    """Raises: OSError: with a file of this size less than `spare` bytes of the disk would stay free."""
    if shutil.disk_usage(path.parent).free < num_bytes + spare:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, of which {spare / 1e6:.0f} MB stay free", str(path))


def _is_here(place: Path, listed: Listed) -> bool:
    try:
        return _read_listed(place) == tuple(listed)
    except OSError:  # a name that this file system refuses must not stop the other downloads
        return False


def _read_listed(path: Path) -> Listed | None:
    """Return the size and mtime of a local file, as a host lists its own; None when there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _size_of(path: Path) -> int:
    found = _read_listed(path)
    return found[0] if found else 0


def _read_from(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read()

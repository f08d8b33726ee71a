"""Downloads files from a host in pieces: each continues where the copy ends, if the file begins as the copy does.

The copy holds the whole state: its size is the next offset, and it has the host's mtime once it is complete. A broken
connection or a killed process loses no byte and doubles none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clusterddp.errors import ClusterddpError, NonsenseError

if TYPE_CHECKING:
    from clusterddp.remote.answers import Part

ASK_TIMEOUT_S = 10.0
"""How long a host may send no byte."""
PIECE_BYTES = 4 << 20
"""How much is requested at once, and held in memory."""
SPARE_BYTES = 16 << 20
"""How much of the disk stays free."""
_MAX_ASIDE = 16
_HEAD_BYTES, _TAIL_BYTES = 512, 4096
"""The parts of a copy that are compared before more of the file is requested."""

Listed = tuple[int, int]
"""A file in a host's listing: its size in bytes, its mtime in ns since the epoch."""


class Answer(Protocol):
    facts: dict[str, Any]
    data: bytes


class Asks(Protocol):
    """The part of a session that a download needs."""

    host: str

    def ask(self, do: str, facts: Mapping[str, Any] | None = None, *, timeout_s: float = ...) -> Answer:
        """Ask the host, and wait for its answer."""


class GoneError(Exception):
    """The host no longer has the file, or has another one in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A local copy of a file on a host."""

    place: Path
    listed: Listed
    """The file in the host's listing."""
    start_again: Callable[[Path], object]
    """Called with a copy whose bytes the file does not begin with: `set_aside`, `Path.unlink`."""
    exact: bool = False
    """True: the copy is of the file as listed; False: the file may have grown since."""


def read_parts(
    session: Asks, run_name: str, parts: list[dict[str, Any]]
) -> Iterable[tuple[dict[str, Any], Part, bytes]]:
    """Request pieces of files of a run; yield for each the request, the host's answer, and the bytes.

    Raises: SshError.
    """
    reply = session.ask("results.read", {"name": run_name, "parts": parts}, timeout_s=ASK_TIMEOUT_S)
    answers: list[Part] = reply.facts["parts"]
    if len(answers) != len(parts) or sum(answer["length"] for answer in answers) != len(reply.data):
        raise NonsenseError(session.host, f"{len(answers)} parts of {len(parts)}, with {len(reply.data):,} bytes")
    begin = 0
    for part, answer in zip(parts, answers, strict=True):
        if not 0 <= answer["length"] <= (0 if answer["gone"] else part["limit"]) or answer["size"] < 0:
            raise NonsenseError(session.host, f"{answer['length']:,} bytes of {part['path']}")
        yield part, answer, reply.data[begin : begin + answer["length"]]
        begin += answer["length"]


def append_pieces(session: Asks, run_name: str, copies: Mapping[str, Copy], *, max_bytes: int | None = None) -> bool:
    """Update copies to the host's listing; `copies`: path on the host -> copy.

    Return False when some bytes came and more are left. A host that sends no byte is not asked again before the next
    listing.
    Raises: SshError. GoneError: a file differs from its listing, and its copy is exact. OSError: of the disk.
    """
    received_bytes, is_whole = 0, True
    todo = dict(copies)
    while todo:
        if max_bytes is not None and received_bytes >= max_bytes:
            return False
        parts = list(_next_parts(todo))
        if not parts:
            break
        for part, answer, data in read_parts(session, run_name, parts):
            received_bytes += len(data)
            path = part["path"]
            progress = _append(session.host, part, answer, data, todo[path])
            if progress != "more":
                todo.pop(path)
            is_whole = is_whole and progress != "short"
    return is_whole or received_bytes == 0


def _append(host: str, part: Mapping[str, Any], answer: Part, data: bytes, copy: Copy) -> str:
    """Write a piece; return `more`, `done`, or `short`: the next listing shows what is left."""
    if copy.exact and (answer["gone"] or (answer["size"], answer["mtime_ns"]) != tuple(copy.listed)):
        copy.place.unlink(missing_ok=True)
        raise GoneError
    if answer["gone"]:
        return "done"  # the copy stays
    if not answer["fits"]:
        if not copy.place.exists():
            raise NonsenseError(host, f"{part['path']} differs from an empty copy")
        copy.start_again(copy.place)
        return "more"
    end = part["offset"] + len(data)
    if not data and part["offset"] != answer["size"]:
        if copy.exact:
            raise NonsenseError(host, f"nothing of {part['path']}")
        return "short"  # the answer was full, or the file is shorter than it was
    is_complete = end == answer["size"]
    _write_piece(copy.place, part["offset"], data, answer["mtime_ns"] if is_complete else None)
    return "done" if is_complete or end >= copy.listed[0] else "more"


def _next_parts(todo: dict[str, Copy]) -> Iterable[dict[str, Any]]:
    """Yield the next requests, `PIECE_BYTES` in all; remove a copy that is up to date from `todo`."""
    room = PIECE_BYTES
    for path, copy in list(todo.items()):
        found = read_listed(copy.place)
        size = found[0] if found else 0
        if found == tuple(copy.listed):
            todo.pop(path)
        elif room > 0:
            limit = room
            room -= max(min(limit, copy.listed[0] - size), 1)
            yield {"path": path, "offset": size, "limit": limit, "like": _spans_of(copy.place, size) if size else []}


def read_listed(path: Path) -> Listed | None:
    """Return the size and mtime of a local file, as a host lists its own; None when there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def set_aside(path: Path) -> None:
    """Keep a copy whose bytes the host's file no longer begins with, under the next free name: `rank-000.out.1`.

    Raises: ClusterddpError: too many are kept already.
    """
    names = (path.with_name(f"{path.name}.{number}") for number in range(1, _MAX_ASIDE + 1))
    free = next((name for name in names if not name.exists()), None)
    if free is None:
        raise ClusterddpError(f"{path}: the host's file has begun anew {_MAX_ASIDE} times; no more are kept")
    path.rename(free)


def _spans_of(path: Path, size: int) -> list[tuple[int, int, str]]:
    """Hash the beginning and the end of a copy, for the host to compare with its own file."""
    spans = []
    with open(path, "rb") as file:
        for begin, end in ((0, min(size, _HEAD_BYTES)), (max(0, size - _TAIL_BYTES), size)):
            spans.append((begin, end - begin, hashlib.sha256(os.pread(file.fileno(), end - begin, begin)).hexdigest()))
    return spans


def _write_piece(path: Path, offset: int, data: bytes, mtime_ns: int | None) -> None:
    """Write a piece at its offset; `mtime_ns`: the file's mtime, when the piece completes it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < len(data) + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
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

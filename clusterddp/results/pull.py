"""Brings home what has changed of one run on one host: logs by their ends, records whole, the end of the run last.

The state of the copy is the copy itself: a file that only grows is asked for from its size here onwards, and only if
what is here is how the host's file begins; the time of the last change tells that nothing has changed. So a link that
is lost, or a process that is killed, at any point loses no byte and doubles none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.remote.answers import Part
from clusterddp.results.target import Kind, Target, locked, unwritable
from clusterddp.run.directory import MAX_RECORD_BYTES, write_bytes

ASK_TIMEOUT_S = 10.0
"""How long a host may say nothing at all."""
PIECE_BYTES = 4 << 20
"""So much is asked for at once, and held in memory."""
TURN_BYTES = 64 << 20
"""So much comes of growing files before the records are looked at again."""
SPARE_BYTES = 16 << 20
"""So much of the disk is left free."""
_MAX_ASIDE = 16
_HEAD_BYTES, _TAIL_BYTES = 512, 4096
"""What is compared of a growing file before more of it is asked for."""

Told = tuple[int, int]
"""What a host tells of a file: bytes, and the time of its last change in ns since the epoch."""


class Answer(Protocol):
    facts: dict[str, Any]
    data: bytes


class Asks(Protocol):
    """What is needed of a session."""

    def ask(self, do: str, facts: Mapping[str, Any] | None = None, *, timeout_s: float = ...) -> Answer:
        """Ask the host, and wait for its answer."""


@dataclass(kw_only=True)
class Pulled:
    """What became of a pull."""

    behind: bool = False
    """True when more is there."""
    untouched: bool = False
    """True when another process was at it, and nothing was done here."""
    problem: ClusterddpError | None = None
    """Why something could not be written here."""


def pull(session: Asks, target: Target, files: Mapping[str, Told]) -> Pulled:
    """Bring home the small and the growing files of a run, as far as they are wanted; `files` is what the host tells.

    Raises: SshError.
    """
    kinds: dict[str, Kind] = {path: kind for path in files if (kind := target.kind_of(path)) is not None}
    done = Pulled()
    try:
        # A lock per node: hosts do not wait for each other, and no file comes from two.
        with locked(target.run, f"mirror-{min(target.nodes)}") as free:
            if not free:
                return Pulled(untouched=True)
            kinds = {
                path: kind for path, kind in kinds.items() if kind != "events" or files[path][0] <= MAX_RECORD_BYTES
            }
            growing = {path: files[path] for path, kind in kinds.items() if kind in {"grows", "events"}}
            done.behind = not _grow(session, target, growing)
            if "events.jsonl" in kinds:
                _merge_events(target)
            for step in ("whole", "end"):  # whoever sees the end sees all that was written before it
                _replace(session, target, {path: files[path] for path, kind in kinds.items() if kind == step}, step)
    except SshError:
        raise
    except OSError as error:
        done.problem = unwritable(target.run, error)
    except ClusterddpError as error:
        done.problem = error
    return done


def read_parts(
    session: Asks, target: Target, parts: list[dict[str, Any]]
) -> Iterable[tuple[dict[str, Any], Part, bytes]]:
    """Ask for pieces of files; yield what was asked, what is told of it, and the piece.

    Raises: SshError.
    """
    reply = session.ask("mirror.read", {"name": target.name, "parts": parts}, timeout_s=ASK_TIMEOUT_S)
    said: list[Part] = reply.facts["parts"]
    if len(said) != len(parts) or sum(told["length"] for told in said) != len(reply.data):
        raise NonsenseError(target.host, f"{len(said)} parts of {len(parts)}, with {len(reply.data):,} bytes")
    begin = 0
    for part, told in zip(parts, said, strict=True):
        if not 0 <= told["length"] <= (0 if told["gone"] else part["limit"]) or told["size"] < 0:
            raise NonsenseError(target.host, f"{told['length']:,} bytes of {part['path']}")
        yield part, told, reply.data[begin : begin + told["length"]]
        begin += told["length"]


def spans_of(path: Path, size: int) -> list[tuple[int, int, str]]:
    """Sum up how a file here begins and ends, for the host to compare with its own."""
    spans = []
    with open(path, "rb") as file:
        for begin, end in ((0, min(size, _HEAD_BYTES)), (max(0, size - _TAIL_BYTES), size)):
            spans.append((begin, end - begin, hashlib.sha256(os.pread(file.fileno(), end - begin, begin)).hexdigest()))
    return spans


def set_aside(path: Path) -> None:
    """Keep what is no longer how the host's file begins, under the next free name: `rank-000.out.1`.

    Raises: ClusterddpError: too many are kept already.
    """
    names = (path.with_name(f"{path.name}.{number}") for number in range(1, _MAX_ASIDE + 1))
    free = next((name for name in names if not name.exists()), None)
    if free is None:
        raise ClusterddpError(f"{path}: the host's file has begun anew {_MAX_ASIDE} times; no more are kept")
    path.rename(free)


def write_piece(path: Path, offset: int, data: bytes, mtime_ns: int | None) -> None:
    """Write a piece where it belongs; `mtime_ns`: the file is complete with it, as of then."""
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


def _grow(session: Asks, target: Target, files: Mapping[str, Told]) -> bool:
    """Bring growing files up to what the host has told.

    False: more is there, and some of it came. A host that sends nothing is not asked again before the next look.
    """
    left, whole = TURN_BYTES, True
    todo = dict(files)
    while todo:
        if left <= 0:
            return False
        parts = list(_next_parts(target, todo))
        if not parts:
            break
        for part, told, data in read_parts(session, target, parts):
            home = target.home(part["path"])
            left -= len(data)
            if told["gone"]:
                todo.pop(part["path"])  # what is here stays
            elif not told["fits"]:
                if not home.exists():
                    raise NonsenseError(target.host, f"{part['path']} does not begin as nothing does")
                set_aside(home)
            elif not data and part["offset"] != told["size"]:
                todo.pop(part["path"])  # the answer was full, or the file is shorter than it was: the next look tells
                whole = False
            else:
                complete = part["offset"] + len(data) == told["size"]
                write_piece(home, part["offset"], data, told["mtime_ns"] if complete else None)
                if complete or part["offset"] + len(data) >= todo[part["path"]][0]:
                    todo.pop(part["path"])
    return whole or left == TURN_BYTES


def _next_parts(target: Target, todo: dict[str, Told]) -> Iterable[dict[str, Any]]:
    """Yield what to ask for next, `PIECE_BYTES` in all; a file that is up to date leaves `todo`."""
    room = PIECE_BYTES
    for path, told in list(todo.items()):
        home = target.home(path)
        try:
            found = os.stat(home)
            size, mtime_ns = found.st_size, found.st_mtime_ns
        except FileNotFoundError:
            size, mtime_ns = 0, -1
        if (size, mtime_ns) == tuple(told):
            todo.pop(path)
        elif room > 0:
            limit = min(room, PIECE_BYTES)
            room -= max(min(limit, told[0] - size), 1)
            yield {"path": path, "offset": size, "limit": limit, "like": spans_of(home, size) if size else []}


def _replace(session: Asks, target: Target, files: Mapping[str, Told], kind: str) -> None:
    """Bring small files home that are others than here."""
    changed = [path for path, told in files.items() if _differs(target.home(path), told, only_missing=kind == "end")]
    while changed:
        batch, changed = changed[:256], changed[256:]
        parts = [{"path": path, "offset": 0, "limit": PIECE_BYTES} for path in batch]
        for part, told, data in read_parts(session, target, parts):
            if told["gone"] or told["length"] < told["size"]:
                continue  # being replaced, or too large for a record; or the answer is full: the next look sees to it
            home = target.home(part["path"])
            home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(home, data, exclusive=kind == "end")
            with contextlib.suppress(FileNotFoundError):
                os.utime(home, ns=(told["mtime_ns"], told["mtime_ns"]))


def _differs(home: Path, told: Told, *, only_missing: bool) -> bool:
    try:
        found = os.stat(home)
    except FileNotFoundError:
        return True
    return not only_missing and (found.st_size, found.st_mtime_ns) != tuple(told)


def _merge_events(target: Target) -> None:
    """Add the head's rows to the run's history, which has rows of this machine too; none is added twice."""
    theirs = target.home("events.jsonl")
    ours = target.run.events
    known = set(ours.read_bytes().splitlines()) if ours.exists() else set()
    whole_lines = theirs.read_bytes().rpartition(b"\n")[0].splitlines() if theirs.exists() else []
    news = b"".join(line + b"\n" for line in whole_lines if line not in known)
    if news:
        with open(os.open(ours, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(news)

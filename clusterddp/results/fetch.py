"""Fetches what is large: checkpoints, each with its manifest and whole or not at all.

A file grows beside its place, so that a link that is lost costs nothing that has come. It takes its place when it is
what the manifest says, or has not changed while it was copied.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.results.pull import PIECE_BYTES, SPARE_BYTES, Asks, Told, read_parts, spans_of, write_piece
from clusterddp.results.target import Target, locked, unwritable
from clusterddp.run.directory import sync_directory, write_bytes
from clusterddp.wire import read_object

_MANIFEST = re.compile(r"checkpoints/step-(?P<step>\d+)-a(?P<attempt>\d+)\.json")
_LOCK_S = 1.0


class _GoneError(Exception):
    """The host no longer has the file, or has another one in its place."""


class _DamagedError(Exception):
    """What the host has cannot be believed."""


class Sum(NamedTuple):
    """What a manifest says of a file."""

    sha256: str
    num_bytes: int


@dataclass(kw_only=True)
class Fetched:
    """What became of a fetch."""

    complete: bool = True
    notes: list[str] = field(default_factory=list)
    """What was not fetched and never will be, and why."""
    problem: ClusterddpError | None = None
    """Why something could not be written here; what has come of it is kept for the next time if there is room."""


def fetch(session: Asks, target: Target, files: Mapping[str, Told], say: Callable[[str], None]) -> Fetched:
    """Fetch what is large and wanted of a run; `files` is what the host tells. `say` hears how much it is.

    Raises: SshError.
    """
    wanted = {path: files[path] for path in files if target.kind_of(path) == "big"}
    done = Fetched()
    if not wanted:
        return done
    try:
        with locked(target.run, "fetch", _LOCK_S) as free:
            if not free:
                return Fetched(complete=False)
            missing = _missing(target, wanted)
            if missing:
                num_bytes = sum(told[0] for told in missing.values())
                say(f"fetching {_count(len(missing))}, {num_bytes / 1e6:.1f} MB, from {target.host}")
                _demand_room(target, num_bytes)
                _fetch_all(session, target, missing, wanted, done)
    except SshError:
        raise
    except OSError as error:
        done.problem, done.complete = unwritable(target.run, error), False
    except ClusterddpError as error:
        done.problem, done.complete = error, False
    return done


def checkpoints_among(files: Mapping[str, Told]) -> tuple[str, ...]:
    """Name the checkpoints, oldest first: a later attempt's is newer, whatever its step."""
    found = [match for path in files if (match := _MANIFEST.fullmatch(path))]
    found.sort(key=lambda match: (int(match["attempt"]), int(match["step"])))
    return tuple(Path(match.string).stem for match in found)


def _fetch_all(
    session: Asks, target: Target, missing: Mapping[str, Told], files: Mapping[str, Told], done: Fetched
) -> None:
    """Fetch the newest checkpoint first, then the older ones, then whatever else there is."""
    generations = [f"checkpoints/{name}" for name in reversed(checkpoints_among(missing))]
    for generation in generations:
        _fetch_checkpoint(session, target, generation, files, done)
    of_checkpoints = {f"{generation}{suffix}" for generation in generations for suffix in (".json", ".pt")}
    for path in missing.keys() - of_checkpoints:
        try:
            _fetch_file(session, target, path, missing[path])
        except _GoneError:
            done.complete = False  # it changes: the next look tells what it is now


def _fetch_checkpoint(session: Asks, target: Target, generation: str, files: Mapping[str, Told], done: Fetched) -> None:
    path, data = f"{generation}.json", f"{generation}.pt"
    ((_, told, text),) = read_parts(session, target, [{"path": path, "offset": 0, "limit": PIECE_BYTES}])
    try:
        if told["gone"] or data not in files:
            raise _GoneError
        expected = _read_manifest(target, generation, text)
        if _is(target.home(data), expected):
            os.utime(target.home(data), ns=(files[data][1], files[data][1]))
        else:
            _fetch_file(session, target, data, files[data], expected)
    except _GoneError:
        done.complete = False  # a newer one has taken its place, and is told of next time
        return
    except _DamagedError as error:
        done.notes.append(f"{target.host}: the checkpoint {Path(generation).name} was left there: {error}")
        return
    home = target.home(path)
    write_bytes(home, text)
    os.utime(home, ns=(told["mtime_ns"], told["mtime_ns"]))


def _read_manifest(target: Target, generation: str, text: bytes) -> Sum:
    """Raises: _DamagedError: it is none, or of another file."""
    try:
        manifest = read_object(text)
        name, expected = manifest["file"], Sum(str(manifest["sha256"]), int(manifest["bytes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError("its manifest is none") from error
    if f"checkpoints/{name}" != f"{generation}.pt":
        raise _DamagedError(f"its manifest names {name!r}")
    return expected


def _fetch_file(session: Asks, target: Target, path: str, listed: Told, expected: Sum | None = None) -> None:
    """Fetch one file to its place; `expected`: what its manifest says.

    Raises: _GoneError: it is no longer there, or is another one. _DamagedError: it is not what the manifest says.
    """
    home = target.home(path)
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = home.with_name(f".{home.name}.{listed[1]}.part")
    for other in home.parent.glob(f".{glob.escape(home.name)}.*.part"):
        if other != partial:
            other.unlink(missing_ok=True)
    _grow_part(session, target, path, listed, partial)
    if expected is not None and not _is(partial, expected):
        partial.unlink()
        raise _DamagedError("its sum is not its manifest's")
    _put_in_place(partial, home, listed[1])


def _grow_part(session: Asks, target: Target, path: str, listed: Told, partial: Path) -> None:
    """Bring a file home beside its place, from where it was left.

    Raises: _GoneError: it is no longer there, or is another one than was listed.
    """
    while True:
        size = partial.stat().st_size if partial.exists() else 0
        part = {"path": path, "offset": size, "limit": PIECE_BYTES, "like": spans_of(partial, size) if size else []}
        ((_, told, data),) = read_parts(session, target, [part])
        if told["gone"] or (told["size"], told["mtime_ns"]) != tuple(listed):
            partial.unlink(missing_ok=True)
            raise _GoneError
        if not told["fits"] and size:
            partial.unlink()
            continue
        if not data and size < told["size"]:
            raise NonsenseError(target.host, f"nothing of {path}")
        try:
            write_piece(partial, size, data, None)
        except OSError:
            partial.unlink(missing_ok=True)  # the disk is full: it shall not stay so because of us
            raise
        if size + len(data) >= told["size"]:
            return


def _put_in_place(partial: Path, home: Path, mtime_ns: int) -> None:
    with open(partial, "rb") as file:
        os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        os.fsync(file.fileno())
    partial.replace(home)
    sync_directory(home.parent)


def _missing(target: Target, wanted: Mapping[str, Told]) -> dict[str, Told]:
    return {path: told for path, told in wanted.items() if not _is_here(target.home(path), told)}


def _is_here(home: Path, told: Told) -> bool:
    try:
        found = os.stat(home)
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == tuple(told)


def _is(path: Path, expected: Sum) -> bool:
    """Say whether the file at `path` is the one that a manifest speaks of."""
    try:
        if path.stat().st_size != expected.num_bytes:
            return False
        total = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    except FileNotFoundError:
        return False
    return total.hexdigest() == expected.sha256


def _demand_room(target: Target, num_bytes: int) -> None:
    free = shutil.disk_usage(target.run.path).free
    if num_bytes + SPARE_BYTES > free:
        raise ClusterddpError(
            f"{target.run.path}: {num_bytes / 1e6:.1f} MB are to be fetched from {target.host}, "
            f"{free / 1e6:.1f} MB are free here",
            hint=f"make room, then clusterddp status {target.run.name} fetches them",
        )


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"

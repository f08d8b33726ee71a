"""Downloads the large files of a run: its output and its checkpoints, each complete with its manifest or not at all.

A file is downloaded under a temporary name, so a later try resumes after a broken connection. It gets its name once it
matches the manifest, or has not changed during the download.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from clusterddp.errors import ClusterddpError
from clusterddp.remote.download import (
    PIECE_BYTES,
    SPARE_BYTES,
    Asks,
    Copy,
    GoneError,
    Listed,
    append_pieces,
    read_listed,
    read_parts,
)
from clusterddp.results.download import Downloaded, downloading
from clusterddp.results.host_run import HostRun
from clusterddp.run.attempts import Report
from clusterddp.system.file_set import read_sum
from clusterddp.system.files import sync_directory, write_bytes
from clusterddp.wire import read_object

_MANIFEST = re.compile(r"checkpoints/step-(?P<step>\d+)-a(?P<attempt>\d+)\.json")
_LOCK_S = 1.0


class _DamagedError(Exception):
    """A checkpoint on the host does not match its manifest, or the manifest is invalid."""


class Sum(NamedTuple):
    """The sum and size of a file in a manifest."""

    sha256: str
    num_bytes: int


def download_large(session: Asks, host_run: HostRun, files: Mapping[str, Listed], report: Report) -> Downloaded:
    """Download the large files of a run that are wanted, out of `files`, which the host lists.

    Raises: SshError.
    """
    wanted = {path: listed for path, listed in files.items() if host_run.kind_of(path) == "large"}
    if not wanted:
        return Downloaded()
    with downloading(host_run.run, "fetch", _LOCK_S) as done:
        if done.is_locked:
            return done
        missing = {path: listed for path, listed in wanted.items() if not _is_here(host_run.place_of(path), listed)}
        if missing:
            num_bytes = sum(listed[0] for listed in missing.values())
            count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
            report(f"downloading {count}, {num_bytes / 1e6:.1f} MB, from {host_run.host}")
            _check_room(host_run, num_bytes)
            _download_all(session, host_run, missing, wanted, done)
    return done


def checkpoints_among(files: Mapping[str, Listed]) -> tuple[str, ...]:
    """Return the names of the checkpoints, oldest first: by attempt, then by step."""
    found = [match for path in files if (match := _MANIFEST.fullmatch(path))]
    found.sort(key=lambda match: (int(match["attempt"]), int(match["step"])))
    return tuple(Path(match.string).stem for match in found)


def _download_all(
    session: Asks, host_run: HostRun, missing: Mapping[str, Listed], files: Mapping[str, Listed], done: Downloaded
) -> None:
    """Download the newest checkpoint first, then the older ones, then the other files."""
    generations = [f"checkpoints/{name}" for name in reversed(checkpoints_among(missing))]
    of_checkpoints = {f"{generation}{suffix}" for generation in generations for suffix in (".json", ".pt")}
    for generation in generations:
        try:
            _download_checkpoint(session, host_run, generation, files)
        except GoneError:
            done.complete = False  # a newer one has replaced it; the next listing has that
        except _DamagedError as error:
            done.notes.append(f"{host_run.host}: the checkpoint {Path(generation).name} was not downloaded: {error}")
    for path in missing.keys() - of_checkpoints:
        try:
            _download_file(session, host_run, path, missing[path])
        except GoneError:
            done.complete = False  # it changes; the next listing has its new size


def _download_checkpoint(session: Asks, host_run: HostRun, generation: str, files: Mapping[str, Listed]) -> None:
    """Download a checkpoint, then its manifest.

    Raises: GoneError: it is no longer there. _DamagedError: it does not match its manifest.
    """
    path, data = f"{generation}.json", f"{generation}.pt"
    part = {"path": path, "offset": 0, "limit": PIECE_BYTES}
    ((_, answer, text),) = read_parts(session, host_run.name, [part])
    if answer["gone"] or data not in files:
        raise GoneError
    expected = _read_manifest(generation, text)
    place = host_run.place_of(data)
    if _matches(place, expected):
        os.utime(place, ns=(files[data][1], files[data][1]))
    else:
        _download_file(session, host_run, data, files[data], expected)
    write_bytes(host_run.place_of(path), text)
    os.utime(host_run.place_of(path), ns=(answer["mtime_ns"], answer["mtime_ns"]))


def _read_manifest(generation: str, text: bytes) -> Sum:
    """Raises: _DamagedError: it is no manifest, or that of another file."""
    try:
        manifest = read_object(text)
        name, expected = manifest["file"], Sum(str(manifest["sha256"]), int(manifest["bytes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError("its manifest is invalid") from error
    if f"checkpoints/{name}" != f"{generation}.pt":
        raise _DamagedError(f"its manifest names {name!r}")
    return expected


def _download_file(session: Asks, host_run: HostRun, path: str, listed: Listed, expected: Sum | None = None) -> None:
    """Download one file to its place; `expected`: the sum and size in its manifest.

    Raises: GoneError: it is no longer there, or was replaced. _DamagedError: it does not match the manifest.
    """
    place = host_run.place_of(path)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{listed[1]}.part")
    for other in place.parent.glob(f".{glob.escape(place.name)}.*.part"):
        if other != partial:
            other.unlink(missing_ok=True)
    copy = Copy(place=partial, listed=listed, start_again=Path.unlink, exact=True)
    try:
        append_pieces(session, host_run.name, {path: copy})
    except OSError:
        partial.unlink(missing_ok=True)  # the disk is full: free what the download took
        raise
    if expected is not None and not _matches(partial, expected):
        partial.unlink()
        raise _DamagedError("its sum differs from its manifest's")
    _put_in_place(partial, place)


def _put_in_place(partial: Path, place: Path) -> None:
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(place)
    sync_directory(place.parent)


def _is_here(place: Path, listed: Listed) -> bool:
    try:
        return read_listed(place) == tuple(listed)
    except OSError:  # a name that this file system refuses must not stop the other downloads
        return False


def _matches(path: Path, expected: Sum) -> bool:
    try:
        return path.stat().st_size == expected.num_bytes and read_sum(os.fsencode(path)).hex() == expected.sha256
    except FileNotFoundError:
        return False


def _check_room(host_run: HostRun, num_bytes: int) -> None:
    """Raises: ClusterddpError: the disk has too little room."""
    free = shutil.disk_usage(host_run.run.path).free
    if num_bytes + SPARE_BYTES > free:
        raise ClusterddpError(
            f"{host_run.run.path}: {num_bytes / 1e6:.1f} MB to download from {host_run.host}, {free / 1e6:.1f} MB free",
            hint=f"free some space, then clusterddp status {host_run.run.name} downloads them",
        )

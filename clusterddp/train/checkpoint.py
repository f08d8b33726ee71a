"""Checkpoints on disk: written completely or not at all, checked before they are read; the newest valid one counts.

A generation is `step-00000123-a0.pt` (step, attempt) and a manifest of the same name that ends in `.json`, written
after it; without the manifest, with its sum, there is no checkpoint. A sharded state has a file for each rank, too,
`step-00000123-a0.shard-00002` (see sharded.py), and its sum in the manifest. No file is ever overwritten: an attempt
that was cut off and still writes, late, cannot change its successor's files.

A thread of rank 0 writes while training goes on; what it writes is a copy. `Timer` says when the next one is due. torch
is imported when a state is pickled or unpickled, so that a script that has not imported it can read manifests.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, refuse_if_stale
from clusterddp.system.file_set import read_sum
from clusterddp.system.files import write_bytes
from clusterddp.system.storage import retry_outage
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    from clusterddp.train.group import Group

SHARDS = "clusterddp.shards"
"""The key in a sharded state under which it says what the shards have; see sharded.py."""
_WAIT_AFTER_ERROR_S = 10.0
_LEAST_S = 60.0
_SHARE = 0.01
"""Without a time of the user's, checkpoints take at most this share of the time from the steps."""
_GENERATION = re.compile(r"step-\d{8,}-a(?P<attempt>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The size and the sum of a file: one rank's part of a sharded state."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Shard):
    """The size, the sum and the origin of a checkpoint's data."""

    attempt: int
    epoch: int | None
    """None, as `samples`: a script has written it."""
    step: int
    samples: int | None
    created: float
    shards: tuple[Shard, ...] = ()
    """By rank; empty: the whole state is in `file`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Where an attempt of a run keeps its checkpoints, and how many generations."""

    run: RunDir
    attempt: int
    keep: int

    @property
    def directory(self) -> Path:
        return self.run.checkpoints

    def stem(self, step: int) -> str:
        """Return the name of the generation that this attempt writes after `step` steps."""
        return f"step-{step:08d}-a{self.attempt}"


class Timer:
    """Says when a checkpoint is due by time: so long after the one before began."""

    def __init__(self, every_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_s = every_s
        """Seconds, infinite for never; None: at least a minute, and so long that checkpoints take 1 % of the time."""
        self.is_owed = False
        """A checkpoint was due for another reason while the one before was still being written."""
        self._clock = clock
        self._cost_s = 0.0
        self._began = clock()

    @property
    def interval_s(self) -> float:
        return max(_LEAST_S, self._cost_s / _SHARE) if self.every_s is None else self.every_s

    def is_due(self) -> bool:
        return self.is_owed or self._clock() - self._began >= self.interval_s

    def saved(self, cost_s: float) -> str:
        """Note that a checkpoint is made, or that there is none to make yet; it has taken `cost_s` from the steps.

        Return a sentence for people when the interval follows from that, and has not before.
        """
        before, self._cost_s = self.interval_s, cost_s
        self.is_owed, self._began = False, self._clock() - cost_s
        if self.every_s is not None or before > _LEAST_S or self.interval_s <= _LEAST_S:
            return ""
        minutes = f"{self.interval_s / 60:.1f} min"
        return (
            f"a checkpoint takes {cost_s:.1f} s from the steps: the next ones are {minutes} apart, to take {_SHARE:.0%}"
        )


class Writer:
    """Writes checkpoints in a thread, one at a time; in a `with` it waits for the last one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait; after an error no longer than some seconds, and that error is raised, not the writer's."""
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(_WAIT_AFTER_ERROR_S)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, write: Callable[[], object]) -> None:
        """Call `write` in the thread; wait for the checkpoint before it."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        if self._thread is not None:
            self._thread.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a checkpoint since the last call, without waiting."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # the trainer raises it
            self._error = error


def write_checkpoint(store: Store, state: dict[str, Any], shards: tuple[Shard, ...] = ()) -> Manifest:
    """Commit `state` as the newest checkpoint, then drop the generations beyond `store.keep`.

    `shards` are written already.
    Raises: ClusterddpError: a later attempt of the run has begun; or the file system refuses, and then the
    checkpoints that were there are untouched.
    """
    epoch, samples = _whole(state, "epoch"), _whole(state, "samples")
    return commit(store, encode(state), step=state["step"], epoch=epoch, samples=samples, shards=shards)


def commit(
    store: Store,
    data: bytes | memoryview,
    *,
    step: int,
    epoch: int | None = None,
    samples: int | None = None,
    shards: tuple[Shard, ...] = (),
) -> Manifest:
    """Write `data` durably, then its manifest; wait while the storage is away. See `write_checkpoint`."""
    manifest = Manifest(
        file=f"{store.stem(step)}.pt",
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        attempt=store.attempt,
        epoch=epoch,
        step=step,
        samples=samples,
        created=time.time(),
        shards=shards,
    )
    return retry_outage(lambda: _commit(store, data, manifest))


def _commit(store: Store, data: bytes | memoryview, manifest: Manifest) -> Manifest:
    path = store.directory / manifest.file
    with contextlib.suppress(OSError, ClusterddpError):
        already = _read_manifest(path.with_suffix(".json"))
        read_verified(store.directory, already)
        return already  # a stop right after an epoch's end; writing over it would put it at risk
    write_file(store, path, data)
    try:
        refuse_if_stale(store.run, store.attempt)
        content = {key: value for key, value in asdict(manifest).items() if value or key != "shards"}
        _write(path.with_suffix(".json"), json.dumps(content, indent=1).encode())
    except ClusterddpError:
        path.unlink(missing_ok=True)
        raise
    _prune(store)
    return manifest


def read_newest(store: Store, report: Callable[[str], None]) -> tuple[Manifest, bytes] | None:
    """Read the newest valid checkpoint's bytes; one that does not match its manifest is reported and skipped.

    Raises: OSError: the run's storage is away, which is not the same as no checkpoint.
    """
    retry_outage(store.run.attempts)
    for path in _manifests(store):
        try:
            manifest = _read_manifest(path)
            return manifest, read_verified(store.directory, manifest)
        except (OSError, ClusterddpError) as error:
            report(f"the checkpoint {path.name} is not valid and is passed over: {error}")
    return None


def read_newest_on_all(
    store: Store, group: Group, report: Callable[[str], None], map_location: Any = "cpu"
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the newest valid checkpoint, the same on every rank, and on rank 0 its file's name.

    Only rank 0 reads, so no disk need be shared.
    """
    from clusterddp.train.group import broadcast_bytes

    newest = read_newest(store, report) if group.is_first else None
    data = broadcast_bytes(None if newest is None else newest[1], group)
    return None if newest is None else newest[0].file, None if data is None else decode(data, map_location)


def newest_manifest(store: Store) -> Manifest | None:
    """Read the newest manifest of an earlier attempt whose data has its size; their sums are not checked."""
    earlier = (path for path in _manifests(store) if _name_age(path)[0] < store.attempt)
    return next((_read_manifest(path) for path in earlier if _data_fits(path)), None)


def newest_attempt(store: Store) -> int | None:
    """Return the latest attempt that has left a manifest; None when there is none."""
    return max((_name_age(path)[0] for path in _manifests(store)), default=None)


def read_verified(directory: Path, manifest: Manifest) -> bytes:
    """Read a checkpoint's bytes and check them and its shards against the manifest, before anything unpickles them."""
    data = (directory / manifest.file).read_bytes()
    _verify(manifest, len(data), hashlib.sha256(data).hexdigest())
    with ThreadPoolExecutor() as pool:
        sums = pool.map(lambda shard: read_sum(os.fsencode(directory / shard.file)), manifest.shards)
        for shard, content in zip(manifest.shards, sums, strict=True):
            _verify(shard, (directory / shard.file).stat().st_size, content.hex())
    return data


def _verify(expected: Shard, num_bytes: int, sha256: str) -> None:
    if num_bytes != expected.bytes:
        raise ClusterddpError(f"{expected.file} has {num_bytes:,} bytes, its manifest has {expected.bytes:,}")
    if sha256 != expected.sha256:
        raise ClusterddpError(f"{expected.file} is damaged: its sha256 is not the manifest's")


def encode(state: Any) -> memoryview:
    """Pickle a state for `decode`."""
    import torch

    from clusterddp.train.host_copy import cut_apart

    buffer = io.BytesIO()
    torch.save(cut_apart(state), buffer)
    return buffer.getbuffer()


def decode(data: bytes, map_location: Any = "cpu") -> dict[str, Any]:
    """Unpickle a checkpoint's verified bytes; only tensors and plain values are accepted."""
    import torch

    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    return state


def _whole(state: dict[str, Any], key: str) -> int | None:
    """Return a number of the trainer's state; a script may have put anything there."""
    value = state.get(key)
    return value if isinstance(value, int) else None


def write_file(store: Store, path: Path, data: bytes | memoryview) -> None:
    """Write a file of a checkpoint durably; it does not count before there is a manifest.

    Raises: ClusterddpError: as `write_checkpoint`.
    """
    refuse_if_stale(store.run, store.attempt)
    _write(path, data)


def _write(path: Path, data: bytes | memoryview) -> None:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(path, data)
    except (OSError, ClusterddpError) as error:
        raise ClusterddpError(
            f"the checkpoint was not written: {error}",
            hint="earlier checkpoints are untouched: make room or mend the directory, then resume the run",
        ) from error


def _read_manifest(path: Path) -> Manifest:
    """Raises: ClusterddpError: the manifest is invalid."""
    try:
        manifest = build(Manifest, read_object(path.read_bytes()))
    except ValueError as error:
        raise ClusterddpError(f"not a manifest: {error}") from error
    if manifest.file != f"{path.stem}.pt":
        raise ClusterddpError(f"it names the file {manifest.file!r}, not {path.stem}.pt")
    names = [shard_name(path.stem, rank) for rank in range(len(manifest.shards))]
    if [shard.file for shard in manifest.shards] != names:
        raise ClusterddpError(f"it names shards that are not those of {path.stem}")
    return manifest


def shard_name(stem: str, rank: int) -> str:
    return f"{stem}.shard-{rank:05d}"


def _prune(store: Store) -> None:
    """Remove generations beyond those to keep, and the leftovers of killed writers.

    Files of a later attempt stay: this attempt may have stalled after `refuse_if_stale`, while its successor began. A
    manifest is removed before its data, so a crash in between leaves no manifest without data.
    """
    refuse_if_stale(store.run, store.attempt)
    manifests = _manifests(store)
    kept = {path.stem for path in [path for path in manifests if _data_fits(path)][: store.keep]}
    rest = [path for path in store.directory.iterdir() if path not in manifests]
    for path in (*manifests, *rest):
        match = _GENERATION.match(path.name.lstrip("."))
        if match and match.group() not in kept and int(match["attempt"]) <= store.attempt:
            path.unlink(missing_ok=True)


def _manifests(store: Store) -> list[Path]:
    """List the manifests, newest first."""
    return sorted(store.directory.glob("step-*.json"), key=_name_age, reverse=True)


def _data_fits(path: Path) -> bool:
    """Return whether the data of the manifest at `path` has its size (its sum is checked when it is read)."""
    try:
        manifest = _read_manifest(path)
        return all((path.parent / each.file).stat().st_size == each.bytes for each in (manifest, *manifest.shards))
    except (OSError, ClusterddpError):
        return False


def _name_age(path: Path) -> tuple[int, int]:
    """Order by (attempt, step), from the name only, so that a damaged file changes no order."""
    match = re.fullmatch(r"step-(\d+)-a(\d+)", path.stem)
    return (int(match[2]), int(match[1])) if match else (-1, -1)

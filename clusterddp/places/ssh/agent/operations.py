"""The operations of an agent: what each receives and answers. Both ends of the connection check messages by this table.

A message is one line of JSON, `{"do": OPERATION, ...}` and its answer `{"ok": true, ...}`, with `size` bytes after it.
Keys that are missing become None, others are dropped, and a value of another type is refused (wire.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, TypedDict, TypeVar

from clusterddp.facts.machine import Machine
from clusterddp.network.choice import HostNetwork, Probe, Target
from clusterddp.run.leftovers import Ended, RunHere
from clusterddp.run.removal import Removed, Storage

_Variables = dict[str, str]
_Json = dict[str, Any]
HELLO: Mapping[str, Any] = {
    "hostname": str,
    "uid": int,
    "user": str,
    "home": str,
    "root": str,
    "python": str,
    "path": str,
    "version": str,
    "platform": str,
    "boot_id": str,
    "pid": int,
    "have": bool,
}
"""What the boot reports of the host (boot.py)."""
_CHUNK_BYTES = 1 << 18
_Thing = TypeVar("_Thing")


class Operation(NamedTuple):
    """The keys and types of a request, and of its answer."""

    request: Mapping[str, Any]
    answer: Mapping[str, Any]


class NamedRun(TypedDict):
    """A run on a host."""

    name: str
    """The name of its directory there."""
    token: str
    begin: int
    """How many files of its list were sent already."""
    rejoins: bool
    """A node of it whose host was switched off may take part again."""


class Look(TypedDict):
    """What a host answers about a run."""

    boot: str
    """The boot id of the host."""
    alive: list[str]
    """The roles of the run's processes there: `s0`, `g0`, `n0`."""
    has_run: bool
    end_attempt: int | None
    end: dict[str, Any] | None
    """The newest end that is recorded there."""
    files: dict[str, tuple[int, int]] | None
    """Path -> size, time of the last change in ns; None: as in the last list on this connection."""
    more: bool
    """True: the list goes on."""


class Part(TypedDict):
    """A piece of a file of a run that is wanted."""

    path: str
    offset: int
    limit: int


class Piece(TypedDict):
    """The answer to a `Part`: how many of the bytes that follow the answer are of this file."""

    length: int
    gone: bool
    """True: it cannot be read."""
    size: int
    mtime_ns: int


class Address(TypedDict):
    """Where the head listens for the other supervisors."""

    host: str
    port: int


OPERATIONS: Mapping[str, Operation] = {
    # The connection: any request is a heartbeat.
    "beat": Operation({}, {"time": float}),
    # The host: its facts, GPUs and network, the live processes of all runs, and old files.
    "host.facts": Operation(
        {"data_dir": str | None, "variables": _Variables | None, "with_gpus": bool | None, "with_driver": bool | None},
        {"facts": Machine},
    ),
    "host.lease": Operation(
        {"count": int, "run": str, "hold": str | None},
        {"gpus": list[str] | None, "hold": list[int], "busy": dict[str, str]},
    ),
    "host.listen": Operation(
        {"nonce": str | None, "name": str, "head": bool | None, "master_port": int | None},
        {"network": HostNetwork | None},
    ),
    "host.probe": Operation(
        {"nonce": str, "source": int, "targets": list[Target], "within_s": float}, {"probes": list[Probe]}
    ),
    "host.list": Operation(
        {"tokens": list[str] | None, "older_than_s": float | None}, {"runs": list[RunHere], "stored": Storage | None}
    ),
    "host.remove": Operation({"places": list[str], "older_than_s": float | None}, {"removed": list[Removed]}),
    # Uploads.
    "store.compare": Operation(
        {"sum": str | None, "target": str | None},
        {"missing": bool, "place": str, "in_the_way": tuple[str, ...], "stale": tuple[str, ...], "stale_count": int},
    ),
    "store.put": Operation({"sum": str | None, "target": str | None}, {}),
    # Runs: start, stop, end, and what they have written.
    "run.prepare": Operation(
        {"name": str, "attempt": int, "plan": _Json, "record": _Json, "spec": str, "code": str | None},
        {"run_dir": str},
    ),
    "run.supervise": Operation(
        {"order": _Json, "variables": _Variables, "patience_s": int}, {"pid": int, "link": Address | None}
    ),
    "run.ask": Operation(
        {"name": str, "what": Literal["stop", "stacks", "cancel", "release"], "reason": str}, {"found": bool}
    ),
    "run.end": Operation({"tokens": list[str], "patience_s": float | None}, {"ended": list[Ended]}),
    "run.look": Operation({"runs": list[NamedRun]}, {"runs": dict[str, Look]}),
    "run.read": Operation({"name": str, "parts": list[Part]}, {"parts": list[Piece]}),
}


class Closeable(Protocol):
    """What `close` releases."""

    def close(self) -> object: ...


_Held = TypeVar("_Held", bound=Closeable)


@dataclass(kw_only=True)
class Host:
    """This host, for as long as the connection lasts."""

    root: Path
    """Directory of all files of clusterddp on this host."""
    package: Path
    """Directory of this package, for PYTHONPATH of what is started."""
    patience_s: int
    """How long the agent waits for a request before it takes its launcher for dead, and ends."""
    held: list[Closeable] = field(default_factory=list)
    listed: dict[str, Any] = field(default_factory=dict)
    """The last list of files of each run that was sent."""

    def hold(self, thing: _Held) -> _Held:
        """Keep something until the agent ends; ending closes it, whatever ends the agent."""
        self.held.append(thing)
        return thing

    def find_held(self, kind: type[_Thing]) -> list[_Thing]:
        """List what is kept of one kind."""
        return [thing for thing in self.held if isinstance(thing, kind)]

    def release(self, thing: Closeable) -> None:
        """Close something that was kept."""
        self.held.remove(thing)
        with contextlib.suppress(OSError):
            thing.close()

    def python_path(self, environ: Mapping[str, str]) -> str:
        """Return PYTHONPATH of `environ` with this package first."""
        return os.pathsep.join(filter(None, (str(self.package), environ.get("PYTHONPATH"))))

    def run_dir(self, name: str) -> Path:
        """Return the directory of a run; `name` is `<run>.<first 8 of its token>`."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise ValueError(f"not the name of a run's directory: {name!r}")
        return self.root / "runs" / name


class Body:
    """The bytes that came with a request; those that an operation does not read are dropped."""

    def __init__(self, stream: BinaryIO, size: int, progress: Callable[[], object] = lambda: None) -> None:
        self.size = size
        self._stream = stream
        self._left = size
        self._progress = [progress]

    def on_progress(self, call: Callable[[], object]) -> None:
        """Call a function whenever bytes have arrived."""
        self._progress.append(call)

    def read(self, size: int = _CHUNK_BYTES) -> bytes:
        """Read at most `size` bytes; empty at the end.

        Raises: EOFError: the connection ended before all had come.
        """
        if not self._left:
            return b""
        data = self._stream.read(min(size, self._left))
        if not data:
            raise EOFError("the connection ended in the middle of a request")
        self._left -= len(data)
        for call in self._progress:
            call()
        return data

    def read_all(self) -> bytes:
        chunks = []
        while chunk := self.read():
            chunks.append(chunk)
        return b"".join(chunks)

    def drain(self) -> None:
        while self.read():
            pass


@dataclass(kw_only=True)
class Reply:
    """An answer with data; `chunks` together are `size` bytes."""

    facts: dict[str, Any]
    chunks: Iterable[bytes]
    size: int


Handler = Callable[[Host, dict[str, Any], Body], "dict[str, Any] | Reply"]

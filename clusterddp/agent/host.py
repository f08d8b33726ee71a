"""What an operation of the agent receives and returns: the host, the bytes of a request, an answer with data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

_CHUNK_BYTES = 1 << 18


class Closeable(Protocol):
    """What `close` releases."""

    def close(self) -> object: ...


_Held = TypeVar("_Held", bound=Closeable)
_Thing = TypeVar("_Thing")


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

    def release_all(self, kind: type[Closeable]) -> None:
        """Close all that was kept of one kind."""
        for thing in self.find_held(kind):
            self.release(thing)

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

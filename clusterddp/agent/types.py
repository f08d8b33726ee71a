"""What an operation of the agent gets and gives: the host, the bytes that came with the request, the reply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

_CHUNK_BYTES = 1 << 18


class Closeable(Protocol):
    """What is let go by `close`."""

    def close(self) -> object: ...


_Held = TypeVar("_Held", bound=Closeable)


@dataclass(kw_only=True)
class Host:
    """This host, for as long as the connection lasts."""

    root: Path
    """Directory of everything that is ours here."""
    package: Path
    """Where this package lies, for PYTHONPATH of what is started."""
    patience_s: int
    """How long nothing may be asked before the agent takes its launcher for dead, and ends."""
    held: list[Closeable] = field(default_factory=list)

    def hold(self, thing: _Held) -> _Held:
        """Keep something until the agent ends; ending closes it, whatever ends the agent."""
        self.held.append(thing)
        return thing

    def let_go(self, thing: Closeable) -> None:
        """Close something that was kept."""
        self.held.remove(thing)
        with contextlib.suppress(OSError):
            thing.close()

    def run_dir(self, name: str) -> Path:
        """Return where a run lies; `name` is `<run>.<first 8 of its token>`."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise ValueError(f"not the name of a run's directory: {name!r}")
        return self.root / "runs" / name


class Body:
    """The bytes that came with a request; what an operation leaves is read and forgotten."""

    def __init__(self, stream: BinaryIO, size: int, progress: Callable[[], object] = lambda: None) -> None:
        self.size = size
        self._stream = stream
        self._left = size
        self._progress = progress

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
        self._progress()
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


Operation = Callable[[Host, dict[str, Any], Body], "dict[str, Any] | Reply"]

"""What a command on a login node writes, as it appears here: its bytes, and the name of the run that it started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from clusterddp.cli.terminal import say, writing_stdout
from clusterddp.look.printable import printable

if TYPE_CHECKING:
    from clusterddp.remote.uploader import Progress

_WORTH_TELLING_BYTES = 5_000_000


class RunNote:
    """Reads the first line that a submit writes: the name of the run, or JSON that has it."""

    def __init__(self, keep: Callable[[str], object]) -> None:
        self.run: str | None = None
        self._keep = keep
        self._line = b""

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        """Take some output; return that line, when it is complete, and what follows it."""
        if self.run is not None:
            return b"", data
        head, newline, rest = (self._line + data).partition(b"\n")
        if not newline:
            self._line = head
            return b"", b""
        self.run = _name_of(head.decode(errors="replace"))
        self._keep(self.run)
        return head + newline, rest


class Output:
    """The streams of this command."""

    def __init__(self, params: Mapping[str, Any], note: RunNote | None) -> None:
        self._note = note
        # The person at the terminal has read the name already; there nobody knew of the terminal.
        self._hides_name = sys.stdout.isatty() and params.get("output") != "json"
        # Lines of ranks: what they say must not command the terminal.
        self._escapes = (
            sys.stdout.isatty() and ("tail_lines" in params or params.get("follow")) and not params.get("raw")
        )
        self._line = b""
        self._told = False

    def write_out(self, data: bytes) -> None:
        first = b""
        if self._note:
            first, data = self._note.read(data)
        if first and not self._hides_name:
            self._put(first)
        if not self._escapes:
            self._put(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        self._put(b"".join(printable(line.rstrip(b"\r")).encode() + b"\n" for line in lines))

    def write_err(self, data: bytes) -> None:
        sys.stderr.buffer.write(data)
        sys.stderr.flush()

    def finish(self) -> None:
        """Write what the last line has, if it has no end."""
        if self._line:
            self._put(printable(self._line).encode())

    def watch(self, progress: Progress) -> None:
        """Tell once that something large is being sent."""
        if progress.total_bytes >= _WORTH_TELLING_BYTES and not self._told:
            self._told = True
            say(str(progress))

    def _put(self, data: bytes) -> None:
        with writing_stdout():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def _name_of(line: str) -> str:
    try:
        words = json.loads(line)
    except ValueError:
        return line
    return str(words.get("run") or words.get("sweep")) if isinstance(words, dict) else line

"""A user at a terminal: a command that runs in a pseudoterminal of a test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE, wait_until

_TAKE_TERMINAL = ["setsid", "--ctty", "--wait"]


@dataclass(kw_only=True)
class Typist:
    """Types into a command, and reads what appears."""

    process: subprocess.Popen[bytes]
    terminal: int
    """The end of the pseudoterminal at which people sit."""
    own_end: int
    seen: bytes = field(default=b"")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def look(self) -> str:
        """Return all that has appeared so far."""
        while select.select([self.terminal], [], [], 0.05)[0]:
            self.seen += os.read(self.terminal, 65536)
        return self.seen.decode(errors="replace")

    def await_text(self, text: str, within_s: float = 30) -> str:
        wait_until(lambda: text in self.look(), within_s, what=self.look)
        return self.look()

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.own_end)

    def await_exit(self, within_s: float = 30) -> int:
        deadline = time.monotonic() + PATIENCE * within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.look()
            self.look()
        return self.process.returncode


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def typing_into(
    argv: Sequence[str], *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Typist]:
    """Run a command in a terminal of 30 rows and 100 columns; it is killed at the end."""
    terminal, own_end = pty.openpty()
    resize(terminal, 30, 100)
    process = subprocess.Popen(
        [*_TAKE_TERMINAL, *argv], stdin=own_end, stdout=own_end, stderr=own_end, env=environ, cwd=cwd
    )
    try:
        yield Typist(process=process, terminal=terminal, own_end=own_end)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(own_end)

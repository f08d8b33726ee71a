"""The input of a command that a laptop types into: a pipe, or a pseudoterminal, whose output it then is, too."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import pty
import queue
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_CHUNK_BYTES = 1 << 15
_MAX_CHUNKS = 64
"""What the laptop may send ahead of a command that does not read."""
_DRAIN_S = 0.5
"""How long the pseudoterminal may be silent after the command's end before its output counts as complete."""
_TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""Run by the command, which leads its session: signals of the keys go to it only from its own terminal."""


class Streams:
    """The agent's ends of the streams of one command."""

    def __init__(self, terminal: Mapping[str, int] | None) -> None:
        if terminal:
            self._end, self._child_end = pty.openpty()
        else:
            self._child_end, self._end = os.pipe()
        self._is_terminal = terminal is not None
        self._chunks: queue.Queue[bytes] = queue.Queue(_MAX_CHUNKS)
        """An empty one ends the input."""
        self._ended = threading.Event()
        self._output = threading.Thread(target=self._pump, daemon=True)
        if terminal:
            self._resize(terminal["rows"], terminal["columns"])

    @property
    def is_full(self) -> bool:
        """True while the laptop's next message may wait for the command to read."""
        return self._chunks.full()

    def start(self, argv: Sequence[str], environment: Mapping[str, str], cwd: str) -> subprocess.Popen[bytes]:
        """Start a command `PYTHON -c PROGRAM ...` in a session of its own, and pass on its input.

        Without a terminal its output is that of this process.
        """
        python, option, program, *rest = argv
        own = self._child_end if self._is_terminal else None
        child = subprocess.Popen(
            [python, option, (_TAKE_TERMINAL if self._is_terminal else "") + program, *rest],
            stdin=self._child_end,
            stdout=own,
            stderr=own,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(self._child_end)
        threading.Thread(target=self._write, daemon=True).start()
        if self._is_terminal:
            self._output.start()
        return child

    def take(self, message: Mapping[str, Any]) -> bool:
        """Take a message that is about the input; wait while the command does not read. False: it is another one."""
        if "in" in message:
            self._chunks.put(base64.b64decode(message["in"]))
        elif "eof" in message:
            self._chunks.put(b"")
        elif "size" in message:
            self._resize(*message["size"])
        else:
            return False
        return True

    def finish(self) -> None:
        """Wait for the last output; the command has ended."""
        self._ended.set()
        if self._is_terminal:
            self._output.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the command does not read any more
            while chunk := self._chunks.get():
                while chunk:
                    chunk = chunk[os.write(self._end, chunk) :]
        if not self._is_terminal:
            os.close(self._end)
        while True:  # later input is dropped, and the laptop does not wait
            self._chunks.get()

    def _pump(self) -> None:
        """Write the terminal's output to the connection until the command, and all that shares it, has ended."""
        with contextlib.suppress(OSError):  # nothing has the terminal open any more
            while select.select([self._end], [], [], _DRAIN_S)[0] or not self._ended.is_set():
                if select.select([self._end], [], [], 0)[0]:
                    data = os.read(self._end, _CHUNK_BYTES)
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()

    def _resize(self, rows: int, columns: int) -> None:
        if self._is_terminal:
            fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

"""Standard input of this process for a command elsewhere: its bytes, the size of the terminal, the raw mode."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

_CHUNK_BYTES = 1 << 14
_STDIN = 0

Send = Callable[[Mapping[str, Any]], object]


def has_terminal() -> bool:
    """Return whether the user types into this process and reads its output on a terminal."""
    return all(os.isatty(descriptor) for descriptor in (0, 1, 2))


@contextlib.contextmanager
def kept_terminal() -> Iterator[None]:
    """Restore the terminal's modes and its foreground group at the end, whatever a command has left; SIGTERM ends it.

    Without a terminal only the signals are handled.
    """
    modes, group = (termios.tcgetattr(_STDIN), os.tcgetpgrp(_STDIN)) if os.isatty(_STDIN) else (None, 0)
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        if modes is not None:
            # A process in the background is stopped when it sets the terminal, and a command may have left us there.
            stops = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(OSError):  # it was closed, or the group is in another PID namespace
                os.tcsetpgrp(_STDIN, group)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, modes)
            signal.signal(signal.SIGTTOU, stops)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def catching_signals() -> Iterator[None]:
    """Leave Ctrl-C and Ctrl-\\ to the programs that this process starts meanwhile: the terminal signals them, too."""
    # A handler and not SIG_IGN: an ignored signal stays ignored in the programs.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Keyboard:
    """Standard input, sent as messages: `{"in": base64}`, `{"eof": true}`, `{"size": [rows, columns]}`."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        """The command has a terminal of its own, which this one shows."""

    def facts(self) -> dict[str, Any]:
        """Return what the other side needs to know at the start."""
        rows, columns = self._size()
        return {"terminal": {"rows": rows, "columns": columns} if self.terminal else None}

    @contextlib.contextmanager
    def sent(self, send: Send) -> Iterator[None]:
        """Send what is typed, until the end of the block; a terminal is in raw mode meanwhile."""
        wake, waker = os.pipe()
        reader = threading.Thread(target=self._read, args=(send, wake), daemon=True)
        with kept_terminal():
            resized = None
            if self.terminal:
                resized = signal.signal(signal.SIGWINCH, lambda *_: os.write(waker, b"."))
                tty.setraw(_STDIN, termios.TCSADRAIN)  # what was typed before is kept
            reader.start()
            try:
                yield
            finally:
                if resized is not None:
                    signal.signal(signal.SIGWINCH, resized)
                os.close(waker)
                reader.join(timeout=1.0)  # it may wait for the connection

    def _read(self, send: Send, wake: int) -> None:
        """Read until the input ends; then only changes of the size count, until the pipe `wake` ends."""
        sources = [wake, _STDIN]
        while True:
            ready = select.select(sources, [], [])[0]
            if wake in ready:
                if not os.read(wake, 64):
                    os.close(wake)
                    return
                send({"size": self._size()})
            elif _STDIN in ready:
                try:
                    data = os.read(_STDIN, _CHUNK_BYTES)
                except OSError:  # the terminal was closed
                    data = b""
                send({"in": base64.b64encode(data).decode()} if data else {"eof": True})
                sources = sources if data else [wake]

    def _size(self) -> list[int]:
        size = shutil.get_terminal_size() if not self.terminal else os.get_terminal_size(_STDIN)
        return [size.lines, size.columns]


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)

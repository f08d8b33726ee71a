"""Accepts connections on a listener in a selector: a few in each turn, none for 1 s after the kernel had no resources.

Any process may connect to the port, any number of times. The work of one turn is bounded, so heartbeats go on; refused
connections are counted and not logged one by one.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Any

PER_TURN = 16
REST_S = 1.0
"""How long no connection is accepted after the kernel had no file descriptor or memory for one."""
SUMMARY_S = 60.0
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """A listener that never blocks; it is in its selector except during a pause of `REST_S`."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._selector = selector
        self._rests_until: float | None = None
        selector.register(listener, selectors.EVENT_READ)

    def accept(self, now: float) -> list[tuple[socket.socket, Any]]:
        """Return the next connections, each with the address of its other end.

        A listener that is ready but cannot accept would wake the selector in a loop, so it leaves the selector then.
        """
        if self._rests_until is not None:
            if now < self._rests_until:
                return []
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        accepted: list[tuple[socket.socket, Any]] = []
        while len(accepted) < PER_TURN:
            try:
                accepted.append(self._listener.accept())
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._selector.unregister(self._listener)
                    self._rests_until = now + REST_S
                if error.errno != errno.ECONNABORTED:  # ECONNABORTED: this one has closed, others may wait
                    break
        return accepted

    def close(self) -> None:
        """Close the listener; its port then refuses connections."""
        if self._rests_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()


class Refusals:
    """Reports refused connections: the first one at once, the following ones as a number once a minute."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._count = 0
        self._last = ""
        self._next = 0.0

    def add(self, why: str, now: float) -> None:
        self._count += 1
        self._last = why
        self.tick(now)

    def tick(self, now: float) -> None:
        """Report what is due."""
        if not self._count or now < self._next:
            return
        many = (
            f"{self._count} connections were refused, the last one" if self._count > 1 else "a connection was refused"
        )
        self._report(f"{many}: {self._last}")
        self._count = 0
        self._next = now + SUMMARY_S

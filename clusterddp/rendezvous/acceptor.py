"""Accepts the connections of a listener in a selector: a few in each turn, and none for a moment where it cannot.

Every process that reaches a port may connect as often as it likes. What that costs in one turn is bounded, so that
heartbeats go on, and refused connections are counted instead of being logged one by one.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Any

PER_TURN = 16
REST_S = 1.0
"""How long no connection is accepted after the kernel had no descriptor or memory for one."""
SUMMARY_S = 60.0
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """A listener that does not block; its selector wakes up for it, but not while it rests."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._selector = selector
        self._rests_until: float | None = None
        selector.register(listener, selectors.EVENT_READ)

    def accept(self, now: float) -> list[tuple[socket.socket, Any]]:
        """Return the next connections, each with the address of its other end.

        A listener that is ready and cannot accept would wake the selector at once, for ever: it leaves it for a moment.
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
                if error.errno != errno.ECONNABORTED:  # else one has gone again, and others may wait behind it
                    break
        return accepted

    def close(self) -> None:
        """Close the listener, whose port refuses connections then."""
        if self._rests_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()


class Refusals:
    """Reports refused connections: the first one at once, those that follow as a number every minute."""

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

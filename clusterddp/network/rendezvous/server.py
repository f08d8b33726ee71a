"""The server's side of a rendezvous: it accepts connections, and returns those that have authenticated.

Any process may connect to the port, any number of times. The work of one turn is bounded, so heartbeats go on;
nothing is accepted for 1 s after the kernel had no resources. The number of connections that have not authenticated
is limited, and so is the time of each; refused connections are counted and not logged one by one.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from clusterddp.network.rendezvous.connection import Connection, Message, Protocol

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


INTRODUCTION_S = 5.0
"""How long a connection may take to authenticate and to send its first message."""
_MAX_UNAUTHENTICATED = 64
"""How many connections may be open that have not authenticated; 4 more for each client that is expected."""


class Arrival(NamedTuple):
    """A client that has authenticated, and its first message."""

    connection: Connection
    message: Message


class Server:
    """Accepts the clients of one protocol on a listener; it never blocks."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        protocol: Protocol,
        key: str,
        num_expected: int,
        report: Callable[[str], object],
    ) -> None:
        """`report` receives a sentence about refused connections, at most once a minute."""
        self.unproven: Counter[str] = Counter()
        """Address -> how many connections from it have failed to prove that they know the key."""
        self._selector = selector
        self._protocol = protocol
        self._key = key
        self._max_unauthenticated = _MAX_UNAUTHENTICATED + 4 * num_expected
        self._acceptor = Acceptor(listener, selector)
        self._refusals = Refusals(report)
        self._unauthenticated: list[Connection] = []
        """Connections that have not authenticated yet, the oldest first."""

    def accept(self, now: float) -> list[Arrival]:
        """Accept connections; return the clients whose first message has arrived since the last turn."""
        for sock, _ in self._acceptor.accept(now):
            if len(self._unauthenticated) >= self._max_unauthenticated:
                self.refuse(self._unauthenticated.pop(0), "too many connections at once have not authenticated", now)
            self._unauthenticated.append(self._open(sock, now))
        arrived = []
        for connection in list(self._unauthenticated):
            messages = connection.receive(now)
            if messages:
                self._unauthenticated.remove(connection)
                arrived.append(Arrival(connection, messages[0]))
            elif connection.lost is not None or now - connection.opened > INTRODUCTION_S:
                self._unauthenticated.remove(connection)
                if (loss := connection.lost) is not None and loss.kind == "unproven":
                    self.unproven[connection.peer_address] += 1
                late = f"it did not authenticate within {INTRODUCTION_S:g} s"
                self.refuse(connection, late if loss is None else str(loss), now)
        self._refusals.tick(now)
        return arrived

    def refuse(self, connection: Connection, why: str, now: float) -> None:
        """Close a connection, and count it for the report."""
        connection.close()
        self._refusals.add(f"{connection.peer_address}: {why}", now)

    def close(self) -> None:
        """Close the listener, whose port then refuses connections, and all connections that have not authenticated."""
        self._acceptor.close()
        self.close_unauthenticated()

    def close_unauthenticated(self) -> None:
        """Close the connections that have not authenticated; the listener stays open."""
        for connection in self._unauthenticated:
            connection.close()
        self._unauthenticated.clear()

    def _open(self, sock: socket.socket, now: float) -> Connection:
        self._selector.register(sock, selectors.EVENT_READ)
        return Connection(sock, protocol=self._protocol, key=self._key, role="server", now=now, selector=self._selector)

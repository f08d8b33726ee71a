"""The server's side of a rendezvous: it accepts connections, and returns those that have authenticated.

Every process that reaches a port may connect as often as it likes. What that costs in one turn is bounded, so that
heartbeats go on (acceptor.py), and there is a limited number of strangers, each for a limited time.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from clusterddp.rendezvous.acceptor import Acceptor, Refusals
from clusterddp.rendezvous.connection import Connection, Message, Protocol

INTRODUCTION_S = 5.0
"""How long a connection may take to authenticate and to send its first message."""
_MAX_STRANGERS = 64
"""How many connections may not have authenticated yet; 4 more for each client that is expected."""


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
        """`report` gets a sentence about connections that were refused, at most once a minute."""
        self.unproven: Counter[str] = Counter()
        """How many connections did not know the key, by their address."""
        self._selector = selector
        self._protocol = protocol
        self._key = key
        self._max_strangers = _MAX_STRANGERS + 4 * num_expected
        self._acceptor = Acceptor(listener, selector)
        self._refusals = Refusals(report)
        self._strangers: list[Connection] = []
        """Connections that have not authenticated yet, the first one first."""

    def accept(self, now: float) -> list[Arrival]:
        """Accept connections, and return the clients whose first message has arrived since the last turn."""
        for sock, _ in self._acceptor.accept(now):
            if len(self._strangers) >= self._max_strangers:
                self.refuse(self._strangers.pop(0), "too many connections at once have not authenticated", now)
            self._strangers.append(self._open(sock, now))
        arrived = []
        for connection in list(self._strangers):
            messages = connection.receive(now)
            if messages:
                self._strangers.remove(connection)
                arrived.append(Arrival(connection, messages[0]))
            elif connection.lost is not None or now - connection.opened > INTRODUCTION_S:
                self._strangers.remove(connection)
                self._refuse_stranger(connection, now)
        self._refusals.tick(now)
        return arrived

    def refuse(self, connection: Connection, why: str, now: float) -> None:
        """Close a connection, and count it among those that are reported."""
        connection.close()
        self._refusals.add(f"{connection.peer_address}: {why}", now)

    def close(self) -> None:
        """Close the listener, whose port refuses connections then, and all strangers."""
        self._acceptor.close()
        self.close_strangers()

    def close_strangers(self) -> None:
        """Close the connections that have not authenticated; the listener stays open."""
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()

    def _open(self, sock: socket.socket, now: float) -> Connection:
        self._selector.register(sock, selectors.EVENT_READ)
        return Connection(sock, protocol=self._protocol, key=self._key, role="server", now=now, selector=self._selector)

    def _refuse_stranger(self, connection: Connection, now: float) -> None:
        loss = connection.lost
        if loss is not None and loss.kind == "unproven":
            self.unproven[connection.peer_address] += 1
        why = str(loss) if loss is not None else f"it did not authenticate within {INTRODUCTION_S:g} s"
        self.refuse(connection, why, now)

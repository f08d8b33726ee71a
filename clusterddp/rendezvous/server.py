"""The server's side of a rendezvous: it accepts connections, and returns those that have authenticated.

Every process that reaches a port may connect as often as it likes. What that costs in one turn is bounded, so that
heartbeats go on (acceptor.py), and there is a limited number of strangers, each for a limited time.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from clusterddp.errors import ClusterddpError
from clusterddp.rendezvous.acceptor import Acceptor, Refusals
from clusterddp.rendezvous.connection import Connection, Message, Protocol, flush_all, refusal

INTRODUCTION_S = 5.0
"""How long a connection may take to authenticate and to send its first message."""
_FLUSH_S = 1.0
_MAX_STRANGERS = 64
"""How many connections may not have authenticated yet; 4 more for each client that is expected."""


_T = TypeVar("_T")


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


@dataclass(frozen=True, slots=True)
class Member(Generic[_T]):
    """A client that has been counted."""

    connection: Connection
    introduction: _T


class Members(Generic[_T]):
    """A server and the clients that it has counted, by their number: they wait until all of them are there."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        protocol: Protocol,
        key: str,
        num_expected: int,
        report: Callable[[str], object],
    ) -> None:
        self.by_number: dict[int, Member[_T]] = {}
        self._selector = selectors.DefaultSelector()
        self.server = Server(
            listener, self._selector, protocol=protocol, key=key, num_expected=num_expected, report=report
        )

    def take_turn(self, wait_s: float) -> tuple[list[Arrival], dict[int, Member[_T]]]:
        """Wait a moment; return the clients that have introduced themselves, and the members that have left."""
        ready = {key.fileobj for key, _ in self._selector.select(wait_s)}
        now = time.monotonic()
        left = {}
        for number, member in list(self.by_number.items()):
            if member.connection.sock in ready:
                member.connection.receive(now)
            if member.connection.lost is not None:
                member.connection.close()
                left[number] = self.by_number.pop(number)
        return self.server.accept(now), left

    def send_all(self, message: Message) -> None:
        for member in self.by_number.values():
            member.connection.send(message)

    def close(self, within_s: float) -> None:
        """Close all connections, once what was sent is on its way; the listener stays as it is."""
        connections = [member.connection for member in self.by_number.values()]
        flush_all(connections, within_s)
        for connection in connections:
            connection.close()
        self.by_number.clear()
        self.server.close_strangers()
        self._selector.close()


def refuse(connection: Connection, error: ClusterddpError) -> None:
    """Send a client why it is refused; its connection stays open for the caller to close."""
    connection.send(refusal(error))
    flush_all([connection], _FLUSH_S)

"""The client's side of a rendezvous: it connects to the candidates until a server has authenticated and answered.

The candidates are one or several addresses and ports. Before the other end has proven that it knows the key, the client
sends only its hello and its proof.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clusterddp.network.rendezvous.connection import Connection, Loss, Message, Protocol

ATTEMPT_S = 5.0
"""How long one attempt may take: the server may be busy, or the network of its host may have changed."""
WAVE_S = 2.0
"""How long an address may take to answer before the next one is tried, where there are several."""
_BACKOFF_S = 0.1
_BACKOFF_FACTOR = 1.5
_MAX_BACKOFF_S = 0.5
_NO_ANSWER = Loss("no_answer", "no answer")

Introduce = Callable[[Connection], Message]
"""Makes the client's first message, once the server is authenticated."""


class Found(NamedTuple):
    """A server that has authenticated, and its answer to the client's first message."""

    connection: Connection
    messages: list[Message]


class NotFound(NamedTuple):
    """No server was found: the most informative of the failed attempts."""

    address: str
    port: int
    loss: Loss


class Attempt:
    """One attempt to connect, which never blocks; this class only tests whether a process listens there."""

    def __init__(self, address: tuple[Any, ...], now: float, selector: selectors.BaseSelector | None = None) -> None:
        """`address`: as for `socket.connect`, IPv4 or IPv6. `selector`: the attempt's socket is registered there."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.address = address
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.setblocking(False)
        self.connected = False
        """True once a process has accepted the connection."""
        self._began = now
        self.error = self.sock.connect_ex(address)
        if self.error == errno.EINPROGRESS:
            self.error = 0
        self._selector = selector
        if selector is not None:
            selector.register(self.sock, selectors.EVENT_READ)

    @property
    def refused(self) -> bool:
        """True when the host answers that no process listens there."""
        return self.error == errno.ECONNREFUSED

    @property
    def loss(self) -> Loss:
        """Why the attempt failed."""
        if not self.error:
            return _NO_ANSWER
        return Loss("refused" if self.refused else "broken", os.strerror(self.error))

    def look(self, now: float) -> Found | None:
        """Continue the attempt; return the connection once the server has answered."""
        if self.connected or self.error:
            return None
        self.error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with contextlib.suppress(OSError):
            self.sock.getpeername()
            self.connected = self.error == 0
        return None

    def is_over(self, now: float) -> bool:
        """Return whether the attempt has nothing left to wait for."""
        return self.error != 0 or self.connected or now - self._began > ATTEMPT_S

    def close(self) -> None:
        if self._selector is not None:
            self._selector.unregister(self.sock)
            self._selector = None
        self.sock.close()


class AuthenticatedAttempt(Attempt):
    """An attempt that connects, authenticates, introduces the client and waits for the answer."""

    def __init__(
        self,
        address: tuple[Any, ...],
        now: float,
        selector: selectors.BaseSelector | None = None,
        *,
        protocol: Protocol,
        key: str,
        introduce: Introduce,
    ) -> None:
        super().__init__(address, now, selector)
        self._protocol = protocol
        self._key = key
        self._introduce = introduce
        self._introduced = False
        self._connection: Connection | None = None

    @property
    def loss(self) -> Loss:
        lost = self._connection.lost if self._connection is not None else None
        return lost or super().loss

    def look(self, now: float) -> Found | None:
        super().look(now)
        if not self.connected:
            return None
        if self._connection is None:
            self._connection = Connection(
                self.sock, protocol=self._protocol, key=self._key, role="client", now=now, selector=self._selector
            )
        connection = self._connection
        messages = connection.receive(now)
        if connection.proven and not self._introduced:
            self._introduced = True
            connection.send(self._introduce(connection))
        return Found(connection, messages) if messages else None

    def is_over(self, now: float) -> bool:
        lost = self._connection is not None and self._connection.lost is not None
        return self.error != 0 or lost or now - self._began > ATTEMPT_S


class Search:
    """Tries the candidates, all ports of one address at the same time, and never blocks.

    After `reject` of a server that is another one, `find` continues with the other candidates.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        ports: Sequence[int],
        *,
        protocol: Protocol,
        key: str,
        introduce: Introduce,
        selector: selectors.BaseSelector,
    ) -> None:
        """`addresses` returns the candidates' addresses, in order; it is called again before each round."""
        self.failure: NotFound | None = None
        self.answered = False
        """True once a process has accepted a connection."""
        self._list_addresses = addresses
        self._ports = ports
        self._protocol = protocol
        self._key = key
        self._introduce = introduce
        self._selector = selector
        self._addresses: list[str] = []
        self._attempts: list[AuthenticatedAttempt] = []
        self._wave_until = self._next_round = 0.0
        self._wave_s = ATTEMPT_S
        self._backoff_s = _BACKOFF_S

    def find(self, now: float) -> Found | None:
        """Continue the attempts; return the next server that has answered."""
        for attempt in list(self._attempts):
            found = attempt.look(now)
            self.answered |= attempt.connected
            if found is not None:
                self._attempts.remove(attempt)
                return found
            if attempt.is_over(now):
                self._fail(attempt)
        if self._attempts and now >= self._wave_until:
            for attempt in list(self._attempts):
                self._fail(attempt)
        if not self._attempts and (self._addresses or now >= self._next_round):
            self._begin_wave(now)
        return None

    def wait(self, deadline: float) -> Found | NotFound | None:
        """Wait until a server has answered, the only candidate has another key or version, or the deadline passes.

        `deadline`: of `time.monotonic`. Return None when there was no attempt: no candidate's name resolves.
        """
        while True:
            now = time.monotonic()
            found = self.find(now)
            if found is not None:
                return found
            hopeless = self.failure is not None and self.failure.loss.kind in {"unproven", "version"}
            if now >= deadline or (hopeless and len(self._ports) == 1):
                for attempt in list(self._attempts):
                    self._fail(attempt)
                return self.failure
            self._selector.select(min(0.1, deadline - now))

    def reject(self, found: Found, loss: Loss) -> None:
        """Close the connection to a server that is another one, and keep the reason; `find` tries the others."""
        address, port = found.connection.peer_address, found.connection.peer_port
        self.failure = NotFound(address, port, loss)
        found.connection.close()

    def close(self) -> None:
        """End all attempts."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()

    def _begin_wave(self, now: float) -> None:
        if not self._addresses:
            self._addresses = list(self._list_addresses())
            self._wave_s = WAVE_S if len(self._addresses) > 1 else ATTEMPT_S
            self._next_round = now + self._backoff_s
            self._backoff_s = min(self._backoff_s * _BACKOFF_FACTOR, _MAX_BACKOFF_S)
        if not self._addresses:
            return
        address = self._addresses.pop(0)
        self._wave_until = now + self._wave_s
        for port in self._ports:
            try:
                attempt = AuthenticatedAttempt(
                    (address, port), now, self._selector,
                    protocol=self._protocol, key=self._key, introduce=self._introduce,
                )  # fmt: skip
            except OSError as error:  # no file descriptor is left, or the address is invalid
                self.failure = NotFound(address, port, Loss("broken", error.strerror or str(error)))
            else:
                self._attempts.append(attempt)

    def _fail(self, attempt: AuthenticatedAttempt) -> None:
        """End an attempt and keep its failure; a refusal counts only for the first port of an address."""
        self._attempts.remove(attempt)
        address, port = attempt.address[:2]
        if port == self._ports[0] or not attempt.refused:
            self.failure = NotFound(address, port, attempt.loss)
        attempt.close()

"""One attempt to connect to another supervisor's listener; nothing here blocks."""

from __future__ import annotations

import errno
import socket
from typing import Any, NamedTuple

from clusterddp.node.link import Channel, Message

ATTEMPT_S = 5.0
"""How long one attempt may take: the other process may be busy, and its host's network may just have changed."""


class Found(NamedTuple):
    """An authenticated channel, and the messages that came with the authentication."""

    channel: Channel
    heard: list[Message]


class Connecting:
    """An attempt that only asks whether a process listens there."""

    def __init__(self, address: tuple[Any, ...], now: float) -> None:
        """`address`: of the socket module, for either version of IP."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.where = f"{address[0]}:{address[1]}"
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.setblocking(False)
        self.connected = False
        self._began = now
        self._error = self.sock.connect_ex(address)
        if self._error == errno.EINPROGRESS:
            self._error = 0

    @property
    def refused(self) -> bool:
        """True when the host answers and no process listens there."""
        return self._error == errno.ECONNREFUSED

    @property
    def failed(self) -> bool:
        return self._error != 0

    def look(self, now: float) -> Found | None:
        """Go on; return the channel once the other end is authenticated."""
        if self.connected or self._error:
            return None
        self._error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            self.sock.getpeername()
        except OSError:
            return None
        self.connected = self._error == 0
        return None

    def is_over(self, now: float) -> bool:
        """Say whether nothing more is to be expected of it."""
        return self.failed or self.connected or now - self._began > ATTEMPT_S

    def close(self) -> None:
        self.sock.close()


class Authenticating(Connecting):
    """An attempt that connects, sends `hello` once the other end's nonce is there, and waits for a signed answer."""

    def __init__(self, address: tuple[Any, ...], token: str, hello: Message, now: float) -> None:
        super().__init__(address, now)
        self._token = token
        self._hello = hello
        self._channel: Channel | None = None

    def look(self, now: float) -> Found | None:
        super().look(now)
        if not self.connected:
            return None
        if self._channel is None:
            self._channel = Channel(self.sock, token=self._token, side="member", now=now)
            self._channel.send(self._hello)
        heard = self._channel.receive(now)
        return Found(self._channel, heard) if self._channel.proven and self._channel.lost is None else None

    def is_over(self, now: float) -> bool:
        lost = self._channel is not None and self._channel.lost is not None
        return self.failed or lost or now - self._began > ATTEMPT_S

"""How a supervisor finds the head: at the one address that it was told, or by a walk over candidates.

On Slurm nobody tells: the head's host is known by name, and by its address if the job's srun runs there, the port only
as one of a short walk that follows from the job's id. So a supervisor knocks at all of them, and believes whoever
answers with a line that is signed with the run's token; a stranger on such a port is left alone.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from clusterddp.dist.interface import is_loopback
from clusterddp.errors import ClusterddpError
from clusterddp.node.link import Channel, Message, connect, watch_host
from clusterddp.node.note import note

WAVE_S = 2.0
"""How long one address may take to answer before the next one is tried."""
_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0


class Found(NamedTuple):
    """The head, and what it has said already."""

    channel: Channel
    heard: list[Message]


class Finder(Protocol):
    """Finds the head."""

    def find(self, now: float) -> Found | None:
        """Return the channel to the head, which was told of the join; None: not yet.

        Raises: ClusterddpError: the head is not there.
        """


class KnownHead:
    """The head listens at one address, and did so before anybody was told."""

    def __init__(
        self, link: tuple[str, int], token: str, join: Message, *, until: float, host_silence_s: float | None
    ) -> None:
        self._link = link
        self._host_silence_s = host_silence_s
        self._token = token
        self._join = join
        self._until = until

    def find(self, now: float) -> Found | None:
        try:
            left_s = max(0.0, self._until - time.monotonic())
            sock = connect(*self._link, timeout_s=min(left_s, self._host_silence_s or left_s))
        except OSError as error:
            host, port = self._link
            raise ClusterddpError(f"the head at {host}:{port} cannot be reached: {error}") from error
        if self._host_silence_s is not None:
            watch_host(sock, self._host_silence_s)
        channel = Channel(sock, token=self._token, side="member", now=time.monotonic())
        channel.send(self._join)
        return Found(channel, [])


class SearchedHead:
    """The head listens somewhere among the candidates, or will before long."""

    def __init__(
        self,
        hosts: Sequence[str],
        ports: Sequence[int],
        token: str,
        join: Message,
        *,
        selector: selectors.BaseSelector,
        host_silence_s: float,
    ) -> None:
        self._hosts = hosts
        self._ports = ports
        self._token = token
        self._join = join
        self._selector = selector
        self._host_silence_s = host_silence_s
        self._addresses: list[str] = []
        self._knocks: list[_Knock] = []
        self._next_wave = 0.0
        self._wave_until = 0.0
        self._pause_s = _PAUSE_S

    def find(self, now: float) -> Found | None:
        for knock in list(self._knocks):
            found = knock.listen(now)
            if found is not None:
                self._knocks.remove(knock)
                self._end_wave()
                self._selector.unregister(knock.sock)
                note(f"the head is at {knock.where}")
                watch_host(knock.sock, self._host_silence_s)
                return found
            if knock.over:
                self._drop(knock)
        if self._knocks and now >= self._wave_until:
            self._end_wave()
        if not self._knocks and now >= self._next_wave:
            self._begin_wave(now)
        return None

    def _begin_wave(self, now: float) -> None:
        if not self._addresses:
            self._addresses = resolve(self._hosts)
            self._next_wave = now + self._pause_s
            self._pause_s = min(self._pause_s * 1.5, _MAX_PAUSE_S)
        if not self._addresses:
            return
        address = self._addresses.pop(0)
        self._wave_until = now + WAVE_S
        for port in self._ports:
            with contextlib.suppress(OSError):
                knock = _Knock(address, port, self._token, self._join, now)
                self._knocks.append(knock)
                self._selector.register(knock.sock, selectors.EVENT_READ)

    def _end_wave(self) -> None:
        for knock in list(self._knocks):
            self._drop(knock)

    def _drop(self, knock: _Knock) -> None:
        self._knocks.remove(knock)
        knock.close(self._selector)


class _Knock:
    """One attempt to speak with whoever listens at an address and port."""

    def __init__(self, address: str, port: int, token: str, join: Message, now: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.where = f"{address}:{port}"
        self.over = False
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.sock.connect((address, port))
        self._channel: Channel | None = None
        self._token = token
        self._join = join

    def listen(self, now: float) -> Found | None:
        """Return the channel once the other end has proven that it is the head."""
        if self._channel is None and not self._connected():
            return None
        if self._channel is None:
            self._channel = Channel(self.sock, token=self._token, side="member", now=now)
            self._channel.send(self._join)
        heard = self._channel.receive(now)
        self.over = self._channel.lost is not None
        return Found(self._channel, heard) if self._channel.proven and not self.over else None

    def close(self, selector: selectors.BaseSelector) -> None:
        selector.unregister(self.sock)
        self.sock.close()

    def _connected(self) -> bool:
        if self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.over = True
            return False
        try:
            self.sock.getpeername()
        except OSError:
            return False
        return True


def resolve(hosts: Sequence[str]) -> list[str]:
    """Return the addresses of these hosts, in order, without what would only lead back to this very host."""
    addresses: list[str] = []
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            note(f"{host} is not resolved by {socket.gethostname()}: {error}")
            continue
        addresses += [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] == socket.AF_INET6)]
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address)]


def candidate_hosts(first_host: str, environ_address: str | None) -> tuple[str, ...]:
    """List where the head may be: its host by name, then where srun runs, as a rule the same host."""
    return tuple(dict.fromkeys(host for host in (first_host, environ_address) if host))

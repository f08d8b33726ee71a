"""How a supervisor finds the head: at the one address that it was told, or by a walk over candidates.

On Slurm nobody tells: the head's host is known by name, and by its address if the job's srun runs there, the port only
as one of a short walk that follows from the job's id. So a supervisor connects to all of them, and believes the one
that answers with a line that is signed with the run's token; a stranger on such a port is left alone.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence
from typing import Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import is_loopback
from clusterddp.node.connecting import Authenticating, Found
from clusterddp.node.link import Channel, Message, connect
from clusterddp.node.note import note

WAVE_S = 2.0
"""How long one address may take to answer before the next one is tried."""
_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0


class Finder(Protocol):
    """Finds the head."""

    def find(self, now: float) -> Found | None:
        """Return the channel to the head, which was told of the join; None: not yet.

        Raises: ClusterddpError: the head is not there.
        """


class KnownHead:
    """The head listens at one address, and did so before anybody was told."""

    def __init__(self, link: tuple[str, int], token: str, join: Message, *, timeout_s: float) -> None:
        self._link = link
        self._token = token
        self._join = join
        self._timeout_s = timeout_s

    def find(self, now: float) -> Found | None:
        try:
            sock = connect(*self._link, timeout_s=self._timeout_s)
        except OSError as error:
            host, port = self._link
            raise ClusterddpError(f"the head at {host}:{port} cannot be reached: {error}") from error
        channel = Channel(sock, token=self._token, side="member", now=now)
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
    ) -> None:
        self._hosts = hosts
        self._ports = ports
        self._token = token
        self._join = join
        self._selector = selector
        self._addresses: list[str] = []
        self._attempts: list[Authenticating] = []
        self._next_wave = 0.0
        self._wave_until = 0.0
        self._pause_s = _PAUSE_S

    def find(self, now: float) -> Found | None:
        for attempt in list(self._attempts):
            found = attempt.look(now)
            if found is not None:
                self._attempts.remove(attempt)
                self._end_wave()
                self._selector.unregister(attempt.sock)
                note(f"the head is at {attempt.where}")
                return found
            if attempt.is_over(now):
                self._drop(attempt)
        if self._attempts and now >= self._wave_until:
            self._end_wave()
        if not self._attempts and now >= self._next_wave:
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
                attempt = Authenticating((address, port), self._token, self._join, now)
                self._attempts.append(attempt)
                self._selector.register(attempt.sock, selectors.EVENT_READ)

    def _end_wave(self) -> None:
        for attempt in list(self._attempts):
            self._drop(attempt)

    def _drop(self, attempt: Authenticating) -> None:
        self._attempts.remove(attempt)
        self._selector.unregister(attempt.sock)
        attempt.close()


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

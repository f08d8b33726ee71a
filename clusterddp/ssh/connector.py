"""Connects to hosts as `ssh HOST` would, through their jump hosts; every host key is checked before authentication."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination, resolve
from clusterddp.ssh.connection import Connection
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.host_keys import HostKey, KnownKey, check_host_key, signing_algorithms
from clusterddp.ssh.known_hosts import read_known_keys
from clusterddp.ssh.stream import Stream, open_stream

if TYPE_CHECKING:
    from clusterddp.ssh.transport import Transport

_PER_BASTION = 8
"""How many connections at a time go through one jump host, or to one sshd."""
_MAX_TRIES = 10
"""How often a host that hangs up is tried: for about half a minute."""
_LONGEST_PAUSE_S = 5.0
_KEEPALIVE_S = 15


@dataclass(kw_only=True)
class _Route:
    """The connection to the last of a list of jump hosts, or why there is none; used under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Connection | SshError | None = None


@dataclass(kw_only=True)
class _Handshake:
    """A host after the handshake: its key is not checked yet, and no user name or key was sent."""

    transport: Transport
    key: HostKey
    below: Stream | Connection

    def close(self) -> None:
        self.transport.close()
        self.below.close()


class Connector:
    """Connects to hosts; each jump host is connected to once, and its connection is shared."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Semaphore] = {}
        self._routes: dict[tuple[Destination, ...], _Route] = {}

    def __enter__(self) -> Connector:
        return self

    def __exit__(self, *exception: object) -> None:
        """Release the jump hosts; one that a connection goes through is closed with that connection."""
        for route in list(self._routes.values()):
            if isinstance(route.result, Connection):
                route.result.close()

    def connect(self, host: str, *, pinned: str | None = None) -> Connection:
        """Connect to a host as the user's configuration says.

        Raises: SshError.
        """
        destination = resolve(host, self._environ)
        with _naming(host), self._gate(destination):
            return self._connect(destination, pinned)

    def scan(self, destination: Destination) -> HostKey:
        """Return the key that a host shows; no more than the handshake is sent. The jump hosts have to be known.

        Raises: SshError.
        """
        with _naming(destination.host), self._gate(destination):
            handshake = self._shake_hands(destination, signing_algorithms(destination, (), None))
            handshake.close()
            return handshake.key

    def _connect(self, destination: Destination, pinned: str | None = None) -> Connection:
        from clusterddp.ssh.authentication import authenticate

        known: tuple[KnownKey, ...] = read_known_keys(destination)
        hop = self._shake_hands(destination, signing_algorithms(destination, known, pinned))
        try:
            check_host_key(destination, known, hop.key, pinned=pinned)
            authenticate(hop.transport, destination)
        except BaseException:
            hop.close()
            raise
        hop.transport.set_keepalive(destination.keepalive_s or _KEEPALIVE_S)
        return Connection(destination=destination, key=hop.key, transport=hop.transport, below=hop.below)

    def _shake_hands(self, destination: Destination, algorithms: tuple[str, ...]) -> _Handshake:
        """Reach a host and shake hands; retry when it hangs up."""
        for number in range(1, _MAX_TRIES):
            try:
                return self._shake_hands_once(destination, algorithms)
            except SshError as error:
                if not error.dropped:
                    raise
            time.sleep(random.uniform(0.5, 1.5) * min(_LONGEST_PAUSE_S, 0.1 * 2**number))
        try:
            return self._shake_hands_once(destination, algorithms)
        except SshError as error:
            if not error.dropped:
                raise
            found = f"{error.found}, {_MAX_TRIES} times"
            raise SshError(error.host, error.phase, found, hint=error.hint) from error

    def _shake_hands_once(self, destination: Destination, algorithms: tuple[str, ...]) -> _Handshake:
        from clusterddp.ssh.transport import open_tunnel, shake_hands

        below = self._reach_last(destination.jumps) if destination.jumps else open_stream(destination, self._environ)
        try:
            if isinstance(below, Stream):
                transport, key = shake_hands(below.socket, destination, algorithms)
            else:
                tunnel = open_tunnel(below.transport, destination.jumps[-1], destination)
                transport, key = shake_hands(tunnel, destination, algorithms)
        except BaseException as error:
            reason = below.last_error_line() if isinstance(below, Stream) else ""
            below.close()
            if isinstance(error, SshError) and reason:  # a ProxyCommand that printed a reason is not tried again
                found = f"{error.found} (ProxyCommand: {reason})"
                raise SshError(error.host, error.phase, found, hint=error.hint) from error
            raise
        return _Handshake(transport=transport, key=key, below=below)

    def _reach_last(self, jumps: tuple[Destination, ...]) -> Connection:
        """Connect to the last of the jump hosts, or share the connection that is open."""
        with self._lock:
            route = self._routes.setdefault(jumps, _Route())
        with route.lock:
            if isinstance(route.result, SshError):
                raise route.result
            if route.result is None or not route.result.retain():
                try:
                    route.result = self._connect(replace(jumps[-1], jumps=jumps[:-1]))
                except SshError as error:
                    route.result = error
                    raise
                route.result.retain()
            return route.result

    def _gate(self, destination: Destination) -> threading.Semaphore:
        with self._lock:
            return self._gates.setdefault(destination.first_hop, threading.Semaphore(_PER_BASTION))


def connect_all(
    hosts: Iterable[str],
    *,
    environ: Mapping[str, str],
    pinned: Mapping[str, str] | None = None,
) -> dict[str, Connection | SshError]:
    """Connect to hosts, as `ssh HOST` would; return a result per host. The caller closes the connections.

    `pinned`: host -> the key that it must have, `SHA256:...` or `TYPE BASE64`.
    """
    connector = Connector(environ)

    def connect(host: str) -> Connection | SshError:
        try:
            return connector.connect(host, pinned=(pinned or {}).get(host))
        except SshError as error:
            return error

    with connector:
        return Fan(dict.fromkeys(hosts), connect, _close_if_open).results(AT_ONCE)


def scan_all(
    destinations: Iterable[Destination], *, environ: Mapping[str, str]
) -> dict[Destination, HostKey | SshError]:
    """Return the keys that hosts show, known or not; their jump hosts have to be known.

    No more than the handshake is sent to a host that is not known.
    """
    connector = Connector(environ)

    def scan(destination: Destination) -> HostKey | SshError:
        try:
            return connector.scan(destination)
        except SshError as error:
            return error

    with connector:
        return Fan(dict.fromkeys(destinations), scan).results(AT_ONCE)


def _close_if_open(result: Connection | SshError) -> None:
    if isinstance(result, Connection):
        result.close()


@contextlib.contextmanager
def _naming(host: str) -> Iterator[None]:
    """Name the destination in the error of a jump host."""
    try:
        yield
    except SshError as error:
        if error.host == host:
            raise
        found = f"on the way, {error.host}: {error.found}"
        raise SshError(host, error.phase, found, hint=error.hint) from error

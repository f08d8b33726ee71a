"""The way to a host: over the hosts before it, each checked before anything is said, none asked by too many at once."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination, resolve
from clusterddp.ssh.connection import Connection
from clusterddp.ssh.keys import HostKey, KnownKey, check_host_key, read_known_keys, signing_algorithms
from clusterddp.ssh.stream import Stream, open_stream

if TYPE_CHECKING:
    from clusterddp.ssh.transport import Transport

_MAX_TRIES = 10
"""So often a host that hangs up is tried: for about half a minute."""
_LONGEST_PAUSE_S = 5.0
_KEEPALIVE_S = 15


@dataclass(kw_only=True)
class _Way:
    """The connection to the last of some hosts on the way, or why there is none; asked for under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Connection | SshError | None = None


@dataclass(kw_only=True)
class _Greeted:
    """A host after the handshake: nobody has looked at its key yet, and it knows nothing of us."""

    transport: Transport
    key: HostKey
    below: Stream | Connection

    def close(self) -> None:
        self.transport.close()
        self.below.close()


class Network:
    """The connections of one call; hosts on the way are connected to once, and shared."""

    def __init__(self, environ: Mapping[str, str], per_bastion: int) -> None:
        self._environ = environ
        self._per_bastion = per_bastion
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Semaphore] = {}
        self._ways: dict[tuple[Destination, ...], _Way] = {}

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of the hosts on the way; those that a connection goes through stay until it is closed."""
        for way in list(self._ways.values()):
            if isinstance(way.result, Connection):
                way.result.close()

    def connect(self, host: str, *, pinned: str | None = None) -> Connection:
        """Connect to a host as the user's configuration says.

        Raises: SshError.
        """
        destination = resolve(host, self._environ)
        with _naming(host), self._gate(destination):
            return self._connect(destination, pinned)

    def scan(self, destination: Destination) -> HostKey:
        """See which key a host shows; it hears no more than the handshake. The hosts on the way have to be known.

        Raises: SshError.
        """
        with _naming(destination.host), self._gate(destination):
            greeted = self._greet(destination, signing_algorithms(destination, (), None))
            greeted.close()
            return greeted.key

    def _connect(self, destination: Destination, pinned: str | None = None) -> Connection:
        from clusterddp.ssh.transport import authenticate

        known: tuple[KnownKey, ...] = read_known_keys(destination)
        greeted = self._greet(destination, signing_algorithms(destination, known, pinned))
        try:
            check_host_key(destination, known, greeted.key, pinned=pinned)
            authenticate(greeted.transport, destination)
        except BaseException:
            greeted.close()
            raise
        greeted.transport.set_keepalive(destination.keepalive_s or _KEEPALIVE_S)
        return Connection(destination=destination, key=greeted.key, transport=greeted.transport, below=greeted.below)

    def _greet(self, destination: Destination, algorithms: tuple[str, ...]) -> _Greeted:
        """Reach a host and shake hands, again and again when it hangs up at once."""
        for number in range(1, _MAX_TRIES):
            try:
                return self._greet_once(destination, algorithms)
            except SshError as error:
                if not error.dropped:
                    raise
            time.sleep(random.uniform(0.5, 1.5) * min(_LONGEST_PAUSE_S, 0.1 * 2**number))
        try:
            return self._greet_once(destination, algorithms)
        except SshError as error:
            if not error.dropped:
                raise
            found = f"{error.found}, {_MAX_TRIES} times"
            raise SshError(error.host, error.phase, found, hint=error.hint) from error

    def _greet_once(self, destination: Destination, algorithms: tuple[str, ...]) -> _Greeted:
        from clusterddp.ssh.transport import open_tunnel, shake_hands

        below = self._reach_last(destination.jumps) if destination.jumps else open_stream(destination, self._environ)
        try:
            if isinstance(below, Stream):
                transport, key = shake_hands(below.socket, destination, algorithms)
            else:
                tunnel = open_tunnel(below.transport, destination.jumps[-1], destination)
                transport, key = shake_hands(tunnel, destination, algorithms)
        except BaseException as error:
            words = below.last_words() if isinstance(below, Stream) else ""
            below.close()
            if isinstance(error, SshError) and words:  # with a reason, a ProxyCommand is not tried again
                found = f"{error.found} (ProxyCommand: {words})"
                raise SshError(error.host, error.phase, found, hint=error.hint) from error
            raise
        return _Greeted(transport=transport, key=key, below=below)

    def _reach_last(self, jumps: tuple[Destination, ...]) -> Connection:
        """Connect to the last of the hosts on the way, or share the connection that is there."""
        with self._lock:
            way = self._ways.setdefault(jumps, _Way())
        with way.lock:
            if isinstance(way.result, SshError):
                raise way.result
            if way.result is None or not way.result.retain():
                try:
                    way.result = self._connect(replace(jumps[-1], jumps=jumps[:-1]))
                except SshError as error:
                    way.result = error
                    raise
                way.result.retain()
            return way.result

    def _gate(self, destination: Destination) -> threading.Semaphore:
        with self._lock:
            return self._gates.setdefault(destination.first_stop, threading.Semaphore(self._per_bastion))


@contextlib.contextmanager
def _naming(host: str) -> Iterator[None]:
    """Say of an error on the way to a host which host it kept from being reached."""
    try:
        yield
    except SshError as error:
        if error.host == host:
            raise
        found = f"on the way, {error.host}: {error.found}"
        raise SshError(host, error.phase, found, hint=error.hint) from error

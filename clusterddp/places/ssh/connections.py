"""Connects to hosts as `ssh HOST` would, through their jump hosts; every host key is checked before authentication."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Generic, TypeVar

from clusterddp.errors import SshError
from clusterddp.places.ssh.config import Destination, resolve
from clusterddp.places.ssh.keys import HostKey, KnownKey, check_host_key, read_known_keys, signing_algorithms

if TYPE_CHECKING:
    import paramiko

    from clusterddp.places.ssh.transport import Transport

_PER_BASTION = 8
"""How many connections at a time go through one jump host, or to one sshd."""
_MAX_TRIES = 10
"""How often a host that hangs up is tried: for about half a minute."""
_LONGEST_PAUSE_S = 5.0
_KEEPALIVE_S = 15
_SESSION_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 30
"""How long the kernel waits for a peer that acknowledges nothing (TCP_USER_TIMEOUT)."""
_PROBE_S = 8
_FAMILIES = {None: socket.AF_UNSPEC, 4: socket.AF_INET, 6: socket.AF_INET6}
AT_ONCE = 64
"""How many hosts are asked at once: they may share a file server, a bastion or a processor."""
EACH_S = 0.15
"""What each of many hosts adds to their timeout, in seconds: a session takes this machine that long, too."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
        from clusterddp.places.ssh.transport import authenticate

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
        from clusterddp.places.ssh.transport import open_tunnel, shake_hands

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


@dataclass(kw_only=True)
class Connection:
    """A connection to one host; made by `Connector`. The caller closes it."""

    destination: Destination
    key: HostKey
    transport: paramiko.Transport
    below: Stream | Connection
    """What carries it: a stream of its own, or a connection to the last jump host, which others may share."""
    users: int = 1
    """How many hold it; the last `close` closes it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_session(self, timeout_s: float = _SESSION_TIMEOUT_S) -> paramiko.Channel:
        """Open a channel for one command.

        Raises: SshError.
        """
        import paramiko

        try:
            return self.transport.open_session(timeout=timeout_s)
        except (paramiko.SSHException, EOFError, OSError) as error:
            found = f"{self.destination.address} opens no session ({' '.join(str(error).split())})"
            hint = "is the host overloaded? MaxSessions of its sshd"
            raise SshError(self.destination.host, "connect", found, hint=hint) from error

    def execute(self, command: str, timeout_s: float = _SESSION_TIMEOUT_S) -> paramiko.Channel:
        """Run a command on the host; the channel carries its standard streams.

        Raises: SshError.
        """
        import paramiko

        channel = self.open_session(timeout_s)
        channel.settimeout(timeout_s)
        try:
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            found = f"{self.destination.address} runs no command ({' '.join(str(error).split()) or 'no answer'})"
            raise SshError(self.destination.host, "start", found, hint="a forced command, or a login shell?") from error
        return channel

    def measure_round_trip_s(self) -> float:
        """Open a session on the host, and return how long its answer took.

        Raises: SshError.
        """
        start = time.monotonic()
        with self.open_session():
            return time.monotonic() - start

    def retain(self) -> bool:
        """Share an open connection; return False when it is closed already."""
        with self.lock:
            if self.users == 0 or not self.transport.is_active():
                return False
            self.users += 1
            return True

    def close(self) -> None:
        """Release the connection; the last user closes it, and what carries it."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
        self.transport.close()
        self.below.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(kw_only=True)
class Stream:
    """A socket to a host, and the ProxyCommand behind it, where there is one."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None
    stderr: IO[bytes] | None = None
    """The file that takes the ProxyCommand's standard error."""

    def last_error_line(self) -> str:
        """Return the last line that the ProxyCommand wrote to stderr."""
        if self.stderr is None or self.stderr.closed:
            return ""
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Close the socket and end the ProxyCommand; a second call does nothing."""
        self.socket.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.stderr is not None:
            self.stderr.close()


def open_stream(destination: Destination, environ: Mapping[str, str]) -> Stream:
    """Connect to a host, or start its ProxyCommand.

    Raises: SshError.
    """
    if destination.proxy_command is not None:
        return _start_proxy(destination, destination.proxy_command, environ)
    last: OSError | None = None
    for family, address in _addresses(destination):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(destination.connect_timeout_s or CONNECT_TIMEOUT_S)
            connection.connect(address)
        except OSError as error:
            connection.close()
            last = error
        else:
            _set_timeouts(connection)
            return Stream(socket=connection)
    assert last is not None
    raise _unreachable(destination, last) from last


class Fan(Generic[_Item, _Result]):
    """Calls a function for every item, in daemon threads; `undo` closes a result that no caller gets."""

    def __init__(
        self,
        items: Iterable[_Item],
        function: Callable[[_Item], _Result],
        undo: Callable[[_Result], object] = lambda result: None,
    ) -> None:
        self._order = list(items)
        self._function = function
        self._undo = undo
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Item, _Result] | BaseException] = queue.SimpleQueue()
        self._given_up = threading.Event()

    def results(self, at_once: int) -> dict[_Item, _Result]:
        """Return all results in the order of the items; an interrupt undoes the results so far."""
        for item in self._order:
            self._waiting.put(item)
        for _ in range(min(at_once, len(self._order))):
            threading.Thread(target=self._work, daemon=True).start()
        results: dict[_Item, _Result] = {}
        try:
            while len(results) < len(self._order):
                done = self._done.get()
                if isinstance(done, BaseException):
                    raise done
                results[done[0]] = done[1]
        except BaseException:
            self._given_up.set()
            for result in results.values():
                self._undo(result)
            raise
        return {item: results[item] for item in self._order}

    def _work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._given_up.is_set():
                item = self._waiting.get_nowait()
                try:
                    result = self._function(item)
                except BaseException as error:  # an unexpected error: the thread that waits raises it
                    self._done.put(error)
                    return
                if self._given_up.is_set():
                    self._undo(result)
                self._done.put((item, result))


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


def _addresses(destination: Destination) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(
            destination.hostname, destination.port, _FAMILIES[destination.ip_version], socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:
        text = error.strerror if isinstance(error, socket.gaierror) else str(error)
        found_text = f"{destination.hostname}: {text}"
        hint = f"its HostName in ~/.ssh/config; getent hosts {destination.hostname}"
        raise SshError(destination.host, "resolve", found_text, hint=hint) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


def _set_timeouts(connection: socket.socket) -> None:
    """Have the kernel detect a dead peer: by keepalive while nothing is sent, by missing acknowledgements otherwise."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _unreachable(destination: Destination, error: OSError) -> SshError:
    if isinstance(error, TimeoutError):
        limit_s = destination.connect_timeout_s or CONNECT_TIMEOUT_S
        found = f"{destination.address} did not answer within {limit_s:g} s"
        hint = f"is it on, and not behind a firewall? ping {destination.hostname}"
    elif isinstance(error, ConnectionRefusedError):
        found = f"{destination.address} refused the connection"
        hint = "nothing listens there: is sshd running, on this port?"
    else:
        found = f"{destination.address}: {os.strerror(error.errno) if error.errno else error}"
        hint = f"is it on, and on this network? ping {destination.hostname}"
    dropped = isinstance(error, ConnectionResetError)
    return SshError(destination.host, "connect", found, hint=hint, dropped=dropped)


def _start_proxy(destination: Destination, command: str, environ: Mapping[str, str]) -> Stream:
    """Start a ProxyCommand as OpenSSH does: by the user's shell, with a socket as its standard input and output."""
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    shell = environ.get("SHELL") or "/bin/sh"
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        found = f"the ProxyCommand's shell {shell}: {error.strerror}"
        raise SshError(destination.host, "connect", found, hint=f"ssh -G {destination.host}") from error
    finally:
        theirs.close()
    return Stream(socket=ours, process=process, stderr=stderr)

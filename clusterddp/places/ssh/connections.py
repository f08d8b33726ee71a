"""Connects to hosts as `ssh HOST` would, through their jump hosts; every host key is checked before authentication."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

from clusterddp.errors import SshError
from clusterddp.places.ssh.config import Destination, resolve
from clusterddp.places.ssh.keys import check_host_key, read_known_keys, signing_algorithms

if TYPE_CHECKING:  # a command that only reads local files loads no session
    from clusterddp.places.ssh.session import Session
    from clusterddp.planning.ssh import SshNode

_PER_BASTION = 8
"""How many connections at a time go through one jump host, or to one sshd."""
_MAX_TRIES = 10
"""How often a host that hangs up is tried: for about half a minute."""
_LONGEST_PAUSE_S = 5.0
_JUMP_PAUSE_S = 5.0
"""How long the error of a jump host is that of all hosts behind it, before it is tried again."""
_KEEPALIVE_S = 15
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
    """The way to the last of a list of jump hosts: its session, or why there is none; used under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: Session | None = None
    error: SshError | None = None
    failed_at: float = -math.inf
    """When it failed, in seconds of the monotonic clock."""


class Connector(contextlib.AbstractContextManager["Connector"]):
    """Connects to hosts, from any thread; each jump host is connected to once, and its connection is shared."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._gate = threading.Semaphore(AT_ONCE)
        self._gates: dict[str, threading.Semaphore] = {}
        self._routes: dict[tuple[Destination, ...], _Route] = {}

    def __exit__(self, *exception: object) -> None:
        """Release the jump hosts; one that a connection goes through is closed with that connection."""
        for route in list(self._routes.values()):
            if route.session is not None:
                route.session.close()

    def open(self, node: SshNode) -> Session:
        """Connect to a host, and start the agent there.

        Raises: SshError.
        """
        with self._gate:
            session = self.connect(node.host, pinned=node.host_key)
            try:
                with blamed(node.host):
                    session.start_agent(node)
            except BaseException:
                session.close()
                raise
            return session

    def connect(self, host: str, *, pinned: str | None = None) -> Session:
        """Connect to a host as the user's configuration says, without an agent; the caller closes the session.

        `pinned`: the key that it must have, `SHA256:...` or `TYPE BASE64`.
        Raises: SshError.
        """
        destination = resolve(host, self._environ)
        with self._turn(destination):
            return self._connect(destination, pinned)

    @contextlib.contextmanager
    def _turn(self, destination: Destination) -> Iterator[None]:
        """Wait for a turn at the first hop, and name the destination in the error of a jump host."""
        with self._lock:
            gate = self._gates.setdefault(destination.first_hop, threading.Semaphore(_PER_BASTION))
        try:
            with gate, blamed(destination.host):
                yield
        except SshError as error:
            if error.host == destination.host:
                raise
            found = f"on the way, {error.host}: {error.found}"
            raise SshError(destination.host, error.phase, found, hint=error.hint) from error

    def _connect(self, destination: Destination, pinned: str | None = None) -> Session:
        from clusterddp.places.ssh.transport import authenticate

        known = read_known_keys(destination)
        session = self._shake_hands(destination, signing_algorithms(destination, known, pinned))
        try:
            check_host_key(destination, known, session.key, pinned=pinned)
            authenticate(session.transport, destination)
        except BaseException:
            session.close()
            raise
        session.transport.set_keepalive(destination.keepalive_s or _KEEPALIVE_S)
        return session

    def _shake_hands(self, destination: Destination, algorithms: tuple[str, ...]) -> Session:
        """Reach a host and shake hands, again when it hangs up; its key is not checked, and no user name was sent."""
        number = 1
        while True:
            try:
                return self._shake_hands_once(destination, algorithms)
            except SshError as error:
                if not error.dropped:
                    raise
                if number == _MAX_TRIES:
                    found = f"{error.found}, {_MAX_TRIES} times"
                    raise SshError(error.host, error.phase, found, hint=error.hint) from error
            time.sleep(random.uniform(0.5, 1.5) * min(_LONGEST_PAUSE_S, 0.1 * 2**number))
            number += 1

    def _shake_hands_once(self, destination: Destination, algorithms: tuple[str, ...]) -> Session:
        from clusterddp.places.ssh.session import Session
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
        return Session(destination=destination, key=key, transport=transport, below=below)

    def _reach_last(self, jumps: tuple[Destination, ...]) -> Session:
        """Connect to the last of the jump hosts, or share the connection that is open."""
        with self._lock:
            route = self._routes.setdefault(jumps, _Route())
        with route.lock:
            if route.error is not None and time.monotonic() < route.failed_at + _JUMP_PAUSE_S:
                raise route.error
            if route.session is None or not route.session.retain():
                try:
                    route.session = self._connect(replace(jumps[-1], jumps=jumps[:-1]))
                except SshError as error:
                    route.error, route.failed_at = error, time.monotonic()
                    raise
                route.session.retain()
            return route.session


@contextlib.contextmanager
def blamed(host: str) -> Iterator[None]:
    """Make an unexpected error the host's: what a host sends may break whatever reads it, and harms no other host."""
    try:
        yield
    except SshError:
        raise
    except Exception as error:
        raise SshError(host, "ask", f"its answer is invalid: {type(error).__name__}: {error}", dropped=True) from error


def fulfil(future: Future[_Result | SshError], function: Callable[..., _Result], *words: Any) -> None:
    """Call a function for a future, whose result is an SshError that it raises; whoever waits raises other errors."""
    try:
        future.set_result(function(*words))
    except SshError as error:
        future.set_result(error)
    except BaseException as error:
        future.set_exception(error)


def call_each(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    undo: Callable[[_Result], object] = lambda result: None,
) -> dict[_Item, _Result | SshError]:
    """Call a function for every item, `AT_ONCE` at a time, in daemon threads; an SshError that it raises is a result.

    `undo` closes a result that no caller gets: after an interrupt, or after an unexpected error, which is raised.
    """
    futures: dict[_Item, Future[_Result | SshError]] = {item: Future() for item in items}
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in futures:
        waiting.put(item)
    given_up = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not given_up.is_set():
                item = waiting.get_nowait()
                fulfil(futures[item], function, item)

    def discard(future: Future[_Result | SshError]) -> None:
        if future.exception() is None and not isinstance(result := future.result(), SshError):
            undo(result)

    for _ in range(min(AT_ONCE, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for future in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
            future.result()
        return {item: future.result() for item, future in futures.items()}
    except BaseException:
        given_up.set()
        for future in futures.values():
            future.add_done_callback(discard)
        raise


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

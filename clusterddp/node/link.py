"""A connection between the head (node 0's supervisor) and another supervisor: signed JSON lines over TCP.

Each end first says one unsigned line, `{"nonce": ...}`. Every later line is `<mac> <JSON>`, where mac is the
HMAC-SHA256, keyed with the run's token, of both nonces, the direction, the line's number and the JSON. So a stranger
cannot speak, and nothing said on another connection, in the other direction or before can be said again. The link is
signed, not encrypted. A link outlives its connections: see peer.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from clusterddp.wire import build, read_object

BEAT_S = 1.0
JOIN_TIMEOUT_S = 5.0
"""How long a connection may take to prove that it belongs to the run."""

HOST_SILENT = "its host does not answer"
"""Why a link is lost when it is the other host, not only a process there, that is silent."""
GONE = "its process has ended"
"""Why a link is lost when the other host refuses connections to the process that listened there."""
GIVEN_UP = "node 0 has given it up"
"""How the reason begins when it is the head that has taken the other node for lost."""

_MAX_LINE = 512 * 1024
_MAX_UNPROVEN = 4 * 1024
"""What a stranger can make us keep."""
_MAX_UNSENT = 4 * 1024 * 1024

Message = dict[str, Any]
"""`{"kind": ..., facts}`; the kinds are listed in supervisor.py."""
_OF_A_CONNECTION: Mapping[str, Mapping[str, Any]] = {
    "heartbeat": {"heard": int},
    "join": {"node_rank": int, "pid": int, "port": int},
    "join_again": {"node_rank": int, "session": str, "heard": int},
    "welcome": {"session": str, "heard": int},
}
"""Kind -> key -> type, of the messages that a link itself reads."""


class Channel:
    """One end of the link. It never blocks; `lost` says in words why it can no longer be used."""

    def __init__(self, sock: socket.socket, *, token: str, side: Literal["head", "member"], now: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.lost: str | None = None
        self.opened = now
        self.last_heard = now
        self._beat_at = now + BEAT_S
        self._key = token.encode()
        self._said_as: bytes = side.encode()
        self._heard_as: bytes = b"member" if side == "head" else b"head"
        self._nonce = os.urandom(16).hex()
        self._nonces: bytes | None = None
        self._said = 0
        self._heard = 0
        self._unread = b""
        self._waiting: list[Message] = []
        self._unsent = json.dumps({"nonce": self._nonce}).encode() + b"\n"
        self.flush()

    @property
    def proven(self) -> bool:
        """True once a line with a right signature was heard."""
        return self._heard > 0

    @property
    def silent(self) -> bool:
        """True when everything that was to be said was handed to the kernel."""
        return self._nonces is not None and not self._unsent

    def send(self, message: Message) -> None:
        """Say something; it waits until the other end's nonce is known."""
        if self._nonces is None:
            self._waiting.append(message)
            return
        body = json.dumps(message).encode()
        self._unsent += self._mac(self._said_as, self._said, body) + b" " + body + b"\n"
        self._said += 1
        self.flush()

    def flush(self) -> None:
        """Hand to the kernel what it takes now."""
        try:
            while self._unsent and self.lost is None:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                self.lost = "it does not read what it is told"
        except OSError as error:
            self._lose(_broken(error))

    def receive(self, now: float) -> list[Message]:
        """Return what was said; look at `lost` afterwards."""
        try:
            for _ in range(32):
                data = self.sock.recv(65536)
                if not data:
                    self._lose("the connection was closed")
                    break
                self._unread += data
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(_broken(error))
        messages = self._take_lines()
        if messages:
            self.last_heard = now
        return messages

    def keep_alive(self, now: float, heartbeat: Message, *, every_s: float = BEAT_S, at_once: bool = False) -> None:
        """Send a heartbeat when it is time to."""
        if now >= self._beat_at or at_once:
            self._beat_at = now + every_s
            self.send(heartbeat)
        else:
            self.flush()

    def close(self) -> None:
        self._lose("closed by this end")
        with contextlib.suppress(OSError):
            self.sock.close()

    def _take_lines(self) -> list[Message]:
        messages: list[Message] = []
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            try:
                if self._nonces is None:
                    self._meet(line)
                else:
                    messages.append(self._read(line))
            except (ValueError, KeyError, TypeError):
                self._forget("it said something that is not of this run")
                return messages
        if len(self._unread) > (_MAX_LINE if self.proven else _MAX_UNPROVEN):
            self._forget("it said a line without an end")
        return messages

    def _meet(self, line: bytes) -> None:
        theirs = read_object(line)["nonce"]
        if not isinstance(theirs, str) or len(theirs) != len(self._nonce) or theirs == self._nonce:
            raise ValueError("not a nonce")
        pair = [self._nonce, theirs] if self._said_as == b"head" else [theirs, self._nonce]
        self._nonces = "".join(pair).encode()
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)

    def _read(self, line: bytes) -> Message:
        mac, _, body = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._heard_as, self._heard, body)):
            raise ValueError("wrong signature")
        self._heard += 1
        message = read_object(body)
        build({"kind": str, **_OF_A_CONNECTION.get(str(message.get("kind")), {})}, message)
        return message

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        assert self._nonces is not None
        text = b"%s %s %d %s" % (self._nonces, direction, number, body)
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why

    def _forget(self, why: str) -> None:
        self._unread = b""
        self._lose(why)


def watch_host(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other host has not answered for this long, on Linux.

    It is the kernels that speak here: a process that waits for a file server is not taken for a dead host.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    options = {
        socket.TCP_USER_TIMEOUT: int(silence_s * 1000),
        socket.TCP_KEEPIDLE: max(1, int(silence_s / 4)),
        socket.TCP_KEEPINTVL: max(1, int(silence_s / 4)),
        socket.TCP_KEEPCNT: 3,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def facts_of(message: Message) -> Message:
    """Return what a message says beside its kind."""
    return {key: value for key, value in message.items() if key != "kind"}


def listen(host: str) -> socket.socket:
    """Listen on `host` at a port that the kernel chooses; bound before anybody is told.

    Raises: OSError: `host` is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_walk(ports: Sequence[int]) -> socket.socket:
    """Listen, on all addresses of this host, at the first of these ports that nobody has taken.

    Without SO_REUSEADDR: a port that somebody has bound to listen on later is taken, too.
    Raises: OSError: all are taken.
    """
    dual = socket.has_dualstack_ipv6()
    last: OSError | None = None
    for port in ports:
        listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if dual:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
            listener.listen(1024)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            last = error
        else:
            return listener
    raise OSError(f"no port is free from {ports[0]} to {ports[-1]}") from last


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to the head, trying again until `timeout_s` have passed.

    Raises: OSError: nobody answered in time, or the head, which listened before anybody was told of it, is gone.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=min(5.0, max(0.5, deadline - time.monotonic())))
        except ConnectionRefusedError:
            raise
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.25)


def _broken(error: OSError) -> str:
    if error.errno in {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return HOST_SILENT
    return f"the connection broke ({error.strerror})"

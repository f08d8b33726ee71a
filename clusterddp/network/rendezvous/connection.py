"""A connection between two processes of clusterddp: messages as signed lines over TCP, after one handshake.

1. Each end sends an unsigned hello: `{"clusterddp": PROTOCOL, "version": VERSION, "nonce": NONCE}`.
2. Every later line is `<mac> <JSON>`. The mac is the HMAC-SHA256, under the key, of both nonces, the sender's role, the
   number of the line and the JSON. The first such line is `{}`: it proves that its sender knows the key.

So a line is valid once, on one connection, in one direction, and only a process with the key can make it. Lines are not
encrypted. With an empty key the same lines are exchanged and prove nothing.

In every protocol a connection never blocks, and buffers a limited number of bytes in each direction; a `Loss` names why
it is lost. A message waits until the other end is authenticated.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.network.interface import plain_address
from clusterddp.wire import build, read_object

JOIN_KEY = "CLUSTERDDP_JOIN_KEY"
"""The variable that holds the key of `worker`."""
VERSION = 3
"""The version of the handshake and of all messages; both ends need the same."""
_NONCE_LEN = 32

Role = Literal["server", "client"]


class UnprovenError(ValueError):
    """The other end does not know the key."""


class VersionError(ValueError):
    """The other end has another version of clusterddp."""


def prove(key: bytes, text: bytes) -> bytes:
    """Prove the knowledge of a key, which never goes over the network itself."""
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


class Signer:
    """Signs and checks the lines of one end of a connection; it has no socket."""

    def __init__(self, protocol: str, key: str, role: Role) -> None:
        self._protocol = protocol
        self._key = key.encode()
        self._nonce = secrets.token_hex(_NONCE_LEN // 2)
        self._nonces: bytes | None = None
        self._role = role
        self._sent = self._received = 0

    @property
    def met(self) -> bool:
        """True once the other end's nonce is known: lines can be signed."""
        return self._nonces is not None

    @property
    def proven(self) -> bool:
        """True once the other end has signed a line."""
        return self._received > 0

    def hello(self) -> bytes:
        """Return the first line, which is not signed."""
        hello = {"clusterddp": self._protocol, "version": VERSION, "nonce": self._nonce}
        return json.dumps(hello).encode() + b"\n"

    def meet(self, line: bytes) -> None:
        """Read the other end's hello.

        Raises: VersionError: it has another version. ValueError: it is no hello, or one of another protocol.
        """
        hello = build({"clusterddp": str, "version": int | None, "nonce": str}, read_object(line))
        theirs = hello["nonce"]
        if hello["clusterddp"] != self._protocol:
            raise ValueError("another protocol")
        if hello["version"] != VERSION:
            found = hello["version"] or "an earlier one"
            raise VersionError(f"it has another version of clusterddp: its rendezvous is {found}, here it is {VERSION}")
        if len(theirs) != _NONCE_LEN or not theirs.isascii() or theirs == self._nonce:
            raise ValueError("not a nonce of another process")
        pair = [self._nonce, theirs] if self._role == "server" else [theirs, self._nonce]
        self._nonces = "".join(pair).encode()

    def sign(self, message: dict[str, Any]) -> bytes:
        """Make a line."""
        body = json.dumps(message).encode()
        line = self._mac(self._role, self._sent, body) + b" " + body + b"\n"
        self._sent += 1
        return line

    def read(self, line: bytes) -> dict[str, Any]:
        """Read a line.

        Raises: UnprovenError: it is not signed with the key. ValueError: it is signed, and no object.
        """
        mac, _, body = line.partition(b" ")
        other: Role = "client" if self._role == "server" else "server"
        if not hmac.compare_digest(mac, self._mac(other, self._received, body)):
            raise UnprovenError("wrong signature")
        self._received += 1
        return read_object(body)

    def _mac(self, role: Role, number: int, body: bytes) -> bytes:
        assert self._nonces is not None, "the other end's nonce is not known yet"
        text = b"%s %s %d %s" % (self._nonces, role.encode(), number, body)
        return prove(self._key, text)


_MAX_UNPROVEN = 4 * 1024
"""The largest buffer, in bytes, for an end that is not authenticated."""
_MAX_UNSENT = 8 * 1024 * 1024
_READ_BYTES = 65536
_MAX_READS = 32
"""The most reads in one turn."""

Message = dict[str, Any]
"""`{"kind": ..., facts}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The messages that a kind of process exchanges."""

    name: str
    key: str
    """The name of the key in error messages."""
    max_bytes_to_server: int
    """The size limit of one message."""
    max_bytes_to_client: int
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind -> key -> type, for messages that are checked on arrival; the reader checks the others."""


LossKind = Literal[
    "closed",
    "broken",
    "refused",
    "no_answer",
    "host_silent",
    "process_silent",
    "process_ended",
    "given_up",
    "failed",
    "stranger",
    "unproven",
    "version",
]


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a connection or the process at its other end is lost; `text` is a clause for an error message."""

    kind: LossKind
    text: str

    def __str__(self) -> str:
        return self.text


CLOSED = Loss("closed", "the connection was closed")
HOST_SILENT = Loss("host_silent", "its host does not answer")
"""The host does not answer, not only a process there."""
NOT_OURS = Loss("stranger", "it sent data that is not a message of this protocol")


def no_key(protocol: Protocol) -> Loss:
    return Loss("unproven", f"it does not know the same {protocol.key}")


class Connection:
    """One end of a connection."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        protocol: Protocol,
        key: str,
        role: Role,
        now: float,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """`selector`: the socket is registered there; `close` unregisters it."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.signer = Signer(protocol.name, key, role)
        self.lost: Loss | None = None
        self.opened = self.last_received = now
        self.peer_address, self.peer_port, self.own_address = "", 0, ""
        with contextlib.suppress(OSError):  # it is closed already, which the next turn detects
            self.peer_address, self.peer_port = plain_address(str(sock.getpeername()[0])), sock.getpeername()[1]
            self.own_address = plain_address(str(sock.getsockname()[0]))
        self._protocol = protocol
        self._max_bytes = protocol.max_bytes_to_server if role == "server" else protocol.max_bytes_to_client
        self._selector = selector
        self._unread = b""
        self._waiting: list[Message] = []
        self._unsent = self.signer.hello()
        self.flush()

    @property
    def proven(self) -> bool:
        """True once the other end has proven that it knows the key."""
        return self.signer.proven

    def send(self, message: Message) -> None:
        """Send a message, as soon as the other end is authenticated."""
        if not self.proven:
            self._waiting.append(message)
            return
        self._unsent += self.signer.sign(message)
        self.flush()

    def flush(self) -> bool:
        """Write what the kernel accepts now; return True when nothing is left."""
        try:
            while self._unsent and self.lost is None:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                self._lose(Loss("broken", "it does not read what it is sent"))
        except OSError as error:
            self._lose(_broken(error))
        return not self._unsent or self.lost is not None

    def receive(self, now: float) -> list[Message]:
        """Return the messages that have arrived; look at `lost` afterwards."""
        ended: Loss | None = None
        try:
            for _ in range(_MAX_READS):
                data = self.sock.recv(_READ_BYTES)
                self._unread += data
                if not data:
                    ended = CLOSED
                if not data or len(self._unread) > self._limit:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            ended = _broken(error)
        messages = self._take_lines()
        if messages:
            self.last_received = now
        if ended is not None:
            self._lose(ended)
        self.flush()
        return messages

    def wait(self, deadline: float) -> list[Message]:
        """Wait for messages until `deadline` (`time.monotonic`); return [] when it passes or the connection is lost."""
        while True:
            messages = self.receive(time.monotonic())
            left_s = deadline - time.monotonic()
            if messages or self.lost is not None or left_s <= 0:
                return messages
            with selectors.DefaultSelector() as selector:
                selector.register(self.sock, selectors.EVENT_READ)
                selector.select(min(0.2, left_s))

    def close(self) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):  # the selector is closed already
                self._selector.unregister(self.sock)
            self._selector = None
        self._lose(Loss("closed", "closed by this end"))
        with contextlib.suppress(OSError):
            self.sock.close()

    @property
    def _limit(self) -> int:
        return self._max_bytes if self.proven else _MAX_UNPROVEN

    def _take_lines(self) -> list[Message]:
        messages: list[Message] = []
        *lines, rest = self._unread.split(b"\n")
        self._unread = rest
        try:
            for line in lines:
                self._take_line(line, messages)
            if len(rest) > self._limit:
                raise ValueError("a line without an end")
        except UnprovenError:
            self.flush()  # sends this end's proof, so that the other end finds the same error
            self._forget(no_key(self._protocol) if not self.proven else NOT_OURS)
        except VersionError as error:
            self._forget(Loss("version", str(error)))
        except ValueError:
            self._forget(NOT_OURS)
        return messages

    def _take_line(self, line: bytes, messages: list[Message]) -> None:
        if not self.signer.met:
            self.signer.meet(line)
            self._unsent += self.signer.sign({})
        elif not self.proven:
            self.signer.read(line)
            self._unsent += b"".join(self.signer.sign(message) for message in self._waiting)
            self._waiting.clear()
        else:
            message = self.signer.read(line)
            build({"kind": str, **self._protocol.fields.get(str(message.get("kind")), {})}, message)
            messages.append(message)

    def _lose(self, loss: Loss) -> None:
        if self.lost is None:
            self.lost = loss

    def _forget(self, loss: Loss) -> None:
        self._unread = b""
        self.lost = loss


def flush_all(connections: Iterable[Connection], within_s: float) -> None:
    """Wait until the kernel has accepted what was sent, for `within_s` at the most."""
    deadline = time.monotonic() + within_s
    unsent = list(connections)
    while (unsent := [each for each in unsent if not each.flush()]) and time.monotonic() < deadline:
        time.sleep(0.02)


def refusal(error: ClusterddpError) -> Message:
    """Make the message that refuses the other end, the same in every protocol."""
    return {"kind": "refused", "reason": error.message, "hint": error.hint}


def raise_if_refused(message: Message) -> None:
    """Raise the other end's refusal, if the message is one.

    Raises: PreflightError: the other end refuses.
    """
    if message["kind"] == "refused":
        hint = message.get("hint")
        reason = str(message.get("reason") or "") or "the other end refuses without a reason"
        raise PreflightError(reason, hint=None if hint is None else str(hint))


def _broken(error: OSError) -> Loss:
    if error.errno in {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return HOST_SILENT
    return Loss("broken", f"the connection broke ({error.strerror})")

"""The handshake, in which both ends of a connection prove that they know a key; and the signatures of all messages.

1. Each end sends an unsigned hello: `{"clusterddp": PROTOCOL, "version": VERSION, "nonce": NONCE}`.
2. Every later line is `<mac> <JSON>`. The mac is the HMAC-SHA256, under the key, of both nonces, the sender's role, the
   number of the line and the JSON. The first such line is `{}`: it proves that its sender knows the key.

So a line is valid once, on one connection, in one direction, and only a process with the key can make it. Lines are not
encrypted. With an empty key the same lines are exchanged and prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any, Literal

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
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()

"""Lines that two processes sign for each other, where both know the key that a person has given to all machines.

Each end first sends its nonce, unsigned. Every later line is `<mac> <JSON>`; mac is the HMAC-SHA256, under the key, of
both nonces, the direction, the line's number and the JSON. So the first such line proves that its sender knows the key,
and none can be sent by another process, or again. Lines are signed and not encrypted. Without a key (it is empty) the
same lines are exchanged and prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any, Literal

from clusterddp.wire import read_object

JOIN_KEY = "CLUSTERDDP_JOIN_KEY"
"""The variable that holds the key, for `join` and `worker`."""
_NONCE_LEN = 32


class UnprovenError(ValueError):
    """The other end does not know the key."""


class Signer:
    """One end of a signed connection; it has no socket."""

    def __init__(self, key: str, side: Literal["head", "member"]) -> None:
        self._key = key.encode()
        self._nonce = secrets.token_hex(_NONCE_LEN // 2)
        self._nonces: bytes | None = None
        self._sends_as, self._hears_as = (b"head", b"member") if side == "head" else (b"member", b"head")
        self._sent = self._heard = 0

    @property
    def met(self) -> bool:
        """True once the other end's nonce is known: lines can be signed."""
        return self._nonces is not None

    @property
    def proven(self) -> bool:
        """True once the other end has signed a line."""
        return self._heard > 0

    def greeting(self, of: str) -> bytes:
        """Return the first line; `of` names the command whose lines these are."""
        return json.dumps({"clusterddp": of, "nonce": self._nonce}).encode() + b"\n"

    def meet(self, line: bytes, of: str) -> None:
        """Read the other end's first line.

        Raises: ValueError: it is none, or is of another command.
        """
        words = read_object(line)
        theirs = words.get("nonce")
        if words.get("clusterddp") != of or not isinstance(theirs, str) or len(theirs) != _NONCE_LEN:
            raise ValueError("not a greeting")
        if theirs == self._nonce:
            raise ValueError("our own nonce")
        pair = [self._nonce, theirs] if self._sends_as == b"head" else [theirs, self._nonce]
        self._nonces = "".join(pair).encode()

    def sign(self, words: dict[str, Any]) -> bytes:
        """Make a line."""
        body = json.dumps(words).encode()
        line = self._mac(self._sends_as, self._sent, body) + b" " + body + b"\n"
        self._sent += 1
        return line

    def read(self, line: bytes) -> dict[str, Any]:
        """Read a line.

        Raises: UnprovenError: it is not signed with the key. ValueError: it is signed, and no object.
        """
        mac, _, body = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._hears_as, self._heard, body)):
            raise UnprovenError("wrong signature")
        self._heard += 1
        return read_object(body)

    def digest(self, text: str) -> str:
        """Return what both ends compute of one text, and what tells a third party without the key nothing of it."""
        return hmac.new(self._key, b"%s digest %s" % (self._both, text.encode()), hashlib.sha256).hexdigest()

    def veil(self, secret: str) -> str:
        """Hide a token, in hex, from those who do not know the key, or uncover it again."""
        pad = hmac.new(self._key, b"%s secret" % self._both, hashlib.sha256).digest()
        return bytes(a ^ b for a, b in zip(bytes.fromhex(secret), pad, strict=False)).hex()

    @property
    def _both(self) -> bytes:
        assert self._nonces is not None, "the other end's nonce is not known yet"
        return self._nonces

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        text = b"%s %s %d %s" % (self._both, direction, number, body)
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()

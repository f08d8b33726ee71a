"""What joining machines say to each other before a run: one JSON object a line over TCP.

    node 0    {"clusterddp": "join", "nonce": str}                      as soon as somebody connects
    node N    {"node_rank", "host", "pid", "facts", "spec", "proof"}    proof: that it knows the key, if there is one
    node 0    {"waiting_for": [str]}                                    whenever one more has come
              {"refused": str, "hint": str | null}                      the end for this one
              {"run", "token", "attempt", "master_addr", "link"}        the beginning; the token is veiled with the key
              {"started": start.json, "attempt": int}, {"ended": end.json, "attempt": int}

Without a key (CLUSTERDDP_JOIN_KEY) whoever can reach the port, or listen on the network, can take part.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.metadata
import json
import platform
import socket
import time
from typing import Any

from clusterddp import __version__
from clusterddp.wire import read_object

MAX_LINE = 1_000_000
Words = dict[str, Any]


class Line:
    """One end of a conversation; it never waits."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.ended = False
        self._unread = b""
        self._unsent = b""

    def say(self, words: Words) -> None:
        """Say something, as soon as the other end takes it."""
        self._unsent += json.dumps(words).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Hand to the kernel what it takes now; True when that is all."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except BlockingIOError:
                raise
            except OSError:
                self.ended, self._unsent = True, b""
        return not self._unsent

    def flush_within(self, seconds: float) -> None:
        """Wait for the other end to take what was said, but no longer than this."""
        deadline = time.monotonic() + seconds
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(0.02)

    def hear(self) -> list[Words]:
        """Return what was said since; what is no line of ours ends the conversation."""
        try:
            while data := self.sock.recv(65536):
                self._unread += data
                if len(self._unread) > MAX_LINE:
                    break
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        *lines, self._unread = self._unread.split(b"\n")
        try:
            return [read_object(line) for line in lines]
        except ValueError:
            self.ended = True
            return []

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.close()


def read_facts() -> dict[str, str | None]:
    """Say what has to be the same on all machines, in words for people."""
    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    major, minor, _ = platform.python_version_tuple()
    return {"clusterddp": __version__, "torch": torch, "Python": f"{major}.{minor}"}


def prove(key: str, nonce: str, node_rank: int) -> str:
    """Return what only who knows the key can say to this nonce."""
    return hmac.new(key.encode(), f"{nonce} {node_rank}".encode(), hashlib.sha256).hexdigest()


def veil(token: str, key: str, nonce: str) -> str:
    """Hide a token from those who do not know the key, or uncover it again."""
    pad = hmac.new(key.encode(), f"{nonce} token".encode(), hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(bytes.fromhex(token), pad, strict=False)).hex()

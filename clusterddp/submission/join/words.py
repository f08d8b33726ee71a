"""What joining machines say to each other before a run: one JSON object a line over TCP.

    both      their nonces, when connected; each line that follows is signed with the key (rendezvous/signed.py)
    node 0    {"node_rank": 0}                                     which proves that it knows the key
    node N    {"node_rank", "host", "pid", "facts", "spec"}        once node 0 is proven
              {"node_rank", "host", "pid", "facts", "digests"}     where there is no key: nobody is proven
              {"unproven": true}                                   node 0 does not know the key; the end
    node 0    {"waiting_for": [str]}                               whenever one more has come
              {"refused": str, "hint": str | null}                 the end for this one
              {"run", "token", "attempt", "master_addr", "link"}   the beginning; the token is veiled with the key
              {"started": start.json, "attempt": int}, {"ended": end.json, "attempt": int}

Without a key (CLUSTERDDP_JOIN_KEY) whoever can reach the port can take the place of a node, so no value of the spec is
sent to anybody: a digest of each is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from clusterddp import __version__
from clusterddp.errors import PreflightError
from clusterddp.rendezvous.signed import Signer, UnprovenError
from clusterddp.run.directory import MAX_ATTEMPTS, is_run_name, is_token
from clusterddp.wire import build

MAX_LINE = 1_000_000
_OURS = "join"
Words = dict[str, Any]


class Link(TypedDict):
    """Where the head's supervisor listens."""

    host: str
    port: int


class Line:
    """One end of a conversation; it never waits."""

    def __init__(self, sock: socket.socket, key: str, side: Literal["head", "member"]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.signer = Signer(key, side)
        self.ended = False
        self.unproven = False
        """True when the other end has said something that is not signed with our key."""
        self._unread = b""
        self._unsent = self.signer.greeting(_OURS)
        self._waiting: list[Words] = []
        self.flush()

    def say(self, words: Words) -> None:
        """Say something, as soon as the other end's nonce is known and it takes it."""
        if self.signer.met:
            self._unsent += self.signer.sign(words)
            self.flush()
        else:
            self._waiting.append(words)

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
        heard: list[Words] = []
        try:
            for line in lines:
                if self.signer.met:
                    heard.append(self.signer.read(line))
                else:
                    self._meet(line)
        except ValueError as error:
            self.ended, self.unproven = True, isinstance(error, UnprovenError)
        return heard

    def _meet(self, line: bytes) -> None:
        self.signer.meet(line, _OURS)
        waiting, self._waiting = self._waiting, []
        for words in waiting:
            self.say(words)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """How the run goes on once all are there, as node 0 says it."""

    run: str
    token: str
    attempt: int
    master_addr: str
    link: Link

    @classmethod
    def from_json(cls, words: Words, signer: Signer) -> Beginning:
        """Take what node 0 has said, and uncover the token; without a key it may be anybody who says it.

        Raises: PreflightError: it cannot be what node 0 says.
        """
        try:
            said: Beginning = build(cls, words, "what node 0 says")
            fits = is_run_name(said.run) and is_token(said.token) and 0 <= said.attempt < MAX_ATTEMPTS
        except ValueError as error:
            raise PreflightError(f"what answers as node 0 is none: {error}") from error
        addresses_fit = said.master_addr.isprintable() and said.link["host"].isprintable()
        if not (fits and addresses_fit and 0 < said.link["port"] < 65536):
            raise PreflightError(f"what answers as node 0 is none: it names the run {said.run!r:.60}")
        return dataclasses.replace(said, token=signer.veil(said.token))


def digests_of(spec: Mapping[str, Any], signer: Signer) -> dict[str, str]:
    """Return a digest of each value, by dotted key; another one in each conversation."""
    return {key: signer.digest(f"{key} {json.dumps(value, sort_keys=True)}") for key, value in spec.items()}

"""Every other node of machines that join: it finds node 0, says who it is, and is told how it goes on."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from clusterddp.dist.own_host import addresses_of
from clusterddp.errors import PreflightError
from clusterddp.launch.attempts import Tell
from clusterddp.launch.joining.words import Line, Words, prove, veil
from clusterddp.wire import build

_TRY_S = 3.0
_PAUSE_S = 0.3
_GRACE_S = 2.0
"""How much longer than our own time-out node 0 may take to say that it gives up: it knows who is missing."""


class _Refusal(TypedDict):
    refused: str
    hint: str | None


class _Link(TypedDict):
    host: str
    port: int


class _Beginning(TypedDict):
    run: str
    token: str
    attempt: int
    master_addr: str
    link: _Link


class Seat:
    """The place of this node, from its first knock until the run has ended."""

    def __init__(self, *, hosts: Sequence[str], node_rank: int, port: int, key: str, tell: Tell) -> None:
        self._hosts = hosts
        self._node_rank = node_rank
        self._port = port
        self._key = key
        self._tell = tell
        self._nonce = ""
        self._waiting_for: list[str] = []
        self._heard: list[Words] = []
        self._line: Line | None = None

    def take(self, spec: Mapping[str, Any], facts: Mapping[str, str | None], timeout_s: float) -> Words:
        """Find node 0 and wait until all are there; return what it says of the run, the token uncovered.

        Raises: PreflightError: nobody answers, this machine is refused, or not all come in time.
        """
        deadline = time.monotonic() + timeout_s
        head = f"node 0 at {self._hosts[0]}:{self._port}"
        self._tell(f"node {self._node_rank} of {len(self._hosts)} looks for {head}, {timeout_s:g} s at the most")
        self._line = self._connect(head, deadline, timeout_s)
        greeting = self._next(deadline)
        if greeting is None or greeting.get("clusterddp") != "join" or not isinstance(greeting.get("nonce"), str):
            raise PreflightError(f"{head}: what answers there is no clusterddp join", hint=self._hint())
        self._nonce = greeting["nonce"]
        proof = prove(self._key, self._nonce, self._node_rank)
        who = {"node_rank": self._node_rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._line.say(who | {"facts": dict(facts), "spec": dict(spec), "proof": proof})
        while (words := self._next(deadline + _GRACE_S)) is not None:
            try:
                if "refused" in words:
                    refused = build(_Refusal, words, "refusal")
                    why = refused["refused"] or f"{head} refuses, and says no reason"
                    raise PreflightError(why, hint=refused["hint"])
                if "run" in words:
                    begin = build(_Beginning, words, "beginning")
                    return {**begin, "token": veil(begin["token"], self._key, self._nonce)}
                if "waiting_for" in words:
                    self._waiting_for = build(list[str], words["waiting_for"])
            except ValueError as error:
                raise PreflightError(f"{head}: what answers there makes no sense: {error}") from error
        if self._line.ended:
            raise PreflightError(f"{head} has gone while all were being waited for", hint="its terminal says why")
        absent = ", ".join(self._waiting_for) or "some node"
        raise PreflightError(f"{absent} did not come within {timeout_s:g} s", hint=self._hint())

    def news(self) -> list[Words]:
        """Return what node 0 has said since."""
        assert self._line is not None
        heard, self._heard = self._heard + self._line.hear(), []
        return heard

    @property
    def ended(self) -> bool:
        return self._line is None or self._line.ended

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def _connect(self, head: str, deadline: float, timeout_s: float) -> Line:
        why = "its name is not known here"
        while True:
            for address in addresses_of(self._hosts[0]):
                try:
                    left = max(0.1, min(_TRY_S, deadline - time.monotonic()))
                    return Line(socket.create_connection((address, self._port), timeout=left))
                except OSError as error:
                    why = f"{address}: {error.strerror or 'no answer'}"
            if time.monotonic() + _PAUSE_S >= deadline:
                raise PreflightError(f"{head} did not answer within {timeout_s:g} s: {why}", hint=self._hint())
            time.sleep(_PAUSE_S)

    def _next(self, deadline: float) -> Words | None:
        """Return what is said next; None when the time is up, or nothing more will be."""
        assert self._line is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._line.sock, selectors.EVENT_READ)
            while not self._heard and not self._line.ended and time.monotonic() < deadline:
                selector.select(min(0.2, max(0.0, deadline - time.monotonic())))
                self._line.flush()
                self._heard += self._line.hear()
        return self._heard.pop(0) if self._heard else None

    def _hint(self) -> str:
        return (
            f"clusterddp join has to be typed on {self._hosts[0]}, too, with the same spec, and its port {self._port} "
            "be open; network.master_port names another port"
        )

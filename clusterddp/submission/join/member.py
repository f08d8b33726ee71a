"""Every other node of machines that join: it finds node 0, says who it is, and is told how it goes on."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.errors import PreflightError
from clusterddp.network.own_host import addresses_of
from clusterddp.rendezvous.signed import JOIN_KEY
from clusterddp.run.attempts import Tell
from clusterddp.submission.join.words import Beginning, Line, Words, digests_of

_TRY_S = 3.0
_PAUSE_S = 0.3
_GRACE_S = 2.0
"""How much longer than our own time-out node 0 may take to say that it gives up: it knows who is missing."""


class Seat:
    """The place of this node, from its first knock until the run has ended."""

    def __init__(self, *, hosts: Sequence[str], node_rank: int, port: int, key: str, tell: Tell) -> None:
        self._hosts = hosts
        self._node_rank = node_rank
        self._port = port
        self._key = key
        self._tell = tell
        self._waiting_for: list[str] = []
        self._heard: list[Words] = []
        self._line: Line | None = None

    def take(self, spec: Mapping[str, Any], facts: Mapping[str, str | None], timeout_s: float) -> Beginning:
        """Find node 0 and wait until all are there; return what it says of the run.

        Raises: PreflightError: nobody answers, this machine is refused, or not all come in time.
        """
        deadline = time.monotonic() + timeout_s
        head = f"node 0 at {self._hosts[0]}:{self._port}"
        self._tell(f"node {self._node_rank} of {len(self._hosts)} looks for {head}, {timeout_s:g} s at the most")
        self._line = self._connect(head, deadline, timeout_s)
        self._introduce(self._line, head, deadline, spec, facts)
        while (words := self._next(deadline + _GRACE_S)) is not None:
            if "refused" in words:
                hint = words.get("hint")
                raise PreflightError(str(words["refused"]), hint=None if hint is None else str(hint))
            if "run" in words:
                return Beginning.from_json(words, self._line.signer)
            if isinstance(words.get("waiting_for"), list):
                self._waiting_for = [str(each) for each in words["waiting_for"]]
        if self._line.ended:
            raise PreflightError(f"{head} has gone while all were being waited for", hint="its terminal says why")
        absent = ", ".join(self._waiting_for) or "some node"
        raise PreflightError(f"{absent} did not come within {timeout_s:g} s", hint=self._hint())

    def _introduce(
        self, line: Line, head: str, deadline: float, spec: Mapping[str, Any], facts: Mapping[str, str | None]
    ) -> None:
        """Say who we are, and what we have, once node 0 has proven that it knows the key.

        Raises: PreflightError: it does not.
        """
        first = self._next(deadline)
        if line.unproven:
            line.say({"unproven": True})
            line.flush_within(1.0)
            hint = f"{JOIN_KEY} has to have the same value on all machines, or be set on none"
            raise PreflightError(f"{head} does not know the same {JOIN_KEY}", hint=hint)
        if first is None:
            raise PreflightError(f"{head}: what answers there is no clusterddp join", hint=self._hint())
        ours = {"spec": dict(spec)} if self._key else {"digests": digests_of(spec, line.signer)}
        who = {"node_rank": self._node_rank, "host": socket.gethostname(), "pid": os.getpid()}
        line.say(who | {"facts": dict(facts)} | ours)

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
                    return Line(socket.create_connection((address, self._port), timeout=left), self._key, "member")
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

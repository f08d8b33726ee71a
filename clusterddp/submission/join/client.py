"""The client of `clusterddp join` on nodes 1 and up: it connects to node 0, introduces itself and receives the run."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.errors import PreflightError
from clusterddp.network.own_host import addresses_of
from clusterddp.rendezvous.client import Found, NotFound, Search
from clusterddp.rendezvous.connection import Connection, Message, raise_if_refused
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.run.attempts import Report
from clusterddp.submission.join.messages import JOIN, Beginning, digests_of
from clusterddp.wire import build

_GRACE_S = 2.0
"""How long after our own timeout node 0's refusal is waited for; it names the machines that are missing."""


class JoinClient:
    """The connection of this node to node 0, from the first try until the run has ended."""

    def __init__(self, *, hosts: Sequence[str], node_rank: int, port: int, key: str, report: Report) -> None:
        self._hosts = hosts
        self._node_rank = node_rank
        self._port = port
        self._key = key
        self._report = report
        self._head = f"node 0 at {hosts[0]}:{port}"
        self._waiting_for = "some node"
        self._unread: list[Message] = []
        self._selector = selectors.DefaultSelector()
        self._connection: Connection | None = None

    def join(self, spec: Mapping[str, Any], facts: Mapping[str, str | None], timeout_s: float) -> Beginning:
        """Connect to node 0 and wait until all machines have joined; return what node 0 sends of the run.

        Raises: PreflightError: node 0 does not answer or refuses this machine, or not all machines join in time.
        """
        deadline = time.monotonic() + timeout_s
        self._report(f"node {self._node_rank} of {len(self._hosts)} connects to {self._head}; timeout {timeout_s:g} s")

        def introduce(connection: Connection) -> Message:
            ours = {"spec": dict(spec)} if self._key else {"digests": digests_of(spec, connection.signer)}
            identity = {"node_rank": self._node_rank, "host": socket.gethostname(), "pid": os.getpid()}
            return {"kind": "join"} | identity | {"facts": dict(facts)} | ours

        search = Search(
            lambda: addresses_of(self._hosts[0]),
            [self._port],
            protocol=JOIN,
            key=self._key,
            introduce=introduce,
            selector=self._selector,
        )
        with contextlib.closing(search):
            found = search.wait(deadline)
        if not isinstance(found, Found):
            raise self._not_found(found, timeout_s)
        return self._await_beginning(found, deadline, timeout_s)

    def updates(self) -> list[Message]:
        """Return the messages that node 0 has sent since the last call."""
        assert self._connection is not None
        received, self._unread = self._unread + self._connection.receive(time.monotonic()), []
        return received

    @property
    def ended(self) -> bool:
        return self._connection is None or self._connection.lost is not None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._selector.close()

    def _await_beginning(self, found: Found, deadline: float, timeout_s: float) -> Beginning:
        self._connection, messages = found
        while messages:
            for number, message in enumerate(messages, 1):
                raise_if_refused(message)
                if message["kind"] == "begin":
                    self._unread = messages[number:]
                    return Beginning.from_json(message, self._connection.signer)
                if message["kind"] == "waiting":
                    self._take_waiting(message)
            messages = self._connection.wait(deadline + _GRACE_S)
        if self._connection.lost is not None:
            reason = f"{self._head} disconnected before all machines had joined"
            raise PreflightError(reason, hint="the terminal of node 0 shows the reason")
        raise PreflightError(f"{self._waiting_for} did not join within {timeout_s:g} s", hint=self._hint())

    def _take_waiting(self, message: Message) -> None:
        with contextlib.suppress(ValueError):
            self._waiting_for = ", ".join(build({"for": list[str]}, message)["for"]) or self._waiting_for

    def _not_found(self, failure: NotFound | None, timeout_s: float) -> PreflightError:
        if failure is None:
            why, kind = "its name cannot be resolved here", ""
        else:
            why, kind = f"{failure.address}: {failure.loss}", failure.loss.kind
        if kind == "unproven":
            hint = f"set {JOIN_KEY} to the same value on all machines, or on none"
            return PreflightError(f"{self._head} does not know the same {JOIN_KEY}", hint=hint)
        if kind == "version":
            return PreflightError(f"{self._head}: {why}", hint="install the same version on all machines")
        if kind in {"closed", "stranger"}:
            return PreflightError(f"{self._head}: another program answers there", hint=self._hint())
        return PreflightError(f"{self._head} did not answer within {timeout_s:g} s: {why}", hint=self._hint())

    def _hint(self) -> str:
        return (
            f"run clusterddp join on {self._hosts[0]}, too, with the same spec, and open its port {self._port}; "
            "network.master_port sets another port"
        )

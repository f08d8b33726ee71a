"""The server of `clusterddp join` on node 0: it accepts or refuses the other machines, then sends them updates."""

from __future__ import annotations

import collections
import errno
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from clusterddp.errors import PreflightError
from clusterddp.network.interface import LOOPBACK_ADDRESS
from clusterddp.network.port import bind_port
from clusterddp.rendezvous.connection import Connection, Message, flush_all, no_key, refusal
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.server import Arrival, Participant, Participants, refuse
from clusterddp.run.attempts import Report
from clusterddp.submission.join.messages import JOIN, digests_of
from clusterddp.wire import build

_MAX_DIFFERENCES = 3
_MAX_HOST, _MAX_REASON = 255, 1000
"""In characters."""
_MAX_REFUSED = 20
"""How many refusals the final error names."""
_SHOWN_WITH_KEY = f"compare the specs; with the same {JOIN_KEY} on all machines, both values are shown here"


class _Machine(TypedDict):
    node_rank: int
    host: str
    pid: int
    facts: dict[str, Any]


class _Introduction(_Machine, total=False):
    """What a machine sends first: with a key its spec, else digests of it."""

    spec: dict[str, Any]
    digests: dict[str, str]


@dataclass(kw_only=True, slots=True)
class JoinServer:
    """The machines that have joined node 0; `gather` waits for all of them."""

    hosts: Sequence[str]
    """In the order of the node ranks."""
    spec: Mapping[str, Any]
    """The values of the spec by dotted key."""
    facts: Mapping[str, str | None]
    key: str
    port: int
    report: Report
    clients: Participants[_Introduction] | None = None
    """The machines that have joined, by node rank; None: `gather` has not been called."""
    _refused: dict[str, None] = field(default_factory=dict)

    def gather(self, timeout_s: float) -> None:
        """Wait until every other node has joined.

        Raises: PreflightError: the port is in use, or a node did not join; those that did receive the same error.
        """
        deadline = time.monotonic() + timeout_s
        clients = self.clients = Participants(
            self._listen(), protocol=JOIN, key=self.key, num_expected=len(self.hosts), report=self.report
        )
        try:
            others = self._spell_missing()
            self.report(f"node 0 of {len(self.hosts)} waits at port {self.port} for {others}; timeout {timeout_s:g} s")
            if not self.key:
                self.report(f"note: {JOIN_KEY} is not set: any process that reaches port {self.port} can join")
            while self._missing() and time.monotonic() < deadline:
                self.take_turn(clients, 0.1)
        finally:
            clients.server.close()
        if self._missing():
            error = self._absence(timeout_s, clients.server.unproven)
            self.send_all(refusal(error))
            self.close()
            raise error

    def take_turn(self, clients: Participants[_Introduction], wait_s: float) -> None:
        """Wait at most `wait_s` for machines that introduce themselves or disconnect."""
        arrivals, left = clients.take_turn(wait_s)
        for node_rank, client in left.items():
            self.report(f"{_spell(node_rank, client.introduction['host'])} has disconnected")
            self._send_missing()
        for arrival in arrivals:
            self._accept_or_refuse(arrival, clients)

    def master_addr(self) -> str:
        """Return the address at which most machines reached node 0."""
        reached = [client.connection.own_address for _, client in sorted(self._joined().items())]
        return collections.Counter(reached).most_common(1)[0][0] if reached else LOOPBACK_ADDRESS

    def begin(self, run: str, token: str, attempt: int, link: dict[str, Any] | None) -> None:
        """Send all machines the run and the address of its head."""
        begin = {"kind": "begin", "run": run, "attempt": attempt, "link": link, "master_addr": self.master_addr()}
        for client in self._joined().values():
            client.connection.send(begin | {"token": client.connection.signer.mask(token)})

    def send_all(self, message: Message) -> None:
        if self.clients is not None:
            self.clients.send_all(message)

    def flush(self) -> None:
        """Pass pending messages to the kernel, as far as it takes them now."""
        flush_all((client.connection for client in self._joined().values()), 0.0)

    def close(self, within_s: float = 2.0) -> None:
        """Close all connections after their pending messages were sent."""
        if self.clients is not None:
            self.clients.close(within_s)

    def _listen(self) -> socket.socket:
        try:
            return bind_port(self.port, shared=True, listening=True)
        except OSError as error:
            taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
            raise PreflightError(
                f"{self.hosts[0]}: port {self.port} {taken}",
                hint="another join of this spec may run here; network.master_port, on all machines, sets another port",
            ) from error

    def _accept_or_refuse(self, arrival: Arrival, clients: Participants[_Introduction]) -> None:
        connection = arrival.connection
        try:
            introduction = build(_Introduction, arrival.message)
            introduction["host"] = introduction["host"][:_MAX_HOST]
            node_rank, host = introduction["node_rank"], introduction["host"]
            reason = self._refusal_reason(connection, introduction)[:_MAX_REASON]
        except ValueError:
            connection.close()
            return
        if not reason:
            clients.by_number[node_rank] = Participant(connection, introduction)
            missing = self._spell_missing()
            self.report(
                f"{_spell(node_rank, host)} has joined; {f'waiting for {missing}' if missing else 'none is missing'}"
            )
            self._send_missing()
            return
        who = f"{_spell(node_rank, host)}, pid {introduction['pid']}"
        self._remember(f"{who}: {reason}")
        hint = None if self.key else _SHOWN_WITH_KEY
        refuse(connection, PreflightError(f"node 0 ({self.hosts[0]}) refuses {who}: {reason}", hint=hint))
        if self.key:
            self.report(f"refused {who}: {reason}")
        else:
            clients.server.refuse(connection, f"{who}: {reason}", time.monotonic())

    def _remember(self, refused: str) -> None:
        if len(self._refused) < _MAX_REFUSED:
            self._refused[refused] = None

    def _refusal_reason(self, connection: Connection, introduction: _Introduction) -> str:
        """Return why a machine cannot join; empty if it can."""
        for name, ours in self.facts.items():
            theirs = introduction["facts"].get(name)
            if theirs != ours:
                return f"its {name} is {theirs or 'none'}, on node 0 {ours or 'none'}"
        if self.key:
            differences = _differences(introduction.get("spec", {}), self.spec)
        else:
            differences = _differing_keys(introduction.get("digests", {}), digests_of(self.spec, connection.signer))
        if differences:
            return f"its spec differs from node 0's: {'; '.join(differences)}"
        node_rank = introduction["node_rank"]
        if not 0 < node_rank < len(self.hosts):
            return f"the spec has nodes 0 to {len(self.hosts) - 1}"
        other = self._joined().get(node_rank)
        if other is not None:
            host, pid = other.introduction["host"], other.introduction["pid"]
            return f"node {node_rank} has joined already: {host} ({other.connection.peer_address}), pid {pid}"
        return ""

    def _send_missing(self) -> None:
        self.send_all({"kind": "waiting", "for": [_spell(rank, self.hosts[rank]) for rank in self._missing()]})

    def _joined(self) -> dict[int, Participant[_Introduction]]:
        return self.clients.by_number if self.clients is not None else {}

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, len(self.hosts)) if rank not in self._joined()]

    def _spell_missing(self) -> str:
        return ", ".join(_spell(rank, self.hosts[rank]) for rank in self._missing())

    def _absence(self, timeout_s: float, unproven: Mapping[str, int]) -> PreflightError:
        joined = ", ".join(_spell(rank, self.hosts[rank]) for rank in (0, *sorted(self._joined())))
        for address in unproven:
            self._remember(f"{address}: {no_key(JOIN)}")
        refused = "; refused: " + "; ".join(self._refused) if self._refused else ""
        return PreflightError(
            f"{self._spell_missing()} did not join within {timeout_s:g} s; joined: {joined}{refused}",
            hint=f"run clusterddp join on each machine, and open port {self.port} of {self.hosts[0]}",
        )


def _spell(node_rank: int, host: str) -> str:
    return f"node {node_rank} ({host})"


def _differing_keys(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Name keys of two specs whose values differ, except keys that only our spec has."""
    differing = [key for key in ours if theirs.get(key) != ours[key]] + [key for key in theirs if key not in ours]
    named = [f"{key} differs" for key in differing if key in theirs][:_MAX_DIFFERENCES]
    return named + ([f"and {len(differing) - len(named)} more"] if len(differing) > len(named) else [])


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Name the keys of two specs that differ, with both values."""
    keys = [key for key in dict.fromkeys((*ours, *theirs)) if theirs.get(key) != ours.get(key)]
    shown = [f"{key} is {theirs.get(key)!r}, on node 0 {ours.get(key)!r}" for key in keys[:_MAX_DIFFERENCES]]
    return shown + ([f"and {len(keys) - len(shown)} more"] if len(keys) > len(shown) else [])

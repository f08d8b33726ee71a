"""Node 0 of machines that join: it counts the others, refuses those that do not fit, and sends the run's updates."""

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
from clusterddp.run.attempts import Tell
from clusterddp.submission.join.messages import JOIN, digests_of
from clusterddp.wire import build

_MAX_DIFFERENCES = 3
_MAX_HOST, _MAX_OBJECTION = 255, 1000
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
    """Node 0's side; `gather` returns when all machines are there."""

    hosts: Sequence[str]
    """In the order of the node ranks."""
    spec: Mapping[str, Any]
    """The values of the spec by dotted key."""
    facts: Mapping[str, str | None]
    key: str
    port: int
    tell: Tell
    members: Participants[_Introduction] | None = None
    """By node rank; None: `gather` has not been called."""
    _refused: dict[str, None] = field(default_factory=dict)

    def gather(self, timeout_s: float) -> None:
        """Wait for every other node.

        Raises: PreflightError: the port is taken, or a node did not come; all that came receive the same error.
        """
        deadline = time.monotonic() + timeout_s
        members = self.members = Participants(
            self._listen(), protocol=JOIN, key=self.key, num_expected=len(self.hosts), report=self.tell
        )
        try:
            self.tell(self._waiting_for_whom(timeout_s))
            if not self.key:
                self.tell(f"note: no {JOIN_KEY} is set: who reaches port {self.port} can take a node's place")
            while self._missing() and time.monotonic() < deadline:
                self.take_turn(members, 0.1)
        finally:
            members.server.close()
        if missing := self._missing():
            error = self._absence(missing, timeout_s, members.server.unproven)
            self.send_all(refusal(error))
            self.close()
            raise error

    def take_turn(self, members: Participants[_Introduction], wait_s: float) -> None:
        """Wait a moment for machines that introduce themselves or leave."""
        arrivals, left = members.take_turn(wait_s)
        for node_rank, member in left.items():
            self.tell(f"{_spell(node_rank, member.introduction['host'])} has left again")
            self._send_who_is_missing()
        for arrival in arrivals:
            self._meet(arrival, members)

    def master_addr(self) -> str:
        """Return the address of ours that the others reached; most of them, should they differ."""
        reached = [member.connection.own_address for _, member in sorted(self._counted().items())]
        return collections.Counter(reached).most_common(1)[0][0] if reached else LOOPBACK_ADDRESS

    def begin(self, run: str, token: str, attempt: int, link: dict[str, Any] | None) -> None:
        """Send all machines how the run goes on."""
        begin = {"kind": "begin", "run": run, "attempt": attempt, "link": link, "master_addr": self.master_addr()}
        for member in self._counted().values():
            member.connection.send(begin | {"token": member.connection.signer.mask(token)})

    def send_all(self, message: Message) -> None:
        if self.members is not None:
            self.members.send_all(message)

    def flush(self) -> None:
        """Hand to the kernel what it takes now."""
        flush_all((member.connection for member in self._counted().values()), 0.0)

    def close(self, within_s: float = 2.0) -> None:
        """Close all connections, once what was sent is on its way."""
        if self.members is not None:
            self.members.close(within_s)

    def _listen(self) -> socket.socket:
        try:
            return bind_port(self.port, shared=True, listening=True)
        except OSError as error:
            taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at: {error.strerror}"
            raise PreflightError(
                f"{self.hosts[0]}: port {self.port} {taken}",
                hint="is this spec being joined here already? network.master_port names another port, on all machines",
            ) from error

    def _meet(self, arrival: Arrival, members: Participants[_Introduction]) -> None:
        """Count a machine, or refuse it."""
        connection = arrival.connection
        try:
            introduction = build(_Introduction, arrival.message)
            introduction["host"] = introduction["host"][:_MAX_HOST]
            node_rank, host = introduction["node_rank"], introduction["host"]
            objection = self._objection(connection, introduction)[:_MAX_OBJECTION]
        except ValueError:
            connection.close()
            return
        if not objection:
            members.by_number[node_rank] = Participant(connection, introduction)
            self.tell(f"{_spell(node_rank, host)} is there" + self._still())
            self._send_who_is_missing()
            return
        who = f"{_spell(node_rank, host)}, pid {introduction['pid']}"
        self._remember(f"{who}: {objection}")
        hint = None if self.key else _SHOWN_WITH_KEY
        refuse(connection, PreflightError(f"node 0 ({self.hosts[0]}) refuses {who}: {objection}", hint=hint))
        if self.key:
            self.tell(f"refused {who}: {objection}")
            connection.close()
        else:
            members.server.refuse(connection, f"{who}: {objection}", time.monotonic())

    def _remember(self, refused: str) -> None:
        if len(self._refused) < _MAX_REFUSED:
            self._refused[refused] = None

    def _objection(self, connection: Connection, introduction: _Introduction) -> str:
        """Say why a machine cannot take part; empty when it can."""
        for name, ours in self.facts.items():
            theirs = introduction["facts"].get(name)
            if theirs != ours:
                return f"it has {name} {theirs or 'not at all'}, node 0 has {ours or 'none'}"
        if self.key:
            differences = _differences(introduction.get("spec", {}), self.spec)
        else:
            differences = _differing_keys(introduction.get("digests", {}), digests_of(self.spec, connection.signer))
        if differences:
            return f"its spec is another one: {'; '.join(differences)}"
        node_rank = introduction["node_rank"]
        if not 0 < node_rank < len(self.hosts):
            return f"there are nodes 0 to {len(self.hosts) - 1}"
        there = self._counted().get(node_rank)
        if there is not None:
            host, pid = there.introduction["host"], there.introduction["pid"]
            return f"node {node_rank} is there already: {host} ({there.connection.peer_address}), pid {pid}"
        return ""

    def _send_who_is_missing(self) -> None:
        self.send_all({"kind": "waiting", "for": [_spell(rank, self.hosts[rank]) for rank in self._missing()]})

    def _counted(self) -> dict[int, Participant[_Introduction]]:
        return self.members.by_number if self.members is not None else {}

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, len(self.hosts)) if rank not in self._counted()]

    def _still(self) -> str:
        missing = [_spell(rank, self.hosts[rank]) for rank in self._missing()]
        return f"; waiting for {', '.join(missing)}" if missing else "; all are there"

    def _waiting_for_whom(self, timeout_s: float) -> str:
        others = ", ".join(_spell(rank, self.hosts[rank]) for rank in self._missing())
        return f"node 0 of {len(self.hosts)} waits at port {self.port}, {timeout_s:g} s at the most, for {others}"

    def _absence(self, missing: Sequence[int], timeout_s: float, unproven: Mapping[str, int]) -> PreflightError:
        absent = ", ".join(_spell(rank, self.hosts[rank]) for rank in missing)
        here = ", ".join(_spell(rank, self.hosts[rank]) for rank in (0, *sorted(self._counted())))
        for address in unproven:
            self._remember(f"{address}: {no_key(JOIN)}")
        refused = "; refused: " + "; ".join(self._refused) if self._refused else ""
        return PreflightError(
            f"{absent} did not come within {timeout_s:g} s; there were {here}{refused}",
            hint=f"clusterddp join has to be typed on each machine, and port {self.port} of {self.hosts[0]} be open",
        )


def _spell(node_rank: int, host: str) -> str:
    return f"node {node_rank} ({host})"


def _differing_keys(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Name keys of two specs whose values differ, but no key that only we have."""
    differing = [key for key in ours if theirs.get(key) != ours[key]] + [key for key in theirs if key not in ours]
    named = [f"{key} differs" for key in differing if key in theirs][:_MAX_DIFFERENCES]
    return named + ([f"and {len(differing) - len(named)} more"] if len(differing) > len(named) else [])


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Name the keys of two specs that differ, with both values."""
    keys = [key for key in dict.fromkeys((*ours, *theirs)) if theirs.get(key) != ours.get(key)]
    shown = [f"{key} is {theirs.get(key)!r}, on node 0 {ours.get(key)!r}" for key in keys[:_MAX_DIFFERENCES]]
    return shown + ([f"and {len(keys) - len(shown)} more"] if len(keys) > len(shown) else [])

"""Node 0 of machines that join: it waits for the others, refuses who does not fit, and tells all how it goes on."""

from __future__ import annotations

import collections
import errno
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from clusterddp.errors import PreflightError
from clusterddp.network.interface import plain_address
from clusterddp.rendezvous.acceptor import Acceptor, Refusals
from clusterddp.rendezvous.signed import JOIN_KEY
from clusterddp.run.attempts import Tell
from clusterddp.submission.join.words import Line, Words, digests_of
from clusterddp.wire import build

_INTRODUCTION_S = 10.0
"""How long a connection may take to say who it is."""
_MAX_VISITORS = 64
"""How many may be connected and not have said who they are; or twice as many as there are nodes."""
_MAX_DIFFERENCES = 3
_MAX_OBJECTION = 1000
_MAX_REFUSED = 20
"""How many refusals are kept for the last word."""
NO_KEY = f"it does not know the same {JOIN_KEY}"
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
class Visitor:
    """Somebody who has connected."""

    line: Line
    came: float
    peer: str
    reached: str
    """The address of ours that it reached."""
    node_rank: int | None = None
    host: str = ""
    pid: int = 0


@dataclass(kw_only=True, slots=True)
class Gathering:
    """The wait for the other machines; `gather` returns when all are there."""

    hosts: Sequence[str]
    """In the order of the node ranks."""
    spec: Mapping[str, Any]
    """The values of the spec by dotted key."""
    facts: Mapping[str, str | None]
    key: str
    port: int
    tell: Tell
    members: dict[int, Visitor] = field(default_factory=dict)
    _strangers: list[Visitor] = field(default_factory=list)
    _refused: dict[str, None] = field(default_factory=dict)

    def gather(self, timeout_s: float) -> None:
        """Wait for every other node.

        Raises: PreflightError: the port is taken, or somebody did not come; all who came are told.
        """
        deadline = time.monotonic() + timeout_s
        listener = self._listen()
        refusals = Refusals(self.tell)
        try:
            with selectors.DefaultSelector() as selector:
                acceptor = Acceptor(listener, selector)
                self.tell(self._waiting_words(timeout_s))
                if not self.key:
                    self.tell(f"note: no {JOIN_KEY} is set: who reaches port {self.port} can take a node's place")
                while self._missing() and time.monotonic() < deadline:
                    selector.select(0.1)
                    self._accept(acceptor, refusals)
                    self._hear_all(refusals)
        finally:
            listener.close()
            for stranger in self._strangers:
                stranger.line.close()
        if missing := self._missing():
            error = self._absence(missing, timeout_s)
            self.say_all({"refused": error.message, "hint": error.hint})
            self.close()
            raise error

    def master_addr(self) -> str:
        """Return the address of ours that the others reached; most of them, should they differ."""
        counts = collections.Counter(visitor.reached for _, visitor in sorted(self.members.items()))
        return counts.most_common(1)[0][0]

    def begin(self, run: str, token: str, attempt: int, link: dict[str, Any] | None) -> None:
        """Tell all how the run goes on."""
        for visitor in self.members.values():
            words = {"run": run, "token": visitor.line.signer.veil(token), "attempt": attempt, "link": link}
            visitor.line.say(words | {"master_addr": self.master_addr()})

    def say_all(self, words: Words) -> None:
        for visitor in self.members.values():
            visitor.line.say(words)

    def close(self, within_s: float = 2.0) -> None:
        for visitor in self.members.values():
            visitor.line.flush_within(within_s)
            visitor.line.close()

    def _listen(self) -> socket.socket:
        dual = socket.has_dualstack_ipv6()
        listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if dual:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", self.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at: {error.strerror}"
            raise PreflightError(
                f"{self.hosts[0]}: port {self.port} {taken}",
                hint="is this spec being joined here already? network.master_port names another port, on all machines",
            ) from error
        return listener

    def _accept(self, acceptor: Acceptor, refusals: Refusals) -> None:
        now = time.monotonic()
        refusals.tick(now)
        for connection, peer in acceptor.accept(now):
            visitor = Visitor(
                line=Line(connection, self.key, "head"),
                came=now,
                peer=plain_address(str(peer[0])),
                reached=plain_address(str(connection.getsockname()[0])),
            )
            visitor.line.say({"node_rank": 0})
            if len(self._strangers) >= max(_MAX_VISITORS, 2 * len(self.hosts)):
                self._turn_away(self._strangers[0], "too many at once have not said who they are", refusals)
            self._strangers.append(visitor)

    def _turn_away(self, stranger: Visitor, why: str, refusals: Refusals) -> None:
        self._strangers.remove(stranger)
        stranger.line.close()
        refusals.add(f"{stranger.peer}: {why}", time.monotonic())

    def _hear_all(self, refusals: Refusals) -> None:
        for node_rank, visitor in list(self.members.items()):
            visitor.line.flush()
            visitor.line.hear()
            if visitor.line.ended:
                del self.members[node_rank]
                self.tell(f"{_spell(node_rank, visitor.host)} has gone again")
                self._tell_members()
        for visitor in list(self._strangers):
            heard = visitor.line.hear()
            visitor.line.flush()
            if heard:
                self._strangers.remove(visitor)
                self._meet(visitor, heard[0], refusals)
            elif visitor.line.unproven:
                self._remember(f"{visitor.peer}: {NO_KEY}")
                self._turn_away(visitor, NO_KEY, refusals)
            elif visitor.line.ended or time.monotonic() - visitor.came > _INTRODUCTION_S:
                self._turn_away(visitor, "it is no clusterddp join", refusals)

    def _remember(self, refusal: str) -> None:
        if len(self._refused) < _MAX_REFUSED:
            self._refused[refusal] = None

    def _meet(self, visitor: Visitor, words: Words, refusals: Refusals) -> None:
        try:
            said = build(_Introduction, words)
            node_rank, visitor.host, visitor.pid = said["node_rank"], said["host"][:255], said["pid"]
            objection = self._objection(visitor, node_rank, said)[:_MAX_OBJECTION]
        except ValueError:
            visitor.line.close()
            return
        if objection:
            who = f"{_spell(node_rank, visitor.host)}, pid {visitor.pid}"
            self._remember(f"{who}: {objection}")
            if self.key:
                self.tell(f"refused {who}: {objection}")
            else:
                refusals.add(f"{who}: {objection}", time.monotonic())
            hint = None if self.key else _SHOWN_WITH_KEY
            visitor.line.say({"refused": f"node 0 ({self.hosts[0]}) refuses {who}: {objection}", "hint": hint})
            visitor.line.flush_within(1.0)
            visitor.line.close()
            return
        visitor.node_rank = node_rank
        self.members[node_rank] = visitor
        self.tell(f"{_spell(node_rank, visitor.host)} is there" + self._still())
        self._tell_members()

    def _objection(self, visitor: Visitor, node_rank: int, words: _Introduction) -> str:
        """Say why somebody cannot take part; empty when it can."""
        for name, ours in self.facts.items():
            theirs = words["facts"].get(name)
            if theirs != ours:
                return f"it has {name} {theirs or 'not at all'}, node 0 has {ours or 'none'}"
        if self.key:
            differences = _differences(words.get("spec", {}), self.spec)
        else:
            differences = _differing_keys(words.get("digests", {}), digests_of(self.spec, visitor.line.signer))
        if differences:
            return f"its spec is another one: {'; '.join(differences)}"
        if not 0 < node_rank < len(self.hosts):
            return f"there are nodes 0 to {len(self.hosts) - 1}"
        there = self.members.get(node_rank)
        if there is not None:
            return f"node {node_rank} is there already: {there.host} ({there.peer}), pid {there.pid}"
        return ""

    def _tell_members(self) -> None:
        self.say_all({"waiting_for": [_spell(rank, self.hosts[rank]) for rank in self._missing()]})

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, len(self.hosts)) if rank not in self.members]

    def _still(self) -> str:
        missing = [_spell(rank, self.hosts[rank]) for rank in self._missing()]
        return f"; waiting for {', '.join(missing)}" if missing else "; all are there"

    def _waiting_words(self, timeout_s: float) -> str:
        others = ", ".join(_spell(rank, self.hosts[rank]) for rank in self._missing())
        return f"node 0 of {len(self.hosts)} waits at port {self.port}, {timeout_s:g} s at the most, for {others}"

    def _absence(self, missing: Sequence[int], timeout_s: float) -> PreflightError:
        absent = ", ".join(_spell(rank, self.hosts[rank]) for rank in missing)
        here = ", ".join(_spell(rank, self.hosts[rank]) for rank in (0, *sorted(self.members)))
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

"""How a supervisor and the head speak: node 0 holds the head itself, every other node reaches it over the link."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from typing import Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import plain_address
from clusterddp.node.connecting import Authenticating, Connecting, Found
from clusterddp.node.failure import CERTAIN
from clusterddp.node.head import Head
from clusterddp.node.link import GIVEN_UP, HOST_SILENT, JOIN_TIMEOUT_S, Channel, Message
from clusterddp.node.note import note
from clusterddp.node.peer import Limits, Peer
from clusterddp.node.search import Finder
from clusterddp.rendezvous.acceptor import Acceptor, Refusals
from clusterddp.run.gang import Gang

_MAX_STRANGERS = 32
_CONFESSION_S = 1.0
_MAX_PROBES = 16
"""How many connections of the head, which only asks whether we are there, are taken off the queue at a time."""


class Uplink(Protocol):
    """What the supervisor's loop needs of the head, wherever it is."""

    @property
    def exit_code(self) -> int | None:
        """Not None when the supervisor is to leave as soon as nothing of its node is left."""

    @property
    def head_lost(self) -> str | None:
        """Why the head is lost, when it is."""

    @property
    def joined(self) -> bool:
        """True once the head has taken this node in."""

    @property
    def hurried(self) -> bool:
        """True while there is something to do at once, or things change within milliseconds."""

    def report(self, message: Message) -> None:
        """Tell the head something."""

    def pump(self, now: float) -> list[Message]:
        """Hear and say what there is; return the head's orders for this node."""

    def confess(self, error: str) -> None:
        """Tell the head that this supervisor is broken, or, when this is the head, let the others see it."""


class HeadHere:
    """Node 0's uplink: the head is in this process, the other nodes are its peers."""

    head_lost = None
    joined = True

    def __init__(
        self, gang: Gang, selector: selectors.BaseSelector, limits: Limits, *, listener: socket.socket, join: Message
    ) -> None:
        self.head: Head | None = None
        """Set once; the head needs `tell`, and this needs the head."""
        self.exit_code: int | None = None
        self._token = gang.token
        self._limits = limits
        self._selector = selector
        self._listener = listener
        self._session = os.urandom(8).hex()
        """Sent to each node that joins. A node that connects again names it, so it is of this start of the run."""
        self._max_strangers = _MAX_STRANGERS + 4 * len(gang.nodes)
        self._acceptor = Acceptor(listener, selector)
        self._refusals = Refusals(note)
        self._strangers: list[Channel] = []
        """Connections that have not proven yet that they belong to the run."""
        self._members: dict[int, Peer] = {}
        self._pids: dict[int, int] = {}
        self._given_up: dict[int, str] = {}
        """Why, by node rank."""
        self._reports: deque[Message] = deque([join])
        self._orders: list[Message] = []

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def hurried(self) -> bool:
        broken = any(peer.broken for peer in self._members.values())
        return broken or bool(self._reports) or (self.head is not None and self.head.hurried)

    def report(self, message: Message) -> None:
        self._reports.append(message)

    def tell(self, node_rank: int, message: Message) -> None:
        """Give a node an order of the head."""
        if node_rank == 0:
            self._orders.append(message)
        elif node_rank in self._members:
            self._members[node_rank].send(message)

    def pump(self, now: float) -> list[Message]:
        assert self.head is not None
        self._accept(now)
        for channel in list(self._strangers):
            self._hear_stranger(channel, now)
        self._refusals.tick(now)
        for node_rank, peer in list(self._members.items()):
            for message in peer.receive(now):
                self.head.hear(node_rank, message, now)
            peer.keep_up(now)
            if self.head.node_is_down and peer.is_quiet(now):
                peer.lose(HOST_SILENT)
            if peer.lost is not None:
                self._given_up[node_rank] = peer.lost
                del self._members[node_rank]
                self.head.lose(node_rank, peer.lost, now)
        while self._reports:
            self.head.hear(0, self._reports.popleft(), now)
        self.head.tick(now)
        if not any(peer.owes_acknowledgement(now) for peer in self._members.values()):
            self.exit_code = self.head.exit_code
        orders, self._orders = self._orders, []
        return orders

    def confess(self, error: str) -> None:
        self._acceptor.close()
        for peer in self._members.values():
            peer.lose(error)

    def _accept(self, now: float) -> None:
        for connection, peer in self._acceptor.accept(now):
            if len(self._strangers) >= self._max_strangers:
                self._refuse(self._strangers.pop(0), "too many at once have not proven themselves", now)
            channel = Channel(connection, token=self._token, side="head", now=now)
            self._strangers.append(channel)
            self._selector.register(connection, selectors.EVENT_READ, data=peer)

    def _hear_stranger(self, channel: Channel, now: float) -> None:
        messages = channel.receive(now)
        if messages and messages[0]["kind"] in {"join", "join_again"}:
            self._strangers.remove(channel)
            if messages[0]["kind"] == "join":
                self._take_in(channel, messages[0], now)
            else:
                self._take_back(channel, messages[0], now)
        elif messages or channel.lost is not None or now - channel.opened > JOIN_TIMEOUT_S:
            self._strangers.remove(channel)
            self._refuse(channel, channel.lost or "it did not join", now)

    def _refuse(self, channel: Channel, why: str, now: float) -> None:
        self._refusals.add(why, now)
        self._drop(channel)

    def _take_in(self, channel: Channel, join: Message, now: float) -> None:
        assert self.head is not None
        node_rank = int(join["node_rank"])
        if self.head.may_join(node_rank):
            host, _, *rest = channel.sock.getpeername()
            address = (host, int(join["port"]), *rest)
            peer = Peer(self._limits, self._selector, lambda now: Connecting(address, now), when_quiet=False)
            self._members[node_rank] = peer
            self._pids[node_rank] = int(join["pid"])
            reached = plain_address(str(channel.sock.getsockname()[0]))
            self.head.hear(node_rank, join | {"reached": reached}, now)
        if node_rank in self._members and join["pid"] == self._pids[node_rank]:
            self._welcome(node_rank, channel, 0, now)  # or again: it has missed the first welcome
        else:
            note(f"a connection was refused: node {node_rank} has joined already, or is none of the run's")
            self._drop(channel)

    def _take_back(self, channel: Channel, again: Message, now: float) -> None:
        """Go on with a node whose connection broke, or tell it that it counts as lost."""
        node_rank = int(again["node_rank"])
        if node_rank in self._members and again["session"] == self._session:
            self._welcome(node_rank, channel, int(again["heard"]), now)
            return
        why = self._given_up.get(node_rank, "it is of another start of the run")
        note(f"node {node_rank} has connected again, too late: {why}")
        channel.send({"kind": "gave_up", "why": why})
        self._drop(channel)

    def _welcome(self, node_rank: int, channel: Channel, heard: int, now: float) -> None:
        assert self.head is not None
        peer = self._members[node_rank]
        for message in peer.receive(now):  # over the connection that this one replaces: its last word may be there
            self.head.hear(node_rank, message, now)
        channel.send({"kind": "welcome", "session": self._session, "heard": peer.heard})
        peer.connect(channel, heard, now)

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel.sock)
        channel.close()


class HeadElsewhere:
    """Every other node's uplink: the head is a peer; when it is lost the node ends its ranks and leaves."""

    def __init__(
        self,
        gang: Gang,
        node_rank: int,
        finder: Finder,
        selector: selectors.BaseSelector,
        limits: Limits,
        *,
        listener: socket.socket,
        on_slurm: bool,
        now: float,
    ) -> None:
        """`listener`: the head connects to it after a connection broke, to see whether this process lives."""
        self.exit_code: int | None = None
        self.head_lost: str | None = None
        """Why the head is lost, when it is."""
        self.joined = False
        self._token = gang.token
        self._node_rank = node_rank
        self._selector = selector
        self._listener = listener
        self._finder = finder
        self._on_slurm = on_slurm
        self._start_timeout_s = gang.start_timeout_s
        self._join_until = now + gang.start_timeout_s
        self._session = ""
        self._now = now
        self._address: tuple[object, ...] = ()
        self._peer = Peer(limits, selector, self._connect_again, when_quiet=True)
        self._found: Found | None = None
        """The head before it has welcomed this node."""
        self._find_head(now)

    @property
    def hurried(self) -> bool:
        return not self.joined or self._peer.broken

    def report(self, message: Message) -> None:
        if self.head_lost is None:
            self._peer.send(message)
        if self._on_slurm and message.get("signal") == "SIGTERM" and self._peer.is_quiet(self._now):
            self._peer.lose(HOST_SILENT)  # as Slurm has found before us: it is about to kill what is left of the job

    def pump(self, now: float) -> list[Message]:
        if self.head_lost is not None:
            return []
        self._now = now
        self._take_probes()
        messages = self._peer.receive(now) if self.joined else self._join(now)
        if self.joined and (found := self._peer.keep_up(now)) is not None:
            self._selector.register(found.channel.sock, selectors.EVENT_READ)
            messages += self._welcomed(found, now)
        orders = [self._obey(message) for message in messages]
        if self._peer.lost is not None and self.exit_code is None:
            note(f"the head is lost: {self._peer.lost}")
            self.head_lost = self._peer.lost
            self.exit_code = 1
            orders.append({"kind": "kill", "whole_gang": True})
        return orders

    def confess(self, error: str) -> None:
        self.report({"kind": "failed", "error": error, "weight": CERTAIN})
        behind = time.monotonic() - self._now  # as the supervisor's clock is, which does not tick any more
        until = self._now + _CONFESSION_S
        while self.head_lost is None and (now := time.monotonic() - behind) < until:
            self.pump(now)
            if self.joined and not self._peer.owes_acknowledgement(now):
                return
            time.sleep(0.02)

    def _obey(self, message: Message) -> Message:
        if message["kind"] == "finish":
            self.exit_code = int(message["exit_code"])
        elif message["kind"] == "gave_up":
            self._peer.lose(f"{GIVEN_UP}: {message['why']}")
        return message

    def _join(self, now: float) -> list[Message]:
        """Find the head, and wait for its welcome."""
        if self._found is None:
            self._find_head(now)
        if self._found is None:
            return []
        channel = self._found.channel
        heard = self._found.heard + channel.receive(now)
        channel.flush()
        if heard:
            self.joined = True
            return self._welcomed(Found(channel, heard), now)
        if channel.lost is not None or now - channel.opened > JOIN_TIMEOUT_S:
            if now >= self._join_until:
                self._peer.lose(channel.lost or "it does not answer")
            # The head may have been pestered by strangers and have taken us for one.
            self._selector.unregister(channel.sock)
            channel.close()
            self._found = None
        return []

    def _welcomed(self, found: Found, now: float) -> list[Message]:
        """Take in a connection to the head, and the first message that came with it."""
        first, *others = found.heard
        if first["kind"] != "welcome":
            self._selector.unregister(found.channel.sock)
            found.channel.close()
            return [first]
        self._session = str(first["session"])
        self._address = found.channel.sock.getpeername()
        self._peer.connect(found.channel, int(first["heard"]), now)
        return self._peer.take(others)

    def _connect_again(self, now: float) -> Connecting:
        again = {"node_rank": self._node_rank, "session": self._session, "heard": self._peer.heard}
        return Authenticating(self._address, self._token, {"kind": "join_again", **again}, now)

    def _find_head(self, now: float) -> None:
        self._found = self._finder.find(now)
        if self._found is not None:
            self._selector.register(self._found.channel.sock, selectors.EVENT_READ)
        elif now >= self._join_until:
            raise ClusterddpError(f"the head was not found within {self._start_timeout_s:g} s")

    def _take_probes(self) -> None:
        """Empty the queue of the listener: that it accepts is all that the head wants to know."""
        with contextlib.suppress(OSError):
            for _ in range(_MAX_PROBES):
                self._listener.accept()[0].close()

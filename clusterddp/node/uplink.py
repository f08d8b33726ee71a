"""How a supervisor and the head speak: node 0 holds the head itself, every other node reaches it over the link."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from typing import Protocol

from clusterddp.dist.acceptor import Acceptor, Refusals
from clusterddp.dist.interface import plain_address
from clusterddp.errors import ClusterddpError
from clusterddp.node.failure import CERTAIN
from clusterddp.node.head import Head
from clusterddp.node.link import JOIN_TIMEOUT_S, Channel, Message, watch_host
from clusterddp.node.note import note
from clusterddp.node.search import Finder
from clusterddp.run.gang import Gang

_MAX_STRANGERS = 32
_CONFESSION_S = 1.0


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
    """Node 0's uplink: the head is in this process, the other nodes are at the end of channels."""

    head_lost = None
    joined = True

    def __init__(
        self,
        gang: Gang,
        selector: selectors.BaseSelector,
        *,
        lease_s: float,
        listener: socket.socket,
        join: Message,
        host_silence_s: float | None = None,
    ) -> None:
        self.head: Head | None = None
        """Set once; the head needs `tell`, and this needs the head."""
        self._token = gang.token
        self._lease_s = lease_s
        self._selector = selector
        self._listener = listener
        self._host_silence_s = host_silence_s
        self._max_strangers = _MAX_STRANGERS + 4 * len(gang.nodes)
        self._acceptor = Acceptor(listener, selector)
        self._refusals = Refusals(note)
        self._strangers: list[Channel] = []
        """Connections that have not proven yet that they belong to the run."""
        self._members: dict[int, Channel] = {}
        self._reports: deque[Message] = deque([join])
        self._orders: list[Message] = []

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def exit_code(self) -> int | None:
        assert self.head is not None
        return self.head.exit_code

    @property
    def hurried(self) -> bool:
        return bool(self._reports) or (self.head is not None and self.head.hurried)

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
        for node_rank, channel in list(self._members.items()):
            for message in channel.receive(now):
                self._hear(node_rank, message, now)
            channel.keep_alive(now, self._lease_s)
            if channel.lost is not None:
                self._drop(channel)
                del self._members[node_rank]
                self.head.lose(node_rank, channel.lost, now)
        while self._reports:
            self.head.hear(0, self._reports.popleft(), now)
        self.head.tick(now)
        orders, self._orders = self._orders, []
        return orders

    def confess(self, error: str) -> None:
        for channel in self._members.values():
            self._drop(channel)

    def _accept(self, now: float) -> None:
        for connection, peer in self._acceptor.accept(now):
            if len(self._strangers) >= self._max_strangers:
                self._refuse(self._strangers.pop(0), "too many at once have not proven themselves", now)
            channel = Channel(connection, token=self._token, side="head", now=now)
            self._strangers.append(channel)
            self._selector.register(connection, selectors.EVENT_READ, data=peer)

    def _hear_stranger(self, channel: Channel, now: float) -> None:
        assert self.head is not None
        messages = channel.receive(now)
        if messages and messages[0]["kind"] == "join" and self.head.may_join(int(messages[0]["node_rank"])):
            node_rank = int(messages[0]["node_rank"])
            self._strangers.remove(channel)
            self._members[node_rank] = channel
            if self._host_silence_s is not None:
                watch_host(channel.sock, self._host_silence_s)
            channel.send({"kind": "welcome"})
            messages[0]["reached"] = plain_address(str(channel.sock.getsockname()[0]))
            for message in messages:
                self._hear(node_rank, message, now)
        elif messages or channel.lost is not None or now - channel.opened > JOIN_TIMEOUT_S:
            self._strangers.remove(channel)
            self._refuse(channel, channel.lost or "it did not join", now)

    def _refuse(self, channel: Channel, why: str, now: float) -> None:
        self._refusals.add(why, now)
        self._drop(channel)

    def _hear(self, node_rank: int, message: Message, now: float) -> None:
        assert self.head is not None
        if message["kind"] != "beat":
            self.head.hear(node_rank, message, now)

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel.sock)
        channel.close()


class HeadElsewhere:
    """Every other node's uplink: one channel; when it is lost the node ends its ranks and leaves."""

    def __init__(
        self, finder: Finder, selector: selectors.BaseSelector, *, lease_s: float, start_timeout_s: float
    ) -> None:
        self.exit_code: int | None = None
        self.head_lost: str | None = None
        """Why the head is lost, when it is."""
        self._lease_s = lease_s
        self._selector = selector
        self._finder = finder
        self._join_until = time.monotonic() + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._unsaid: list[Message] = []
        self._heard: list[Message] = []
        self._channel: Channel | None = None
        self._find_head(time.monotonic())

    @property
    def joined(self) -> bool:
        return self._channel is not None and self._channel.proven

    @property
    def hurried(self) -> bool:
        return self._channel is None

    def report(self, message: Message) -> None:
        if self._channel is None:
            self._unsaid.append(message)
        elif self.head_lost is None:
            self._channel.send(message)

    def pump(self, now: float) -> list[Message]:
        if self._channel is None:
            self._find_head(now)
        channel = self._channel
        if channel is None or self.head_lost is not None:
            return []
        heard, self._heard = self._heard + channel.receive(now), []
        orders = [message for message in heard if message["kind"] not in {"beat", "welcome"}]
        channel.keep_alive(now, self._lease_s)
        for order in orders:
            if order["kind"] == "finish":
                self.exit_code = int(order["exit_code"])
        if channel.lost is not None and self.exit_code is None:
            if not channel.proven and now < self._join_until:
                # The head may have been pestered by strangers and have taken us for one.
                self._selector.unregister(channel.sock)
                channel.close()
                self._channel = None
                self._find_head(now)
                return []
            note(f"the head is lost: {channel.lost}")
            self.head_lost = channel.lost
            self.exit_code = 1
            self._selector.unregister(channel.sock)
            channel.close()
            orders.append({"kind": "kill", "whole_gang": True})
        return orders

    def confess(self, error: str) -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send({"kind": "failed", "error": error, "weight": CERTAIN})
        deadline = time.monotonic() + _CONFESSION_S
        while not channel.silent and channel.lost is None and time.monotonic() < deadline:
            time.sleep(0.02)
            channel.receive(time.monotonic())
            channel.flush()

    def _find_head(self, now: float) -> None:
        found = self._finder.find(now)
        if found is None:
            if now >= self._join_until:
                raise ClusterddpError(f"the head was not found within {self._start_timeout_s:g} s")
            return
        channel = self._channel = found.channel
        self._heard += found.heard
        self._selector.register(channel.sock, selectors.EVENT_READ)
        unsaid, self._unsaid = self._unsaid, []
        for message in unsaid:
            channel.send(message)

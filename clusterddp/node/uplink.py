"""How a supervisor and the head speak: node 0 holds the head itself, every other node reaches it over the link."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from typing import Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.node.failure import CERTAIN
from clusterddp.node.head import Head
from clusterddp.node.link import JOIN_TIMEOUT_S, Channel, Message, connect, listen
from clusterddp.node.note import note
from clusterddp.run.gang import Gang

_MAX_STRANGERS = 32
_CONFESSION_S = 1.0


class Uplink(Protocol):
    """What the supervisor's loop needs of the head, wherever it is."""

    @property
    def exit_code(self) -> int | None:
        """Not None when the supervisor is to leave as soon as nothing of its node is left."""

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

    def __init__(self, gang: Gang, selector: selectors.BaseSelector, *, lease_s: float) -> None:
        self.head: Head | None = None
        """Set once; the head needs `tell`, and this needs the head."""
        self._token = gang.token
        self._lease_s = lease_s
        self._selector = selector
        self._listener = listen(gang.master_addr)
        selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[Channel] = []
        """Connections that have not proven yet that they belong to the run."""
        self._members: dict[int, Channel] = {}
        self._reports: deque[Message] = deque([{"kind": "join", "pid": os.getpid()}])
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
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:  # nobody there, or gone again
                return
            if len(self._strangers) >= _MAX_STRANGERS:
                self._drop(self._strangers.pop(0))
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
            for message in messages:
                self._hear(node_rank, message, now)
        elif messages or channel.lost is not None or now - channel.opened > JOIN_TIMEOUT_S:
            note(f"a connection was refused: {channel.lost or 'it did not join'}")
            self._strangers.remove(channel)
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
        self,
        gang: Gang,
        selector: selectors.BaseSelector,
        *,
        node_rank: int,
        link: tuple[str, int],
        lease_s: float,
        start_timeout_s: float,
    ) -> None:
        self.exit_code: int | None = None
        self._token = gang.token
        self._lease_s = lease_s
        self._selector = selector
        self._link = link
        self._join = {"kind": "join", "node_rank": node_rank, "pid": os.getpid()}
        self._join_until = time.monotonic() + start_timeout_s
        self._channel = self._connect()

    @property
    def hurried(self) -> bool:
        return False

    def report(self, message: Message) -> None:
        self._channel.send(message)

    def pump(self, now: float) -> list[Message]:
        orders = [message for message in self._channel.receive(now) if message["kind"] != "beat"]
        self._channel.keep_alive(now, self._lease_s)
        for order in orders:
            if order["kind"] == "finish":
                self.exit_code = int(order["exit_code"])
        if self._channel.lost is not None and self.exit_code is None:
            if not self._channel.proven and now < self._join_until:
                # The head may have been pestered by strangers and have taken us for one.
                self._selector.unregister(self._channel.sock)
                self._channel.close()
                self._channel = self._connect()
                return []
            note(f"the head is lost: {self._channel.lost}")
            self.exit_code = 1
            orders.append({"kind": "kill", "whole_gang": True})
        return orders

    def confess(self, error: str) -> None:
        self._channel.send({"kind": "failed", "error": error, "weight": CERTAIN})
        deadline = time.monotonic() + _CONFESSION_S
        while not self._channel.silent and self._channel.lost is None and time.monotonic() < deadline:
            time.sleep(0.02)
            self._channel.receive(time.monotonic())
            self._channel.flush()

    def _connect(self) -> Channel:
        try:
            sock = connect(*self._link, timeout_s=max(0.0, self._join_until - time.monotonic()))
        except OSError as error:
            host, port = self._link
            raise ClusterddpError(f"the head at {host}:{port} cannot be reached: {error}") from error
        channel = Channel(sock, token=self._token, side="member", now=time.monotonic())
        channel.send(self._join)
        self._selector.register(sock, selectors.EVENT_READ)
        return channel

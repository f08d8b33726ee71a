"""The head on this host: it has a link to each other node's supervisor, and direct calls to this node's."""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque

from clusterddp.node.head import Head
from clusterddp.node.link import SUPERVISORS
from clusterddp.node.log import log_line
from clusterddp.node.peer import Limits, Peer
from clusterddp.rendezvous.client import Attempt
from clusterddp.rendezvous.connection import HOST_SILENT, Connection, Loss, Message
from clusterddp.rendezvous.server import Arrival, Server
from clusterddp.run.gang import Gang


class HeadHere:
    """Node 0's uplink: the head is in this process, the other nodes are its peers."""

    head_lost = None
    joined = True

    def __init__(
        self, gang: Gang, selector: selectors.BaseSelector, limits: Limits, *, listener: socket.socket, join: Message
    ) -> None:
        self.head: Head | None = None
        """Set once; the head needs `send`, and this needs the head."""
        self.exit_code: int | None = None
        self._limits = limits
        self._listener = listener
        self._session = os.urandom(8).hex()
        """Sent to each node that joins. A node that connects again sends it back, so it is of this start of the run."""
        self._server = Server(
            listener, selector, protocol=SUPERVISORS, key=gang.token, num_expected=len(gang.nodes), report=log_line
        )
        self._peers: dict[int, Peer] = {}
        self._pids: dict[int, int] = {}
        self._given_up: dict[int, Loss] = {}
        """Why, by node rank."""
        self._reports: deque[Message] = deque([join])
        self._orders: list[Message] = []

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def polls_fast(self) -> bool:
        broken = any(peer.broken for peer in self._peers.values())
        return broken or bool(self._reports) or (self.head is not None and self.head.changes_fast)

    def report(self, message: Message) -> None:
        self._reports.append(message)

    def send(self, node_rank: int, message: Message) -> None:
        """Send a node an order of the head."""
        if node_rank == 0:
            self._orders.append(message)
        elif node_rank in self._peers:
            self._peers[node_rank].send(message)

    def pump(self, now: float) -> list[Message]:
        assert self.head is not None
        for arrival in self._server.accept(now):
            self._answer(arrival, now)
        for node_rank, peer in list(self._peers.items()):
            for message in peer.receive(now):
                self.head.on_report(node_rank, message, now)
            peer.keep_up(now)
            if self.head.node_is_down and peer.is_quiet(now):
                peer.lose(HOST_SILENT)
            if peer.lost is not None:
                self._given_up[node_rank] = peer.lost
                del self._peers[node_rank]
                self.head.on_loss(node_rank, peer.lost, now)
        while self._reports:
            self.head.on_report(0, self._reports.popleft(), now)
        self.head.tick(now)
        if not any(peer.owes_acknowledgement(now) for peer in self._peers.values()):
            self.exit_code = self.head.exit_code
        orders, self._orders = self._orders, []
        return orders

    def report_fatal_error(self, error: str) -> None:
        self._server.close()
        for peer in self._peers.values():
            peer.lose(Loss("failed", error))

    def _answer(self, arrival: Arrival, now: float) -> None:
        connection, message = arrival
        if message["kind"] == "join":
            self._join(connection, message, now)
        elif message["kind"] == "join_again":
            self._join_again(connection, message, now)
        else:
            self._server.refuse(connection, "it did not join", now)

    def _join(self, connection: Connection, join: Message, now: float) -> None:
        assert self.head is not None
        node_rank = int(join["node_rank"])
        if self.head.nodes.may_join(node_rank):
            address = (connection.peer_address, int(join["port"]))
            peer = Peer(self._limits, lambda now: Attempt(address, now), when_quiet=False)
            self._peers[node_rank] = peer
            self._pids[node_rank] = int(join["pid"])
            self.head.on_report(node_rank, join | {"reached": connection.own_address}, now)
        if node_rank in self._peers and join["pid"] == self._pids[node_rank]:
            self._welcome(node_rank, connection, 0, now)  # perhaps again: it has missed the first welcome
        else:
            log_line(f"a connection was refused: node {node_rank} has joined already, or is none of the run's")
            connection.close()

    def _join_again(self, connection: Connection, again: Message, now: float) -> None:
        """Go on with a node whose connection broke, or refuse one that counts as lost."""
        node_rank = int(again["node_rank"])
        if node_rank in self._peers and again["session"] == self._session:
            self._welcome(node_rank, connection, int(again["received"]), now)
            return
        why = str(self._given_up.get(node_rank, "it is of another start of the run"))
        log_line(f"node {node_rank} has connected again, too late: {why}")
        connection.send({"kind": "gave_up", "why": why})
        connection.close()

    def _welcome(self, node_rank: int, connection: Connection, received: int, now: float) -> None:
        assert self.head is not None
        peer = self._peers[node_rank]
        for message in peer.receive(now):  # of the connection that this one replaces
            self.head.on_report(node_rank, message, now)
        connection.send({"kind": "welcome", "session": self._session, "received": peer.received})
        peer.connect(connection, received, now)

"""How a supervisor reaches the head: node 0 has it in its own process, every other node has a link to it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque

from clusterddp.errors import ClusterddpError
from clusterddp.network.rendezvous.client import Attempt, AuthenticatedAttempt, Found, Search
from clusterddp.network.rendezvous.connection import HOST_SILENT, Connection, Loss, Message
from clusterddp.network.rendezvous.server import Arrival, Server
from clusterddp.node.head import Head
from clusterddp.node.link import SUPERVISORS, Limits, Peer, given_up, report_of
from clusterddp.node.log import log_line
from clusterddp.run.gang import Gang
from clusterddp.run.record import RankEnd
from clusterddp.run.supervisors import Link

_REPORT_FATAL_S = 1.0
_CONNECT_S = 8.0
"""How long the host of a head that is known to listen may take to accept a connection at first."""
_MAX_PROBES = 16
"""How many connections of the head, which only tests whether this process listens, are closed in one turn."""


class HeadElsewhere:
    """The uplink of a node without the head: the head is a peer; when it is lost the node ends its ranks and exits."""

    def __init__(
        self,
        gang: Gang,
        node_rank: int,
        search: Search,
        selector: selectors.BaseSelector,
        limits: Limits,
        *,
        listener: socket.socket,
        known: Link | None,
        in_job: bool,
        now: float,
    ) -> None:
        """`listener`: the head connects to it after a connection broke, to test whether this process lives.

        `known`: the address where the head listens already; None: it starts to listen at one of the candidates.
        """
        self.exit_code: int | None = None
        """Set when the supervisor is to exit as soon as nothing of its node is left."""
        self.head_lost: Loss | None = None
        self.joined = False
        """True once the head has accepted this node."""
        self._token = gang.token
        self._node = gang.nodes[node_rank]
        self._selector = selector
        self._listener = listener
        self._search = search
        self._known = known
        self._in_job = in_job
        self._start_timeout_s = gang.start_timeout_s
        self._join_until = now + gang.start_timeout_s
        self._connect_until = now + min(_CONNECT_S, gang.start_timeout_s)
        self._session = ""
        self._now = now
        self._address = ("", 0)
        self._peer = Peer(limits, self._connect_again, when_quiet=True)

    @property
    def polls_fast(self) -> bool:
        """True while something is to be done at once, or things change within milliseconds."""
        return not self.joined or self._peer.broken

    def report(self, message: Message) -> None:
        """Send the head a message."""
        if self.head_lost is None:
            self._peer.send(message)
        if self._in_job and message.get("signal") == "SIGTERM" and self._peer.is_quiet(self._now):
            self._peer.lose(HOST_SILENT)  # the batch system has found the same, and is about to kill the job

    def pump(self, now: float) -> list[Message]:
        """Receive and send messages; return the head's orders for this node."""
        if self.head_lost is not None:
            return []
        self._now = now
        with contextlib.suppress(OSError):  # the head only tests whether its connections are accepted
            for _ in range(_MAX_PROBES):
                self._listener.accept()[0].close()
        messages = self._peer.receive(now) if self.joined else self._join(now)
        if self.joined and (found := self._peer.keep_up(now)) is not None:
            messages += self._welcomed(found, now)
        orders = [self._take_order(message) for message in messages]
        if self._peer.lost is not None and self.exit_code is None:
            log_line(f"the head is lost: {self._peer.lost}")
            self.head_lost = self._peer.lost
            self.exit_code = 1
            orders.append({"kind": "kill", "whole_gang": True})
        return orders

    def report_fatal_error(self, error: str) -> None:
        """Report an error that ends this supervisor."""
        node = self._node
        self.report(report_of("failed", RankEnd(rank=min(node.ranks), host=node.host, error=error)))
        behind = time.monotonic() - self._now  # on the supervisor's clock, which does not tick any more
        until = self._now + _REPORT_FATAL_S
        while self.head_lost is None and (now := time.monotonic() - behind) < until:
            self.pump(now)
            if self.joined and not self._peer.owes_acknowledgement(now):
                return
            time.sleep(0.02)

    def _take_order(self, message: Message) -> Message:
        if message["kind"] == "finish":
            self.exit_code = int(message["exit_code"])
        elif message["kind"] == "gave_up":
            self._peer.lose(given_up(str(message["why"])))
        return message

    def _join(self, now: float) -> list[Message]:
        """Find the head, and wait for its welcome.

        Raises: ClusterddpError: it was not found in time, or cannot be reached.
        """
        found = self._search.find(now)
        if found is not None:
            self.joined = True
            self._search.close()
            log_line(f"the head is at {found.connection.peer_address}:{found.connection.peer_port}")
            return self._welcomed(found, now)
        if self._known is not None:
            self._await_known_head(self._known, now)
        elif now >= self._join_until:
            raise ClusterddpError(f"the head was not found within {self._start_timeout_s:g} s")
        return []

    def _await_known_head(self, known: Link, now: float) -> None:
        """Check a head that is known to listen: it may refuse, or not answer in time."""
        loss = self._search.failure.loss if self._search.failure is not None else Loss("no_answer", "no answer")
        late = not self._search.answered and now >= self._connect_until
        if loss.kind == "refused" or late:
            raise ClusterddpError(f"the head at {known['host']}:{known['port']} cannot be reached: {loss}")
        if now >= self._join_until:
            self._peer.lose(loss)

    def _welcomed(self, found: Found, now: float) -> list[Message]:
        """Use a connection to the head, whose first message is its welcome, or `gave_up`."""
        first, *others = found.messages
        if first["kind"] != "welcome":
            found.connection.close()
            return [first]
        self._session = str(first["session"])
        self._address = (found.connection.peer_address, found.connection.peer_port)
        self._peer.connect(found.connection, int(first["received"]), now)
        return self._peer.take(others)

    def _connect_again(self, now: float) -> Attempt:
        again = {
            "kind": "join_again",
            "node_rank": self._node.node_rank,
            "session": self._session,
            "received": self._peer.received,
        }
        return AuthenticatedAttempt(
            self._address,
            now,
            self._selector,
            protocol=SUPERVISORS,
            key=self._token,
            introduce=lambda connection: again,
        )


class HeadHere:
    """Node 0's uplink: the head is in this process, the other nodes are its peers."""

    head_lost: Loss | None = None
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
        """Close all links; the other nodes then end their ranks."""
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


Uplink = HeadHere | HeadElsewhere

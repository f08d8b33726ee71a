"""The link between the head (node 0's supervisor) and another supervisor: messages, heartbeats, listeners, both ends.

A link is a series of connections, signed and unencrypted (connection.py); their key is the run's token. A
`Peer` is one end of it: it numbers its messages, and sends again what the other end has not received. Node 0 has the
head in its own process (`HeadHere`); every other node has a link to it (`HeadElsewhere`). Who loses the other may
become the other kind (supervisor.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.network.port import bind_port
from clusterddp.network.rendezvous.client import Attempt, AuthenticatedAttempt, Found, Search
from clusterddp.network.rendezvous.connection import HOST_SILENT, Connection, Loss, Message, Protocol
from clusterddp.network.rendezvous.server import Arrival, Server
from clusterddp.node.log import log_line
from clusterddp.run.gang import Gang
from clusterddp.run.record import RankEnd
from clusterddp.run.supervisors import Link
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.node.head import Head

HEARTBEAT_S = 1.0
PROCESS_ENDED = Loss("process_ended", "its process has ended")
"""The other host refuses connections to the port of the process."""
LINK_LOST = Loss("broken", "it had lost the link")
_MAX_MESSAGE = 512 * 1024
SUPERVISORS = Protocol(
    name="supervisor",
    key="token",
    max_bytes_to_server=_MAX_MESSAGE,
    max_bytes_to_client=_MAX_MESSAGE,
    fields={
        "heartbeat": {"received": int},
        "join": {"node_rank": int, "pid": int, "port": int},
        "join_again": {"node_rank": int, "session": str, "received": int},
        "welcome": {"session": str, "received": int},
    },
)
"""supervisor.py lists all kinds of messages; the fields that a link itself reads are checked as they arrive."""
QUIET_S = 5.0
"""After this time without a heartbeat another connection is tried: TCP retries at growing intervals only."""
_AGAIN_S = 0.3
_LAST_ACKNOWLEDGEMENT_S = 2.0
MAX_TURN_S = 1.0
"""What one turn of the loop adds at most: in the rest of a longer one this process could not receive."""


class HeadNotFoundError(ClusterddpError):
    """The head was not found in time."""


def watch_host(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel end a connection whose other host has not answered for this long.

    The other kernel answers, not the process: a process that blocks on a file server does not count as a dead host.
    """
    options = {
        socket.TCP_USER_TIMEOUT: int(silence_s * 1000),
        socket.TCP_KEEPIDLE: max(1, int(silence_s / 4)),
        socket.TCP_KEEPINTVL: max(1, int(silence_s / 4)),
        socket.TCP_KEEPCNT: 3,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def report_of(kind: str, end: RankEnd) -> Message:
    """Return a report that carries the end of a rank; see `end_of`."""
    return {"kind": kind, **dataclasses.asdict(end)}


def end_of(report: Message) -> RankEnd:
    """Return the end that a report carries."""
    return build(RankEnd, report)


def facts_of(message: Message) -> Message:
    """Return the fields of a message without its kind."""
    return {key: value for key, value in message.items() if key != "kind"}


def listen(host: str) -> socket.socket:
    """Listen on `host` at a port that the kernel chooses."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_walk(ports: Sequence[int]) -> socket.socket:
    """Listen, on all addresses of this host, at the first of these ports that is free.

    Without SO_REUSEADDR: a port that another process has bound, and does not listen on yet, counts as taken.
    """
    last: OSError | None = None
    for port in ports:
        try:
            listener = bind_port(port, shared=False, listening=True)
        except OSError as error:
            last = error
        else:
            listener.setblocking(False)
            return listener
    raise OSError(f"no port is free from {ports[0]} to {ports[-1]}") from last


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The timeouts of a link."""

    host_silence_s: float
    heartbeat_timeout_s: float
    spans_hosts: bool
    """False: both ends are on this host, which always answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Break:
    """A connection that broke and is not replaced."""

    since: float
    why: Loss


class Peer:
    """The other end of one link."""

    def __init__(self, limits: Limits, attempt: Callable[[float], Attempt], *, when_quiet: bool) -> None:
        """`attempt` begins an attempt to connect; `when_quiet`: also when heartbeats are overdue on a connection."""
        self.lost: Loss | None = None
        """Why the link is lost for good."""
        self.heard = 0.0
        """When the other end was last heard, on this process's clock."""
        self.received = 0
        """The number of messages that have arrived from the other end."""
        self._limits = limits
        self._begin_attempt = attempt
        self._when_quiet = when_quiet
        self._connection: Connection | None = None
        self._break: _Break | None = None
        self._attempt: Attempt | None = None
        self._attempt_at = 0.0
        self._sent = self._acknowledged = 0
        self._unacknowledged: deque[Message] = deque()
        self._acknowledged_to_other = 0
        """The number that the last heartbeat has acknowledged."""
        self._heartbeat_at = 0.0
        self._now = self._sent_at = 0.0
        self._answered = False
        """True when the other host has accepted a connection since the last one broke."""

    @property
    def broken(self) -> bool:
        return self._break is not None

    def owes_acknowledgement(self, now: float) -> bool:
        """Return whether to wait for the acknowledgement of a message."""
        if self.lost is not None or not self._unacknowledged:
            return False
        return self.broken or now - self._sent_at < _LAST_ACKNOWLEDGEMENT_S

    @property
    def is_acknowledged(self) -> bool:
        """True when the other end has all messages."""
        return not self._unacknowledged

    def read_speed(self) -> float:
        """Return how fast the kernel delivers what is sent, in MB/s; 0: it does not say.

        Source: struct tcp_info of linux/tcp.h, tcpi_delivery_rate (Linux 4.9).
        """
        info = b""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                info = self._connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE + 8)
        return int.from_bytes(info[_DELIVERY_RATE:], sys.byteorder) / 1e6 if len(info) == _DELIVERY_RATE + 8 else 0.0

    def is_quiet(self, now: float) -> bool:
        """Return whether heartbeats are overdue; the link is not lost by that."""
        if self._connection is None:
            return self.broken
        return now - self._connection.last_received > min(QUIET_S, self._limits.host_silence_s / 4)

    def connect(self, connection: Connection, received: int, now: float) -> None:
        """Use this connection from now on; the other end has received `received` messages."""
        if self._break is not None:
            log_line(f"connected again {now - self._break.since:.1f} s after: {self._break.why}")
        self._close_connection()
        self._end_attempt()
        self._break = None
        self._connection = connection
        connection.last_received = now
        if self._limits.spans_hosts:
            watch_host(connection.sock, self._limits.host_silence_s)
        self._acknowledge(received)
        for message in self._unacknowledged:
            connection.send(message)

    def send(self, message: Message) -> None:
        """Send a message, now or over the next connection."""
        numbered = message | {"number": self._sent}
        self._sent += 1
        self._sent_at = self._now
        self._unacknowledged.append(numbered)
        if self._connection is not None:
            self._connection.send(numbered)

    def receive(self, now: float) -> list[Message]:
        """Return the messages that have arrived."""
        self._now = now
        return self.take(self._connection.receive(now)) if self._connection is not None else []

    def take(self, messages: list[Message]) -> list[Message]:
        """Return the new ones of these messages, without their numbers."""
        new = []
        for message in messages:
            if message["kind"] == "heartbeat":
                self._acknowledge(message["received"])
            elif message.get("number") == self.received:
                self.received += 1
                new.append({key: value for key, value in message.items() if key != "number"})
        return new

    def keep_up(self, now: float) -> Found | None:
        """Send heartbeats, detect losses, connect again; return a new authenticated connection, for `connect`."""
        connection = self._connection
        if connection is not None:
            self.heard = connection.last_received
            self._send_heartbeat(connection, now)
            if connection.lost is not None:
                self._on_break(connection.lost, now)
            elif now - connection.last_received > self._limits.heartbeat_timeout_s:
                self.give_up(Loss("process_silent", f"no heartbeat for {self._limits.heartbeat_timeout_s:g} s"))
        return self._try_again(now) if self.lost is None else None

    def _send_heartbeat(self, connection: Connection, now: float) -> None:
        """Send a heartbeat when one is due or acknowledges a message; else send what is left of earlier messages."""
        if now >= self._heartbeat_at or self.received != self._acknowledged_to_other:
            self._heartbeat_at = now + min(HEARTBEAT_S, self._limits.heartbeat_timeout_s / 3)
            self._acknowledged_to_other = self.received
            connection.send({"kind": "heartbeat", "received": self.received})
        else:
            connection.flush()

    def give_up(self, why: Loss) -> None:
        """End the link, and send the other end why."""
        self.send({"kind": "gave_up", "why": str(why)})
        self.lose(why)

    def lose(self, why: Loss) -> None:
        """Note that the link is lost for good."""
        self.lost = why
        self._close_connection()
        self._end_attempt()

    def _on_break(self, why: Loss, now: float) -> None:
        self._close_connection()
        if why.kind == "host_silent" and not (self._attempt is not None and self._attempt.connected):
            self.lose(HOST_SILENT)
        else:
            self._break, self._answered = _Break(since=now, why=why), False

    def _try_again(self, now: float) -> Found | None:
        if self._break is None and not (self._when_quiet and self.is_quiet(now)):
            self._end_attempt()
            return None
        if self._attempt is None and now >= self._attempt_at:
            with contextlib.suppress(OSError):  # no descriptor is left, for example
                self._attempt = self._begin_attempt(now)
        attempt = self._attempt
        if attempt is not None:
            found = attempt.look(now)
            if found is not None:
                self._attempt = None
                return found
            self._answered |= attempt.connected
            if attempt.is_over(now):
                self._end_attempt()
                self._attempt_at = now + _AGAIN_S
        if (broken := self._break) is None:
            return None
        if attempt is not None and attempt.refused:
            self.lose(PROCESS_ENDED)
        elif now - broken.since > self._limits.host_silence_s:
            within = f"and no other one came within {self._limits.host_silence_s:g} s"
            self.lose(Loss("broken", f"{broken.why}, {within}") if self._answered else HOST_SILENT)
        return None

    def _acknowledge(self, received: int) -> None:
        while self._acknowledged < received and self._unacknowledged:
            self._unacknowledged.popleft()
            self._acknowledged += 1

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Clock:
    """Seconds on the scale of `time.monotonic`, less the time in which this process was stopped, suspended or blocked.

    A timeout counts only time in which this process ran, so a gang that is suspended as a whole goes on afterwards.
    """

    def __init__(self) -> None:
        self.now = self._last = time.monotonic()

    def tick(self) -> float:
        """Return the time; called once in each turn of the loop."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, MAX_TURN_S)
        return self.now


_DELIVERY_RATE = 160
"""Where it is in struct tcp_info."""
_FILLER_BYTES, _PROBE_BYTES, _PROBES_BYTES = 1 << 16, 1 << 20, 1 << 25
"""Of one message, of all that measure one link, and of those of all nodes."""
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
        head: int = 0,
        probes: bool = False,
        now: float,
    ) -> None:
        """`listener`: the head connects to it after a connection broke, to test whether this process lives.

        `probes`: the link is measured. `known`: the address where the head listens already; None: it starts to listen
        at one of the candidates.
        """
        self.exit_code: int | None = None
        """Set when the supervisor is to exit as soon as nothing of its node is left."""
        self.head_lost: Loss | None = None
        self.joined = False
        """True once the head has accepted this node."""
        self.head = head
        """Its node rank."""
        self._token = gang.token
        self._node = gang.node(node_rank)
        self._selector = selector
        self._listener = listener
        self._search = search
        self._known = known
        self._in_job = in_job
        self._is_elastic = gang.min_nodes is not None
        self._start_timeout_s = gang.start_timeout_s
        self._join_until = now + gang.start_timeout_s
        self._connect_until = now + min(_CONNECT_S, gang.start_timeout_s)
        self._session = ""
        self._first: list[Message] = []
        """The head's first orders, until the next turn."""
        self._now = now
        self._address = ("", 0)
        self._peer = Peer(limits, self._connect_again, when_quiet=True)
        self._probe_bytes = min(_PROBE_BYTES, _PROBES_BYTES // len(gang.nodes)) if probes else 0
        self._probing = False

    @property
    def polls_fast(self) -> bool:
        """True while something is to be done at once, or things change within milliseconds."""
        return not self.joined or self._peer.broken

    def close(self) -> None:
        """Stop listening; another uplink takes the place of this one."""
        self._search.close()
        self._listener.close()

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
        messages, self._first = self._first, []
        messages += self._peer.receive(now) if self.joined else self._join(now)
        if self.joined and (found := self._peer.keep_up(now)) is not None:
            messages += self._welcomed(found, now)
        orders = [self._take_order(message) for message in messages]
        if self._probing and self._peer.is_acknowledged:
            self._probing = False
            if speed := self._peer.read_speed():
                self.report({"kind": "preflight", "link": round(speed, 1)})
        if self._peer.lost is not None and self.exit_code is None:
            log_line(f"the link to node {self.head}'s supervisor is lost: {self._peer.lost}")
            self.head_lost = self._peer.lost
            self.exit_code = 1
            orders.append({"kind": "kill", "whole_gang": not self._is_elastic})
        return orders

    def report_fatal_error(self, error: str) -> None:
        """Report an error that ends this supervisor."""
        node = self._node
        self.report(report_of("failed", RankEnd(rank=min(node.ranks, default=None), host=node.host, error=error)))
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
            self._peer.lose(Loss("given_up", f"node {self.head} has given it up: {message['why']}"))
        elif message["kind"] == "preflight" and "link" in message:
            self._probe()
        return message

    def _probe(self) -> None:
        """Send the head what it does not need; once it has that, its speed is reported."""
        for _ in range(self._probe_bytes // _FILLER_BYTES):
            self._probing = True
            self._peer.send({"kind": "filler", "data": "0" * _FILLER_BYTES})

    def _join(self, now: float) -> list[Message]:
        """Find the head, and wait for its welcome.

        Raises: ClusterddpError: it was not found in time, or cannot be reached.
        """
        found = self._search.find(now)
        if found is not None:
            self.enter(found, now)
            return []
        if (known := self._known) is None:
            if now >= self._join_until:
                raise HeadNotFoundError(f"node 0's supervisor was not found within {self._start_timeout_s:g} s")
            return []
        # A head that is known to listen may refuse, or not answer in time.
        loss = self._search.failure.loss if self._search.failure is not None else Loss("no_answer", "no answer")
        late = not self._search.answered and now >= self._connect_until
        if loss.kind == "refused" or late:
            raise ClusterddpError(f"node 0's supervisor at {known['host']}:{known['port']} cannot be reached: {loss}")
        if now >= self._join_until:
            self._peer.lose(loss)
        return []

    def enter(self, found: Found, now: float) -> None:
        """Use a connection on which the head has answered that this node has joined."""
        self.joined = True
        self._search.close()
        connection = found.connection
        log_line(f"node {self.head}'s supervisor is at {connection.peer_address}:{connection.peer_port}")
        self._first = self._welcomed(found, now)
        self._probe()

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
    """The uplink of the head's node: the head is in this process, the other nodes are its peers."""

    head_lost: Loss | None = None
    joined = True

    def __init__(
        self, gang: Gang, selector: selectors.BaseSelector, limits: Limits, *, listener: socket.socket, join: Message
    ) -> None:
        self.head: Head | None = None
        """Set once; the head needs `send`, and this needs the head."""
        self.exit_code: int | None = None
        self._own = int(join["node_rank"])
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
        if node_rank == self._own:
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
            elif (why := self.head.gives_up.pop(node_rank, None)) is not None:
                peer.give_up(why)
            if peer.lost is not None:
                self._given_up[node_rank] = peer.lost
                del self._peers[node_rank]
                self.head.on_loss(node_rank, peer.lost, now, silent_s=now - peer.heard if peer.heard else 0.0)
        while self._reports:
            self.head.on_report(self._own, self._reports.popleft(), now)
        self.head.tick(now)
        if not any(peer.owes_acknowledgement(now) for peer in self._peers.values()):
            self.exit_code = self.head.exit_code
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Give up all links; another uplink takes the place of this one."""
        for peer in self._peers.values():
            peer.give_up(Loss("given_up", f"node {self._own} has joined another one"))
        self._server.close()

    def report_fatal_error(self, error: str) -> None:
        """Close all links; the other nodes then end their ranks."""
        self._listener.shutdown(socket.SHUT_RDWR)  # with its copies
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
        if node_rank < self._own and not self.head.decides:
            self._server.refuse(connection, f"node {node_rank} comes first, and this one decides nothing", now)
            return
        if join.get("again") and (before := self._peers.pop(node_rank, None)) is not None:
            loss = LINK_LOST if join["pid"] == self._pids[node_rank] else PROCESS_ENDED
            before.lose(loss)  # found first at its other end
            self.head.on_loss(node_rank, loss, now)
        if self.head.nodes.may_join(node_rank):
            address = (connection.peer_address, int(join["port"]))
            peer = Peer(self._limits, lambda now: Attempt(address, now), when_quiet=False)
            self._peers[node_rank] = peer
            self._pids[node_rank] = int(join["pid"])
            facts = {"reached": connection.own_address, "address": connection.peer_address}
            self.head.on_report(node_rank, join | facts, now)
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

"""The link between the head (node 0's supervisor) and another supervisor: its messages, heartbeats and listeners.

A link is a series of connections, signed and unencrypted (connection.py); their key is the run's token. A
`Peer` is one end of it: it numbers its messages, and sends again what the other end has not received.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from clusterddp.network.port import bind_port
from clusterddp.network.rendezvous.client import Attempt, Found
from clusterddp.network.rendezvous.connection import HOST_SILENT, Connection, Loss, Message, Protocol
from clusterddp.node.log import log_line
from clusterddp.run.record import RankEnd
from clusterddp.wire import build

HEARTBEAT_S = 1.0
PROCESS_ENDED = Loss("process_ended", "its process has ended")
"""The other host refuses connections to the port of the process."""
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


def given_up(why: str) -> Loss:
    """Return the loss of a link that the head has given up."""
    return Loss("given_up", f"node 0 has given it up: {why}")


def watch_host(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel end a connection whose other host has not answered for this long, on Linux.

    The other kernel answers, not the process: a process that blocks on a file server does not count as a dead host.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
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
        self._unacknowledged: collections.deque[Message] = collections.deque()
        self._acknowledged_to_other = 0
        """The number that the last heartbeat has acknowledged."""
        self._heartbeat_at = 0.0
        self._now = self._sent_at = 0.0
        self._answered = False
        """True when the other host has accepted a connection since the last one broke."""

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def broken(self) -> bool:
        return self._break is not None

    def owes_acknowledgement(self, now: float) -> bool:
        """Return whether to wait for the acknowledgement of a message."""
        if self.lost is not None or not self._unacknowledged:
            return False
        return self.broken or now - self._sent_at < _LAST_ACKNOWLEDGEMENT_S

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
        if self._break is not None:
            self._judge_break(self._break, refused=attempt is not None and attempt.refused, now=now)
        return None

    def _judge_break(self, broken: _Break, *, refused: bool, now: float) -> None:
        if refused:
            self.lose(PROCESS_ENDED)
        elif now - broken.since > self._limits.host_silence_s:
            within = f"and no other one came within {self._limits.host_silence_s:g} s"
            self.lose(Loss("broken", f"{broken.why}, {within}") if self._answered else HOST_SILENT)

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


@dataclass(kw_only=True, slots=True)
class Question:
    """A question under way; subclasses hold the answers."""

    due: float
    """When the head stops waiting."""
    awaited: set[int]
    """The nodes that have not answered, by rank."""

    def send(self, order: Message, send: Callable[[int, Message], None]) -> None:
        """Send it to all nodes."""
        for node_rank in sorted(self.awaited):
            send(node_rank, order)

    def is_over(self, nodes: Iterable[int], now: float) -> bool:
        """Return whether all nodes have answered, or the time is up; `nodes`: those that are not lost."""
        self.awaited &= set(nodes)
        return not self.awaited or now >= self.due

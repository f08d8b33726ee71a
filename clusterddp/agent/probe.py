"""The two ends of a probe: a listener on every address of this host, and connections to the listeners of other hosts.

The listener answers every process that knows the nonce with the name of its host. The first message and the answer are
PAYLOAD bytes long, so large packets are tried as well: a wrong MTU lets a connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.network.choice import Outcome
from clusterddp.network.interface import plain_address
from clusterddp.network.port import bind_port
from clusterddp.rendezvous.client import AuthenticatedAttempt
from clusterddp.rendezvous.connection import Connection, Message, Protocol
from clusterddp.rendezvous.server import INTRODUCTION_S, Server
from clusterddp.wire import build

PAYLOAD = 1 << 15
"""Bytes each way: more than the largest packet (9000), less than any buffer."""
PROBE = Protocol(name="network probe", key="nonce", max_bytes_to_server=2 * PAYLOAD, max_bytes_to_client=2 * PAYLOAD)
"""Its key is the nonce of the run's probe."""
_NUM_EXPECTED = 100
"""How many hosts are expected to connect at the same time; others wait in the backlog."""
_FLUSH_EVERY_S = 0.05
_ENOUGH = 0.6
"""Part of the time after which the probe ends when every target was reached at one of its addresses: TCP has sent a
lost packet again by then."""
_AT_ONCE = 400
"""How many connections are tried at once: many hosts allow a process 1024 open files, and as many come in."""
_PER_TURN = 16
"""How many attempts begin before the next look at those that have connected."""
_ROUND_TRIP_OFFSET = 68
"""Offset of tcpi_rtt, in us, in Linux's struct tcp_info."""


class Listener:
    """Listens until it is closed, in a thread of its own."""

    def __init__(self, nonce: str, name: str, port: int) -> None:
        """Listen on `port`; 0: on one that the kernel gives.

        Raises: OSError: the port is taken.
        """
        self._name = name
        listener = bind_port(port, shared=True, listening=True)
        self.port = int(listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._server = Server(
            listener, self._selector, protocol=PROBE, key=nonce, num_expected=_NUM_EXPECTED, report=lambda refused: None
        )
        self._end, self._ended = socket.socketpair()
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port, and close all connections."""
        self._end.close()
        self._thread.join()

    def _serve(self) -> None:
        answered: list[Connection] = []
        while True:
            ready = self._selector.select(_FLUSH_EVERY_S if answered else 1.0)
            if any(key.fileobj is self._ended for key, _ in ready):
                break
            now = time.monotonic()
            for connection, _ in self._server.accept(now):
                here = {"kind": "here", "name": self._name, "seen": connection.peer_address}
                connection.send(here | {"padding": " " * PAYLOAD})
                answered.append(connection)
            answered = [connection for connection in answered if not _is_over(connection, now)]
        self._server.close()
        for connection in answered:
            connection.close()
        self._ended.close()
        self._selector.close()


@dataclass(kw_only=True)
class Target:
    """An address to connect to, and the name that must answer there."""

    target: int
    address: str
    port: int
    name: str


class Try:
    """One try to connect, which never blocks."""

    def __init__(self, target: Target, nonce: str, selector: selectors.BaseSelector | None) -> None:
        """`selector`: None: no time is left to continue it."""
        self.target = target
        self.outcome: Outcome | None = None
        self.detail = ""
        self.left_from: str | None = None
        self.seen_from: str | None = None
        self.round_trip_ms: float | None = None
        self._attempt = AuthenticatedAttempt(
            (target.address, target.port), time.monotonic(), selector,
            protocol=PROBE, key=nonce, introduce=lambda connection: {"kind": "ask", "padding": " " * PAYLOAD},
        )  # fmt: skip
        self.socket = self._attempt.sock
        with contextlib.suppress(OSError):
            source = plain_address(str(self.socket.getsockname()[0]))
            self.left_from = None if ipaddress.ip_address(source.partition("%")[0]).is_unspecified else source
        self.go_on()

    def go_on(self) -> None:
        """Continue, as far as that is possible without waiting."""
        now = time.monotonic()
        found = self._attempt.look(now)
        if found is not None:
            self._judge(found.messages[0])
        elif self._attempt.is_over(now):
            self._fail()
        if self.outcome is not None:
            self.close()

    def close(self) -> None:
        self._attempt.close()

    def facts(self) -> dict[str, Any]:
        """Return the result, for `Probe` of network/choice.py."""
        return {
            "target": self.target.target,
            "address": self.target.address,
            "port": self.target.port,
            "outcome": self.outcome or ("stuck" if self._attempt.connected else "no answer"),
            "detail": self.detail,
            "left_from": self.left_from,
            "seen_from": self.seen_from,
            "round_trip_ms": self.round_trip_ms,
        }

    def _judge(self, answer: Message) -> None:
        try:
            here = build({"name": str, "seen": str}, answer)
        except ValueError:
            self.outcome = "stranger"
            return
        self.outcome = "reached" if here["name"] == self.target.name else "stranger"
        self.detail = "" if self.outcome == "reached" else here["name"]
        self.seen_from = here["seen"]
        if sys.platform == "linux":
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            self.round_trip_ms = struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)[0] / 1000

    def _fail(self) -> None:
        code, attempt = self._attempt.error, self._attempt
        if attempt.connected:
            self.outcome = "stuck" if attempt.proven else "stranger"  # a host of this run does not hang up
            return
        self.detail = "a blackhole route" if code == errno.EINVAL else os.strerror(code) if code else ""
        if attempt.refused:
            self.outcome = "refused"
        else:
            self.outcome = "no answer" if code in {0, errno.ETIMEDOUT} else "no way"


def probe_all(nonce: str, targets: Sequence[Target], within_s: float) -> list[Try]:
    """Probe all targets at the same time; return the tries in the order of the targets."""
    start = time.monotonic()
    waiting = deque(targets)
    tries: list[Try] = []
    under_way: list[Try] = []
    with selectors.DefaultSelector() as selector:
        while waiting or under_way:
            passed_s = time.monotonic() - start
            if passed_s >= within_s or (passed_s >= within_s * _ENOUGH and _all_reached(targets, tries)):
                break
            for _ in range(min(len(waiting), _AT_ONCE - len(under_way), _PER_TURN)):
                tries.append(attempt := Try(waiting.popleft(), nonce, selector))
                under_way.append(attempt)
            ready = {key.fileobj for key, _ in selector.select(0 if waiting else min(0.05, within_s - passed_s))}
            for attempt in under_way:
                if attempt.outcome is None and (attempt.socket in ready or not ready):
                    attempt.go_on()
            under_way = [attempt for attempt in under_way if attempt.outcome is None]
        for attempt in under_way:
            attempt.go_on()
            attempt.close()
    for target in waiting:  # there was no time for them
        tries.append(attempt := Try(target, nonce, None))
        attempt.close()
    return tries


def _all_reached(targets: Sequence[Target], tries: Sequence[Try]) -> bool:
    reached = {(attempt.target.target, attempt.target.port) for attempt in tries if attempt.outcome == "reached"}
    return all((target.target, target.port) in reached for target in targets)


def _is_over(connection: Connection, now: float) -> bool:
    """Continue a connection, and close it after the client has; return whether it is closed.

    The end that closes first keeps its port busy for a minute: the client should be that end.
    """
    connection.receive(now)
    if connection.lost is None and now - connection.opened <= 2 * INTRODUCTION_S:
        return False
    connection.close()
    return True

"""Connecting to many addresses at once, within a time: what came of each."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.agent.listener import PAYLOAD, WAYS
from clusterddp.network.interface import plain_address
from clusterddp.network.paths import Outcome
from clusterddp.rendezvous.client import AuthenticatedAttempt
from clusterddp.rendezvous.connection import Message
from clusterddp.wire import build

_ENOUGH = 0.6
"""Part of the time after which the search ends when every target was reached at one of its addresses: long enough for
a packet that was lost to be sent again."""
_AT_ONCE = 400
"""Many hosts allow a process 1024 open files, and this one is connected to as often."""
_PER_TURN = 16
"""How many attempts begin before those that have connected are looked at again."""
_ROUND_TRIP_OFFSET = 68
"""Of tcpi_rtt, in us, in Linux's struct tcp_info."""


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
        """`selector`: None: there is no time to go on with it."""
        self.target = target
        self.outcome: Outcome | None = None
        self.detail = ""
        self.left_from: str | None = None
        self.seen_from: str | None = None
        self.round_trip_ms: float | None = None
        self._attempt = AuthenticatedAttempt(
            (target.address, target.port), time.monotonic(), selector,
            protocol=WAYS, key=nonce, introduce=lambda connection: {"kind": "ask", "padding": " " * PAYLOAD},
        )  # fmt: skip
        self.socket = self._attempt.sock
        with contextlib.suppress(OSError):
            source = plain_address(str(self.socket.getsockname()[0]))
            self.left_from = None if ipaddress.ip_address(source.partition("%")[0]).is_unspecified else source
        self.go_on()

    def go_on(self) -> None:
        """Do what can be done now."""
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
        """Return what came of it, for `Way` of network/paths.py."""
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


def try_ways(nonce: str, targets: Sequence[Target], within_s: float) -> list[Try]:
    """Try all ways at the same time; return what came of them, in their order."""
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

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

from clusterddp.agent.listener import PAYLOAD
from clusterddp.network.interface import plain_address
from clusterddp.network.paths import Outcome
from clusterddp.wire import read_object

_ENOUGH = 0.6
"""Part of the time after which nobody waits on, when every target was reached at one of its addresses: long enough for
a packet that was lost to be sent again."""
_AT_ONCE = 400
"""Many hosts allow a process 1024 open files, and this one is connected to as often."""
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

    def __init__(self, target: Target, greeting: bytes) -> None:
        self.target = target
        self.outcome: Outcome | None = None
        self.detail = ""
        self.left_from: str | None = None
        self.seen_from: str | None = None
        self.round_trip_ms: float | None = None
        self._unsent = greeting
        self._heard = b""
        self._connected = False
        self.socket = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        code = self.socket.connect_ex((target.address, target.port))
        with contextlib.suppress(OSError):
            source = plain_address(str(self.socket.getsockname()[0]))
            self.left_from = None if ipaddress.ip_address(source.partition("%")[0]).is_unspecified else source
        if code not in (0, errno.EINPROGRESS):
            self._fail(code)

    @property
    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def go_on(self) -> None:
        """Do what can be done now."""
        try:
            if not self._connected:
                if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._fail(code)
                    return
                self._connected = True
            if self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            data = self.socket.recv(PAYLOAD)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.errno or errno.EIO)
            return
        self._heard += data
        if not data or len(self._heard) >= PAYLOAD:
            self._judge()

    def facts(self) -> dict[str, Any]:
        """Tell what came of it, for `Way` of network/paths.py."""
        return {
            "target": self.target.target,
            "address": self.target.address,
            "port": self.target.port,
            "outcome": self.outcome or ("stuck" if self._connected else "no answer"),
            "detail": self.detail,
            "left_from": self.left_from,
            "seen_from": self.seen_from,
            "round_trip_ms": self.round_trip_ms,
        }

    def _judge(self) -> None:
        try:
            answer = read_object(self._heard)
            name, seen = str(answer["name"]), str(answer["seen"])
        except (ValueError, KeyError):
            self.outcome = "stranger"
            return
        self.outcome = "reached" if name == self.target.name else "stranger"
        self.detail = "" if name == self.target.name else name
        self.seen_from = seen
        if sys.platform == "linux":
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            self.round_trip_ms = struct.unpack_from("=I", info, _ROUND_TRIP_OFFSET)[0] / 1000

    def _fail(self, code: int) -> None:
        self.detail = "a blackhole route" if code == errno.EINVAL else os.strerror(code)
        if self._connected:
            self.outcome = "stranger"  # ours does not hang up
        elif code == errno.ECONNREFUSED:
            self.outcome = "refused"
        else:
            self.outcome = "no answer" if code == errno.ETIMEDOUT else "no way"


def try_ways(nonce: str, targets: Sequence[Target], within_s: float) -> list[Try]:
    """Try all ways at the same time; return what came of them, in their order."""
    start = time.monotonic()
    greeting = nonce.encode().ljust(PAYLOAD)
    waiting = deque(targets)
    tries: list[Try] = []
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            passed_s = time.monotonic() - start
            if passed_s >= within_s or (passed_s >= within_s * _ENOUGH and _all_reached(targets, tries)):
                break
            while waiting and len(selector.get_map()) < _AT_ONCE:
                tries.append(attempt := Try(waiting.popleft(), greeting))
                if attempt.outcome is None:
                    selector.register(attempt.socket, attempt.events, attempt)
                else:
                    attempt.socket.close()
                if len(tries) % 16 == 0:
                    break  # look at those that have connected meanwhile
            _serve(selector, 0 if waiting else min(0.05, within_s - passed_s))
        for key in list(selector.get_map().values()):
            key.data.socket.close()
    for target in waiting:  # there was no time for them
        tries.append(attempt := Try(target, greeting))
        attempt.socket.close()
    return tries


def _serve(selector: selectors.BaseSelector, wait_s: float) -> None:
    for key, _ in selector.select(wait_s):
        attempt: Try = key.data
        attempt.go_on()
        if attempt.outcome is None:
            selector.modify(attempt.socket, attempt.events, attempt)
        else:
            selector.unregister(attempt.socket)
            attempt.socket.close()


def _all_reached(targets: Sequence[Target], tries: Sequence[Try]) -> bool:
    reached = {(attempt.target.target, attempt.target.port) for attempt in tries if attempt.outcome == "reached"}
    return all((target.target, target.port) in reached for target in targets)

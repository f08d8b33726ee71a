"""The two ends of a probe: a listener on every address of this host, and tries to connect to those of other hosts.

The one that connects sends PAYLOAD bytes, the nonce first, and gets as many back: who answers, and from which address
it was seen. So large packets are probed as well: a wrong MTU lets a connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
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

from clusterddp.network.interface import plain_address
from clusterddp.network.paths import Outcome
from clusterddp.wire import read_object

PAYLOAD = 1 << 15
"""Bytes each way: more than the largest packet (9000), less than any buffer."""
_BACKLOG = 4096
_CLIENT_TIMEOUT_S = 5.0
"""For one client."""
_ENOUGH = 0.6
"""Part of the time after which waiting ends when every target was reached at one of its addresses: long enough for a
packet that was lost to be sent again."""
_AT_ONCE = 400
"""Many hosts allow a process 1024 open files, and this one is connected to as often."""
_ROUND_TRIP_OFFSET = 68
"""Of tcpi_rtt, in us, in Linux's struct tcp_info."""


@dataclass(kw_only=True)
class _Client:
    socket: socket.socket
    seen: str
    deadline: float
    heard: bytes = b""
    unsent: bytes = b""
    answered: bool = False


class Listener:
    """Answers each client that knows the nonce with the name of this host, in a thread, until it is closed."""

    def __init__(self, nonce: str, name: str, port: int) -> None:
        """Listen on `port`; 0: on one that the kernel gives.

        Raises: OSError: the port is taken.
        """
        self._nonce = nonce.encode()
        self._name = name
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._end, self._ended = socket.socketpair()
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port, and close all connections."""
        self._end.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._ended:
                    self._hang_up()
                    return
                if key.fileobj is self._socket:
                    self._accept()
                elif not self._go_on(key.data):
                    self._drop(key.data)
            now = time.monotonic()
            clients = [key.data for key in self._selector.get_map().values() if key.data is not None]
            for client in clients:
                if client.deadline < now:
                    self._drop(client)

    def _accept(self) -> None:
        try:
            peer, address = self._socket.accept()
        except OSError:
            time.sleep(0.01)  # too many open files, for a moment
            return
        peer.setblocking(False)
        seen, deadline = plain_address(str(address[0])), time.monotonic() + _CLIENT_TIMEOUT_S
        self._selector.register(peer, selectors.EVENT_READ, _Client(socket=peer, seen=seen, deadline=deadline))

    def _go_on(self, client: _Client) -> bool:
        """Hear and answer what can be now; False: there is no more to it."""
        try:
            if not client.answered:
                data = client.socket.recv(PAYLOAD)
                client.heard += data
                if not data or not client.heard.startswith(self._nonce[: len(client.heard)]):
                    return False
                if len(client.heard) < PAYLOAD:
                    return True
                client.answered = True
                client.unsent = json.dumps({"name": self._name, "seen": client.seen}).encode().ljust(PAYLOAD)
                self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
            if client.unsent:
                client.unsent = client.unsent[client.socket.send(client.unsent) :]
                if not client.unsent:
                    # Whoever closes first keeps the port busy for a minute: let it be the other one.
                    self._selector.modify(client.socket, selectors.EVENT_READ, client)
                return True
            return bool(client.socket.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.socket)
        client.socket.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
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
        """Return what came of it, for `Probe` of network/paths.py."""
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


def probe_all(nonce: str, targets: Sequence[Target], within_s: float) -> list[Try]:
    """Probe all targets at the same time; return what came of each, in their order."""
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

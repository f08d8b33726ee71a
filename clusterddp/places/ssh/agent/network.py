"""The network of this host: its interfaces, a listener that sends this host's name, and probes of other hosts.

The listener answers every process that knows the nonce with the name of its host. The first message and the answer are
PAYLOAD bytes long, so large packets are tried as well: a wrong MTU lets a connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import platform
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.network.choice import Outcome, Probe
from clusterddp.network.interface import plain_address, read_links, resolve
from clusterddp.network.port import bind_port, walk_ports
from clusterddp.network.rendezvous.client import AuthenticatedAttempt
from clusterddp.network.rendezvous.connection import Connection, Message, Protocol
from clusterddp.network.rendezvous.server import INTRODUCTION_S, Server
from clusterddp.places.ssh.agent.operations import Body, Host, Target
from clusterddp.wire import build

_RESOLVE_S = 1.0
_PORTS = 64
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


def listen(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Open the listener; return this host's network. `head`: listen at a port for the master, too.

    Without a `nonce` only close what was opened before.
    """
    host.release_all(Listener)
    nonce, name = request["nonce"], request["name"]
    if nonce is None:
        return {"network": None}
    resolving = _Resolving(resolve, socket.gethostname())
    listener = host.hold(Listener(nonce, name, 0))
    master_port = None
    if request["head"]:
        master_port = host.hold(_listen_as_master(nonce, name, request["master_port"])).port
    found = {
        "host": name,
        "machine": _machine(),
        "links": [link.to_json() for link in read_links()],
        "own_addresses": resolving.result(),
        "port": listener.port,
        "master_port": master_port,
        "firewall": _firewall(),
    }
    return {"network": found}


def probe(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Probe other hosts, all at once; return also which of `names`, which are addresses, are slow to resolve."""
    resolving = {address: _Resolving(_name_of, address) for address in request["names"]}
    tries = probe_all(request["nonce"], request["targets"], request["within_s"])
    slow = [address for address, name in resolving.items() if name.result() is None]
    probes = [dataclasses.asdict(each.result(request["source"])) for each in tries]
    return {"probes": probes, "slow_names": slow}


class _Resolving:
    """Resolves a name or an address in a thread: without its name server that takes half a minute."""

    def __init__(self, ask: Callable[[str], Iterable[str]], question: str) -> None:
        self._answer: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._latest = time.monotonic() + _RESOLVE_S
        threading.Thread(target=self._resolve, args=(ask, question), daemon=True).start()

    def result(self) -> list[str] | None:
        """Return the answer; None: none within the time."""
        try:
            return self._answer.get(timeout=max(0.0, self._latest - time.monotonic()))
        except queue.Empty:
            return None

    def _resolve(self, ask: Callable[[str], Iterable[str]], question: str) -> None:
        found: Iterable[str] = ()
        with contextlib.suppress(OSError):
            found = ask(question)
        self._answer.put(list(dict.fromkeys(found)))


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

    def result(self, source: int) -> Probe:
        """Return the result; `source`: the number of this host."""
        return Probe(
            source=source,
            target=self.target.target,
            address=self.target.address,
            port=self.target.port,
            outcome=self.outcome or ("stuck" if self._attempt.connected else "no answer"),
            detail=self.detail,
            left_from=self.left_from,
            seen_from=self.seen_from,
            round_trip_ms=self.round_trip_ms,
        )

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


def _listen_as_master(nonce: str, name: str, wanted: int | None) -> Listener:
    """Listen at the port that the master will use, or at the first free one of its range."""
    for port in [wanted] if wanted is not None else walk_ports(nonce, _PORTS):
        with contextlib.suppress(OSError):
            return Listener(nonce, name, port)
    if wanted is None:
        raise ClusterddpError(f"{_PORTS} ports were tried for the master, and none is free")
    user = _listening_user(wanted)
    raise ClusterddpError(
        f"network.master_port {wanted} is in use" + (f" by a process of {user}" if user else ""),
        hint=f"network.master_port: auto finds a free one; `ss -tlnp sport = :{wanted}` there shows who listens",
    )


def _listening_user(port: int) -> str | None:
    """Name the user whose process listens on a port."""
    import pwd

    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, KeyError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return pwd.getpwuid(int(fields[7])).pw_name
    return None


def _machine() -> str:
    """Return an identity of this machine; two containers differ, since each has a network namespace of its own."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return platform.node()


def _firewall() -> str | None:
    """Name the firewall that is switched on, if any user can read that."""
    with contextlib.suppress(OSError):
        if "\nENABLED=yes" in "\n" + Path("/etc/ufw/ufw.conf").read_text():
            return "ufw"
    return "firewalld" if Path("/sys/fs/cgroup/system.slice/firewalld.service").exists() else None


def _name_of(address: str) -> list[str]:
    """Resolve an address as torch does, for its log, whenever a rank connects to the master.

    By gethostbyaddr: getnameinfo of Python 3.11.2 blocks other threads, such as the listener's, while it waits.
    """
    return [socket.gethostbyaddr(address)[0]]


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

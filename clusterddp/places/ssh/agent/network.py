"""The network of this host: its interfaces, a listener that proves this host's name, and probes of other hosts.

A probe sends a random question, and the listener answers with the name of its host and a signature by the nonce of the
run's probes. Question and answer are PAYLOAD bytes long, so large packets are tried as well: a wrong MTU lets a
connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import os
import platform
import secrets
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusterddp.network.choice import Outcome, Probe, Target
from clusterddp.network.interface import read_links
from clusterddp.network.port import bind_port, hold_port, reserve_port
from clusterddp.network.rendezvous.connection import prove
from clusterddp.places.ssh.agent.operations import Body, Host
from clusterddp.run.record import boot_id

PAYLOAD = 1 << 15
"""Bytes each way: more than the largest packet (9000), less than any buffer."""
_ANSWER_S = 5.0
"""How long a connection to the listener may take."""
_MAX_CONNECTIONS = 256
"""How many connections the listener answers, and how many probes run, at a time: many hosts allow 1024 open files."""


def listen(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Open the listener; return this host's network. `head`: listen at a port for the master, too.

    Without a `nonce` only close what was opened before.
    Raises: ClusterddpError: the master's port is in use.
    """
    for opened in host.find_held(Listener):
        host.release(opened)
    nonce, name, wanted = request["nonce"], request["name"], request["master_port"]
    if nonce is None:
        return {"network": None}
    listener = host.hold(Listener(nonce, name, bind_port(0, shared=True, listening=True)))
    master_port = None
    if request["head"]:
        sock = reserve_port(nonce, listening=True)[0] if wanted is None else hold_port(wanted, listening=True)
        master_port = host.hold(Listener(nonce, name, sock)).port
    found = {
        "host": name,
        "machine": _machine(),
        "links": [link.to_json() for link in read_links()],
        "port": listener.port,
        "master_port": master_port,
    }
    return {"network": found}


def probe(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Probe other hosts, all at once."""

    def probe_one(target: Target) -> Probe:
        return probe_address(target, request["nonce"], request["source"], request["within_s"])

    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        return {"probes": [dataclasses.asdict(each) for each in pool.map(probe_one, request["targets"])]}


class Listener(socketserver.ThreadingTCPServer):
    """Answers questions at a socket that listens, until it is closed, in threads of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, nonce: str, name: str, listening: socket.socket) -> None:
        super().__init__(("", 0), socketserver.BaseRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.port = int(listening.getsockname()[1])
        self._nonce = nonce
        self._name = name
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        threading.Thread(target=self.serve_forever, args=(0.005,), daemon=True).start()  # how long `close` may wait

    def close(self) -> None:
        """Free the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; of a flood of connections the next ones wait for one that has ended."""
        self._free.acquire()
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one question.

        The end that closes first keeps its port busy for a minute, so this end waits for the client to close.
        """
        try:
            with contextlib.suppress(OSError):
                question = _receive(request, time.monotonic() + _ANSWER_S)
                if len(question) == PAYLOAD:
                    name = self._name.encode()
                    request.sendall((name + b" " + prove(self._nonce.encode(), question + name)).ljust(PAYLOAD))
                    request.recv(1)
        finally:
            self._free.release()


def probe_address(target: Target, nonce: str, source: int, within_s: float) -> Probe:
    """Connect to an address, and ask who is there."""
    began = time.monotonic()
    found = Probe(
        source=source, target=target.target, address=target.address, port=target.port, outcome="no answer", detail=""
    )
    try:
        with socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(within_s)
            try:
                sock.connect((target.address, target.port))
            finally:
                left_from = str(sock.getsockname()[0])
                if not ipaddress.ip_address(left_from.partition("%")[0]).is_unspecified:
                    found = dataclasses.replace(found, left_from=left_from)
            connected = time.monotonic()
            outcome, detail = _ask(sock, target.name, nonce, began + within_s)
            round_trip_ms = 1000 * (connected - began)
            return dataclasses.replace(found, outcome=outcome, detail=detail, round_trip_ms=round_trip_ms)
    except TimeoutError:
        return found
    except ConnectionRefusedError:
        return dataclasses.replace(found, outcome="refused")
    except OSError as error:
        detail = "a blackhole route" if error.errno == errno.EINVAL else error.strerror or str(error)
        return dataclasses.replace(found, outcome="no way", detail=detail)


def _ask(sock: socket.socket, wanted: str, nonce: str, deadline: float) -> tuple[Outcome, str]:
    """Ask who is at the other end of a connection; return the outcome of the probe, and its detail."""
    question = secrets.token_hex(PAYLOAD // 2).encode()
    try:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        sock.sendall(question)
        answer = _receive(sock, deadline)
    except TimeoutError:
        return "stuck", ""
    except OSError:
        return "stranger", ""  # a host of this run does not hang up
    name, _, proof = answer.rstrip().partition(b" ")
    if not hmac.compare_digest(proof, prove(nonce.encode(), question + name)):
        return "stranger", ""
    return ("reached", "") if name == wanted.encode() else ("stranger", name.decode(errors="replace"))


def _receive(sock: socket.socket, deadline: float) -> bytes:
    """Receive PAYLOAD bytes, or what comes before the deadline or the end of the connection."""
    data = b""
    while len(data) < PAYLOAD and (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        if not (chunk := sock.recv(PAYLOAD - len(data))):
            break
        data += chunk
    return data


def _machine() -> str:
    """Return an identity of this machine; two containers differ, since each has a network namespace of its own."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"
    return platform.node()

"""The network of this host, told and tried: its interfaces, a listener that says who it is, and ways to other hosts.

    net.listen   opens a listener; tells interfaces, ports, what this host's own name means
    net.probe    connects to other hosts' listeners, all at once; tells what came of each
    net.close    closes the listener

Whoever connects sends PAYLOAD bytes, the nonce of the inquiry first, and gets as many back: who answers, and from where
he was seen. So large packets are tried as well: a wrong MTU lets a connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from clusterddp.dist.interface import plain_address, read_links
from clusterddp.dist.port import walk_ports
from clusterddp.errors import ClusterddpError
from clusterddp.host.agent_types import Body, Host
from clusterddp.host.ways import PAYLOAD, Target, try_ways

_PATIENCE_S = 5.0
"""For the parts of one greeting."""
_RESOLVE_S = 1.0
_PORTS = 64


class Listener:
    """Tells everybody who knows the nonce who this host is, on every address, until it is closed."""

    def __init__(self, nonce: str, name: str, port: int) -> None:
        """Listen on `port`; 0: on one that the kernel gives.

        Raises: OSError: the port is taken.
        """
        self._nonce = nonce
        self._name = name
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=both)
        self.port = int(self._socket.getsockname()[1])
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, address = self._socket.accept()
            except OSError:  # closed; or too many open files for a moment
                time.sleep(0.01)
                continue
            threading.Thread(target=self._answer, args=(peer, plain_address(str(address[0]))), daemon=True).start()

    def _answer(self, peer: socket.socket, seen: str) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(_PATIENCE_S)
            greeting = b""
            while len(greeting) < PAYLOAD:
                data = peer.recv(PAYLOAD - len(greeting))
                greeting += data
                if not data or not greeting.startswith(self._nonce.encode()[: len(greeting)]):
                    return
            peer.sendall(json.dumps({"name": self._name, "seen": seen}).encode().ljust(PAYLOAD))
            peer.recv(1)  # whoever closes first keeps the port busy for a minute: let it be the other one


def listen(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Open the listener; tell of this host's network. `head`: choose or take (`master_port`) a port for the master."""
    close(host, request, body)
    resolving = _Resolving(socket.gethostname())
    nonce, name = str(request["nonce"]), str(request["name"])
    listener = host.hold(Listener(nonce, name, 0))
    master_port = None
    if request.get("head"):
        wanted = request.get("master_port")
        master_port = host.hold(_listen_as_master(nonce, name, wanted)).port
    return {
        "machine": _machine(),
        "links": [link.to_json() for link in read_links()],
        "own_addresses": resolving.result(),
        "port": listener.port,
        "master_port": master_port,
        "firewall": _firewall(),
    }


def probe(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Try the ways to other hosts."""
    targets = [Target(**target) for target in request["targets"]]
    return {"ways": [way.facts() for way in try_ways(str(request["nonce"]), targets, float(request["within_s"]))]}


def close(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Close what listens."""
    for thing in [thing for thing in host.held if isinstance(thing, Listener)]:
        host.let_go(thing)
    return {}


OPERATIONS = {"net.listen": listen, "net.probe": probe, "net.close": close}


def _listen_as_master(nonce: str, name: str, wanted: int | None) -> Listener:
    """Listen where the master will, or in the range where it will look for a port."""
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
    """Tell this machine from others: two containers are two, since each has a network of its own."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return platform.node()


def _firewall() -> str | None:
    """Name the firewall that is switched on, as far as anybody may see it."""
    with contextlib.suppress(OSError):
        if "\nENABLED=yes" in "\n" + Path("/etc/ufw/ufw.conf").read_text():
            return "ufw"
    return "firewalld" if Path("/sys/fs/cgroup/system.slice/firewalld.service").exists() else None


class _Resolving:
    """Asks what a name means, in a thread: a name server that is gone may take half a minute."""

    def __init__(self, name: str) -> None:
        self._answer: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=self._resolve, args=(name,), daemon=True).start()

    def result(self) -> list[str] | None:
        try:
            return self._answer.get(timeout=_RESOLVE_S)
        except queue.Empty:
            return None

    def _resolve(self, name: str) -> None:
        found: list[str] = []
        with contextlib.suppress(OSError):
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        self._answer.put(list(dict.fromkeys(found)))

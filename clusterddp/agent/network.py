"""The network of this host: its interfaces, a listener that sends this host's name, and probes of other hosts.

net.listen   opens a listener; returns interfaces, ports, the addresses of this host's own name
net.probe    connects to the listeners of other hosts, all at once; returns each result, and names that resolve slowly
net.close    closes the listener
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from clusterddp.agent.probe import Listener, Target, probe_all
from clusterddp.agent.types import Body, Host
from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import read_links, resolve
from clusterddp.network.port import walk_ports

_RESOLVE_S = 1.0
_PORTS = 64


def listen(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Open the listener; return this host's network. `head`: listen at a port for the master, too."""
    close(host, request, body)
    resolving = _Resolving(resolve, socket.gethostname())
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
    """Probe other hosts; return also which of `names`, which are addresses, are slow to resolve."""
    targets = [Target(**target) for target in request["targets"]]
    resolving = {str(address): _Resolving(_name_of, str(address)) for address in request["names"]}
    probes = probe_all(str(request["nonce"]), targets, float(request["within_s"]))
    slow = [address for address, name in resolving.items() if name.result() is None]
    return {"probes": [each.facts() for each in probes], "slow_names": slow}


def close(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Close the listeners."""
    host.release_all(Listener)
    return {}


OPERATIONS = {"net.listen": listen, "net.probe": probe, "net.close": close}


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


def _name_of(address: str) -> list[str]:
    """Resolve an address as torch does, for its log, whenever a rank connects to the master.

    By gethostbyaddr: getnameinfo of Python 3.11.2 blocks other threads, such as the listener's, while it waits.
    """
    return [socket.gethostbyaddr(address)[0]]

"""The port at which rank 0 is met: listened at for the muster, and held until torch listens there."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.dist.launched import Launched
from clusterddp.dist.muster_guest import knock
from clusterddp.dist.muster_words import Hello, refusal

IN_USE_S = 10.0
"""How long a port may be somebody else's: of an earlier start that is just ending."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where rank 0 listens; `holder` keeps the port for torch when the muster is over (see port.py)."""

    listener: socket.socket
    holder: socket.socket
    port: int

    def keep_over_exec(self) -> None:
        """Let the holder live on in what this process becomes."""
        self.holder.set_inheritable(True)


def open_door(launched: Launched, own: Hello, ports: Sequence[int], deadline: float) -> Door:
    """Listen on the first port that is free.

    Raises: PreflightError: none is, or the real rank 0 listens there.
    """
    until = min(deadline, time.monotonic() + IN_USE_S)
    while True:
        for port in ports:
            door = _try_port(port, own)
            if door is not None:
                return door
        if len(ports) == 1:
            knock("127.0.0.1", ports[0], own, until)  # raises, if it is another rank 0 that has the port
        if time.monotonic() >= until:
            which = launched.told.get("MASTER_PORT")
            named = f"port {ports[0]} (from {which.origin})" if which and len(ports) == 1 else f"ports {list(ports)}"
            raise refusal(f"{own.name}: {named} is in use by another program", "MASTER_PORT names another one")
        time.sleep(0.2)


def _try_port(port: int, own: Hello) -> Door | None:
    """Hold a port and listen on it, IPv6 and IPv4 alike; None: somebody has it."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(2):
            sockets.append(_bind(port))
        sockets[1].listen(1024)
        sockets[1].setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno != errno.EADDRINUSE:
            raise refusal(f"{own.name}: port {port} cannot be listened on: {error.strerror}") from error
        return None
    return Door(listener=sockets[1], holder=sockets[0], port=port)


def _bind(port: int) -> socket.socket:
    family, everywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((everywhere, port))
    except OSError:
        sock.close()
        raise
    return sock

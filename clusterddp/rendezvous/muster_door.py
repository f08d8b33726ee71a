"""The port at which rank 0 is met: listened at for the muster, and kept for torch's store afterwards."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.network.port import bind_port
from clusterddp.ranks.environment import LISTENER_FD
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.muster_guest import knock
from clusterddp.rendezvous.muster_words import Hello, refusal

IN_USE_S = 10.0
"""How long a port may be somebody else's: of an earlier start that is just ending."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where rank 0 listens; `holder` keeps the port, without listening, for who binds it afterwards (see port.py)."""

    listener: socket.socket
    holder: socket.socket
    port: int

    def keep_over_exec(self, *, listening: bool) -> dict[str, str]:
        """Let the port be held by what this process becomes; return the variables that tell it.

        `listening`: its store takes over the listener (node/store_listener.py); else it binds the port itself.
        """
        kept, closed = (self.listener, self.holder) if listening else (self.holder, self.listener)
        closed.close()
        kept.set_inheritable(True)
        return {LISTENER_FD: str(kept.fileno())} if listening else {}


def open_door(launched: Launched, own: Hello, ports: Sequence[int], deadline: float, key: str) -> Door:
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
            knock("127.0.0.1", ports[0], own, until, key)  # raises, if it is another rank 0 that has the port
        if time.monotonic() >= until:
            which = launched.told.get("MASTER_PORT")
            named = f"port {ports[0]} (from {which.origin})" if which and len(ports) == 1 else f"ports {list(ports)}"
            raise refusal(f"{own.name}: {named} is in use by another program", "MASTER_PORT names another one")
        time.sleep(0.2)


def _try_port(port: int, own: Hello) -> Door | None:
    """Hold a port and listen on it, IPv6 and IPv4 alike; None: somebody has it."""
    sockets: list[socket.socket] = []
    try:
        for listening in (False, True):
            sockets.append(bind_port(port, shared=True, listening=listening))
        sockets[1].setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno != errno.EADDRINUSE:
            raise refusal(f"{own.name}: port {port} cannot be listened on: {error.strerror}") from error
        return None
    return Door(listener=sockets[1], holder=sockets[0], port=port)

"""The rendezvous of ranks that another launcher starts: over TCP, before torch is imported.

When the gang is not complete or does not match, every rank that has connected ends with the same error, which names the
machine and the value, instead of a hang in init_process_group. Rank 0 is the server (rank_server.py), every other rank
a client (rank_client.py). With a key both sides prove that they know it before they send data of the run. Without one
no process is authenticated: the rendezvous then detects mistakes only, and torch's own store does no more.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import PreflightError
from clusterddp.network.interface import LOOPBACK_ADDRESS
from clusterddp.network.port import bind_port, reserve_port, walk_ports
from clusterddp.ranks.environment import LISTENER_FD
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.rank_client import ask_rank_0, meet_rank_0
from clusterddp.rendezvous.rank_messages import Decide, RankHello, RanksMet
from clusterddp.rendezvous.rank_server import serve_ranks

DEFAULT_TIMEOUT_S = 120.0
"""How long ranks wait for each other where the spec does not say (network.start_timeout)."""
IN_USE_S = 10.0
"""How long to retry while a port is in use: an earlier start may just be ending."""
_PORTS = 8
"""How many ports rank 0 tries when none is given."""


@dataclass(frozen=True, slots=True)
class MasterPort:
    """The port on which rank 0 listens: for this rendezvous, then for torch's store.

    `holder` reserves the port, without listening, for a program that binds it later (network/port.py).
    """

    listener: socket.socket
    holder: socket.socket

    def keep_over_exec(self, *, listening: bool) -> dict[str, str]:
        """Keep the port open in the program that this process executes; return the variables for it.

        `listening`: its store takes over the listener (node/store_listener.py); otherwise it binds the port itself.
        """
        kept, closed = (self.listener, self.holder) if listening else (self.holder, self.listener)
        closed.close()
        kept.set_inheritable(True)
        return {LISTENER_FD: str(kept.fileno())} if listening else {}


def meet_ranks(
    launched: Launched, own: RankHello, decide: Decide, timeout_s: float, key: str = ""
) -> tuple[dict[str, Any], MasterPort | None]:
    """Meet the other ranks; return rank 0's decision, and on rank 0 the port, which is still open.

    `key`: the key that all ranks have; empty: none.

    Raises: PreflightError: the gang is not complete or does not match; all connected ranks raise the same error.
    """
    deadline = time.monotonic() + timeout_s
    if launched.world_size == 1:
        holder, port = reserve_port(own.nonce)
        holder.close()
        return decide(RanksMet(hellos=(own,), reached=LOOPBACK_ADDRESS, port=launched.master_port or port)), None
    ports = _ports(launched)
    if launched.rank:
        return meet_rank_0(launched, own, ports, deadline=deadline, timeout_s=timeout_s, key=key), None
    master = _open_master_port(launched, own, ports, deadline, key)
    decided = serve_ranks(master.listener, launched, own, decide, deadline=deadline, timeout_s=timeout_s, key=key)
    return decided, master


def _ports(launched: Launched) -> list[int]:
    """List the ports on which rank 0 may listen: the master port, unless torchrun's agent listens there."""
    if launched.master_port is not None and not launched.port_is_taken:
        return [launched.master_port]
    return walk_ports(f"{launched.identity}:{launched.start}", _PORTS)


def _open_master_port(
    launched: Launched, own: RankHello, ports: Sequence[int], deadline: float, key: str
) -> MasterPort:
    """Listen on the first port that is free.

    Raises: PreflightError: no port is free, or another rank 0 listens there.
    """
    until = min(deadline, time.monotonic() + IN_USE_S)
    while True:
        for port in ports:
            master = _try_port(port, own)
            if master is not None:
                return master
        if len(ports) == 1:  # raises, if it is another rank 0 that has the port
            ask_rank_0([LOOPBACK_ADDRESS], own, ports, min(until, time.monotonic() + 1.0), key)
        if time.monotonic() >= until:
            which = launched.variables.get("MASTER_PORT")
            named = f"port {ports[0]} (from {which.origin})" if which and len(ports) == 1 else f"ports {list(ports)}"
            raise PreflightError(
                f"{own.name}: {named} is in use by another program", hint="MASTER_PORT names another one"
            )
        time.sleep(0.2)


def _try_port(port: int, own: RankHello) -> MasterPort | None:
    """Reserve a port and listen on it, with IPv6 and IPv4; None: another process uses it."""
    sockets: list[socket.socket] = []
    try:
        for listening in (False, True):
            sockets.append(bind_port(port, shared=True, listening=listening))
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno != errno.EADDRINUSE:
            raise PreflightError(f"{own.name}: port {port} cannot be listened on: {error.strerror}") from error
        return None
    return MasterPort(listener=sockets[1], holder=sockets[0])

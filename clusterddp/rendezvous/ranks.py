"""The rendezvous of ranks that another launcher starts: over TCP, before torch is imported.

Whatever keeps a gang from coming together ends every rank that came, with one error that names the machine and the
value, instead of a hang in init_process_group. Rank 0 is the server (rank_server.py), every other rank a client
(rank_client.py). With a key both sides prove that they know it before anything of the run is sent. Without one no
process is authenticated: the rendezvous then guards against mistakes, as torch's own store behind it does.
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
"""How long a port may be in use: by an earlier start that is just ending."""
_PORTS = 8
"""How many ports rank 0 tries where none is given."""


@dataclass(frozen=True, slots=True)
class MasterPort:
    """Where rank 0 listens: for the rendezvous, and afterwards for torch's store.

    `holder` keeps the port, without listening, for the program that binds it afterwards (network/port.py).
    """

    listener: socket.socket
    holder: socket.socket

    def keep_over_exec(self, *, listening: bool) -> dict[str, str]:
        """Let the port be held by the program that this process becomes; return the variables that pass it on.

        `listening`: its store takes over the listener (node/store_listener.py); else it binds the port itself.
        """
        kept, closed = (self.listener, self.holder) if listening else (self.holder, self.listener)
        closed.close()
        kept.set_inheritable(True)
        return {LISTENER_FD: str(kept.fileno())} if listening else {}


def meet_ranks(
    launched: Launched, own: RankHello, decide: Decide, timeout_s: float, key: str = ""
) -> tuple[dict[str, Any], MasterPort | None]:
    """Meet the other ranks; return what rank 0 has decided, and on rank 0 the port, which it still holds.

    `key`: what all ranks have to know; empty: nothing.

    Raises: PreflightError: the gang does not come together; all ranks that came receive the same error.
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
    """List where rank 0 may listen: at the master's port itself, unless torchrun's agent does."""
    if launched.master_port is not None and not launched.port_is_taken:
        return [launched.master_port]
    return walk_ports(f"{launched.identity}:{launched.start}", _PORTS)


def _open_master_port(
    launched: Launched, own: RankHello, ports: Sequence[int], deadline: float, key: str
) -> MasterPort:
    """Listen on the first port that is free.

    Raises: PreflightError: none is, or another rank 0 listens there.
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
    """Hold a port and listen on it, IPv6 and IPv4 alike; None: another process has it."""
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

"""The muster: all ranks meet over TCP before torch is imported, and none goes on until rank 0 has seen them all.

Whatever keeps a gang from coming together ends every rank that came, with one error that names the machine and the
value, instead of a hang in init_process_group. Rank 0 listens; what each side does is in muster_host.py and
muster_guest.py. With a key (signed.py) both sides prove that they know it before anything of the run is sent. Without
one nobody is authenticated: the muster then guards against mistakes, as torch's own store behind it does.
"""

from __future__ import annotations

import time
from typing import Any

from clusterddp.network.interface import LOOPBACK_ADDRESS
from clusterddp.network.port import reserve_port, walk_ports
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.muster_door import Door, open_door
from clusterddp.rendezvous.muster_guest import attend
from clusterddp.rendezvous.muster_host import hold_muster
from clusterddp.rendezvous.muster_words import Decide, Hello, Seen

DEFAULT_TIMEOUT_S = 120.0
"""How long ranks wait for each other where the spec does not say (network.start_timeout)."""
_PORTS = 8
"""How many ports rank 0 tries where none is given."""


def muster(
    launched: Launched, own: Hello, decide: Decide, timeout_s: float, key: str = ""
) -> tuple[dict[str, Any], Door | None]:
    """Meet the other ranks; return what rank 0 has decided, and on rank 0 the door, which still holds its port.

    `key`: what all ranks have to know; empty: nothing.

    Raises: PreflightError: the gang does not come together; all who came are told the same.
    """
    deadline = time.monotonic() + timeout_s
    if launched.world_size == 1:
        holder, port = reserve_port(own.nonce)
        holder.close()
        return decide(Seen(hellos=(own,), reached=LOOPBACK_ADDRESS, port=launched.master_port or port)), None
    ports = _ports(launched)
    if launched.rank == 0:
        door = open_door(launched, own, ports, deadline, key)
        return hold_muster(door, launched, own, decide, deadline=deadline, timeout_s=timeout_s, key=key), door
    return attend(launched, own, ports, deadline=deadline, timeout_s=timeout_s, key=key), None


def _ports(launched: Launched) -> list[int]:
    """List where rank 0 may listen: at the master's port itself, unless torchrun's agent does."""
    if launched.master_port is not None and not launched.port_is_taken:
        return [launched.master_port]
    return walk_ports(f"{launched.identity}:{launched.start}", _PORTS)

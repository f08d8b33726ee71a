"""Where the ranks of an attempt meet: the master's address and its port, which the head chooses and holds."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import LOOPBACK_ADDRESS, is_loopback, named_interface
from clusterddp.network.port import LAST_OF_ALL, hold_port, reserve_port
from clusterddp.rendezvous.connection import Message
from clusterddp.run.gang import Gang


class Rendezvous:
    """The master of one attempt after the other."""

    def __init__(self, gang: Gang, seed: str) -> None:
        self.address = gang.master_addr
        self.port = 0
        self.agent_port: int | None = None
        """Where torchrun's agents meet, from the first attempt to the last; None: torchrun starts no ranks."""
        self._gang = gang
        self._seed = seed
        self._holder: socket.socket | None = None
        self._agents_holder: socket.socket | None = None

    def open(self, attempt: int, reached: Mapping[int, str]) -> None:
        """Choose for an attempt; `reached` is the address at which each node has reached the head, by node rank.

        Raises: ClusterddpError: no port is free, or the interface that the user has named is not there.
        """
        if not self._gang.master_addr:
            self.address = choose_address(self._gang, reached)
        if self._gang.master_port is None:
            self._holder, self.port = reserve_port(f"{self._seed}:{attempt}", listening=self._listens)
        else:
            self.port = self._gang.master_port
            self._holder = hold_port(self.port, listening=self._listens)
        if self._gang.start == "torchrun" and self.agent_port is None:
            self._open_for_agents()

    def start_order(self, attempt: int, restart: int, networks: object) -> Message:
        """Return the order to start the ranks of an attempt; node 0's also needs `listeners`."""
        return {
            "kind": "start",
            "attempt": attempt,
            "restart": restart,
            "master_addr": self.address,
            "master_port": self.port,
            "agent_port": self.agent_port,
            "networks": networks,
        }

    @property
    def listeners(self) -> Message:
        """The descriptors that node 0 passes on, to rank 0 and to its torchrun agent."""
        return {"listener": self.listener, "agents_listener": self.agents_listener}

    @property
    def listener(self) -> int | None:
        """The socket that listens at the port, for rank 0 to take over; None: rank 0 binds the port itself."""
        return self._holder.fileno() if self._listens and self._holder is not None else None

    @property
    def agents_listener(self) -> int | None:
        """The one at the agents' port, for node 0's agent."""
        return self._agents_holder.fileno() if self._agents_holder is not None else None

    @property
    def _listens(self) -> bool:
        return self._gang.world_size > 1 and self._gang.entry.takes_listener

    def close(self) -> None:
        """Let the port go."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def _open_for_agents(self) -> None:
        if self._gang.master_port is None:
            self._agents_holder, self.agent_port = reserve_port(f"{self._seed}:torchrun", listening=True)
        else:  # beside it, for a firewall that lets the one through is often told of its neighbours, too
            neighbour = self._gang.master_port + (1 if self._gang.master_port < LAST_OF_ALL else -1)
            self._agents_holder, self.agent_port = hold_port(neighbour, listening=True), neighbour


def choose_address(gang: Gang, reached: Mapping[int, str]) -> str:
    """Choose the address that most nodes have reached the head at; of equal ones that of the lowest node.

    Raises: ClusterddpError: the interface that the user has named is not there.
    """
    if len({node.host for node in gang.nodes}) == 1:
        return LOOPBACK_ADDRESS
    if gang.interface:
        return named_interface(gang.interface).address
    addresses = [reached[node_rank] for node_rank in sorted(reached) if not is_loopback(reached[node_rank])]
    if not addresses:
        raise ClusterddpError("no node has reached the head at an address of its own")
    return Counter(addresses).most_common(1)[0][0]

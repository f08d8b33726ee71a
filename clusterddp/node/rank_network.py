"""The network of an attempt's ranks: the master's address and port, and each node's interface towards it.

The head chooses the address and holds the port; each node finds the interface of its host that reaches the address.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import (
    LOOPBACK_ADDRESS,
    Link,
    interface_towards,
    is_loopback,
    loopback,
    named_interface,
    read_links,
)
from clusterddp.network.port import hold_port, reserve_port
from clusterddp.network.rendezvous.connection import Message
from clusterddp.network.socket_links import names_in
from clusterddp.run.gang import Gang, Node


class Rendezvous:
    """The master's address and port, for one attempt after the other."""

    def __init__(self, gang: Gang, seed: str) -> None:
        self.address = gang.master_addr
        self.port = 0
        self.gang = gang
        """That of the attempt."""
        self._seed = seed
        self._holder: socket.socket | None = None

    def open(self, attempt: int, reached: Mapping[int, str]) -> None:
        """Choose address and port for an attempt; `reached`: at which address each node has reached the head.

        Raises: ClusterddpError: no port is free, or this host lacks the interface that the spec names.
        """
        if not self.gang.master_addr:
            self.address = choose_address(self.gang, reached)
        if self.gang.master_port is None:
            self._holder, self.port = reserve_port(f"{self._seed}:{attempt}", listening=self._listens)
        else:
            self.port = self.gang.master_port
            self._holder = hold_port(self.port, listening=self._listens)

    def start_order(self, attempt: int, restart: int, networks: object) -> Message:
        """Return the order to start the ranks of an attempt; node 0's also needs `listener`."""
        return {
            "kind": "start",
            "attempt": attempt,
            "restart": restart,
            "master_addr": self.address,
            "master_port": self.port,
            "networks": networks,
        }

    @property
    def listener(self) -> int | None:
        """The socket that listens at the port, for rank 0 to take over; None: rank 0 binds the port itself."""
        return self._holder.fileno() if self._listens and self._holder is not None else None

    @property
    def _listens(self) -> bool:
        return self.gang.world_size > 1 and self.gang.entry.takes_listener

    def close(self) -> None:
        """Release the port."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def choose_address(gang: Gang, reached: Mapping[int, str]) -> str:
    """Choose the address at which most nodes have reached the head; of equal ones that of the lowest node.

    Raises: ClusterddpError: this host lacks the interface that the spec names.
    """
    if len({node.host for node in gang.nodes}) == 1:
        return LOOPBACK_ADDRESS
    if gang.interface:
        return named_interface(gang.interface).address
    addresses = [reached[node_rank] for node_rank in sorted(reached) if not is_loopback(reached[node_rank])]
    if all(node.host.startswith("127.") for node in gang.nodes):  # nodes that a local run only pretends to have
        return LOOPBACK_ADDRESS
    if not addresses:
        raise ClusterddpError("no node has reached node 0's supervisor at an address of its own")
    return Counter(addresses).most_common(1)[0][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNetwork:
    """The network of one node's ranks."""

    gang: Gang
    """With the master address, and with the interface that is set for this node's ranks; None: none is set."""
    interface: str | None
    address: str | None
    why: str
    nccl_interfaces: tuple[str, ...] = ()
    """Those that NCCL's sockets use instead."""

    def facts(self) -> Message:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "gang"}


def find_rank_network(gang: Gang, node: Node, order: Message, links: Iterable[Link] | None = None) -> RankNetwork:
    """Find this node's interface for an order to start; a plan with a master address also has the interface.

    NCCL's sockets use faster networks where the order names some. `links`: those of this host; None: read them.
    Raises: ClusterddpError: this host has no such interface, or no route to the master address.
    """
    if order.get("networks"):
        faster = names_in(order["networks"], read_links() if links is None else links)
        node = dataclasses.replace(node, nccl_interfaces=faster)
        gang = dataclasses.replace(
            gang, nodes=tuple(node if each.node_rank == node.node_rank else each for each in gang.nodes)
        )
    if gang.master_addr:
        interface = node.interface or gang.interface
        return RankNetwork(
            gang=dataclasses.replace(gang, master_addr=str(order["master_addr"])),
            interface=interface,
            address=node.address,
            why=node.why or "the plan",
            nccl_interfaces=node.nccl_interfaces,
        )
    master_addr = str(order["master_addr"])
    if is_loopback(master_addr):
        # Ranks on one host find each other without a setting; the interface is only recorded.
        here = loopback()
        setting = None
    else:
        here = named_interface(gang.interface) if gang.interface else interface_towards(master_addr)
        setting = here.name
    gang = dataclasses.replace(gang, master_addr=master_addr, interface=setting)
    return RankNetwork(
        gang=gang, interface=here.name, address=here.address, why=here.why, nccl_interfaces=node.nccl_interfaces
    )

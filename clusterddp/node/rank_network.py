"""The network of a node's ranks: the master address, and the interface of this host that reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from clusterddp.network.interface import Link, interface_towards, is_loopback, loopback, named_interface, read_links
from clusterddp.network.socket_links import names_in
from clusterddp.rendezvous.connection import Message
from clusterddp.run.gang import Gang, Node


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNetwork:
    """What one node knows of the network once the gang has met."""

    gang: Gang
    """With the master address, and with the interface that this node's ranks receive; None: none."""
    interface: str | None
    address: str | None
    why: str
    nccl_interfaces: tuple[str, ...] = ()
    """What NCCL's sockets take in its place."""

    def facts(self) -> Message:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "gang"}


def find_rank_network(gang: Gang, node: Node, order: Message, links: Iterable[Link] | None = None) -> RankNetwork:
    """Find this node's interface for an order to start; a plan that names the master address has settled it.

    NCCL's sockets take faster networks where the order names some. `links`: this host's, by default as they are.
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
            gang=gang,
            interface=interface,
            address=node.address,
            why=node.why or "the plan",
            nccl_interfaces=node.nccl_interfaces,
        )
    master_addr = str(order["master_addr"])
    if is_loopback(master_addr):
        # Ranks on one host find each other by themselves; only the record says how.
        here = loopback()
        told = None
    else:
        here = named_interface(gang.interface) if gang.interface else interface_towards(master_addr)
        told = here.name
    gang = dataclasses.replace(gang, master_addr=master_addr, interface=told)
    return RankNetwork(
        gang=gang, interface=here.name, address=here.address, why=here.why, nccl_interfaces=node.nccl_interfaces
    )

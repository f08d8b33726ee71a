"""Read NCCL's transport from its log: the network, its devices, the links between ranks.

Source of the lines: NCCL 2.10 to 2.29, src/init.cc, src/transport/*.cc.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from clusterddp.wire import Written

SOCKETS = "Socket"
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_DEVICES = re.compile(r"NCCL INFO NET/(?:IB|Socket) : Using\s+(\[0\].*?)\s*(?:\[RO\])?\s*(?:;.*)?$", re.MULTILINE)
_LINK = re.compile(r"NCCL INFO Channel .* via (NET|P2P|SHM)/(.+?)\s*$", re.MULTILINE)
_MISSING = re.compile(
    r"NCCL (?:INFO|WARN) (NET/IB : No device found\.|Failed to open libibverbs\S*|.*ibv_\w+.*failed.*)"
)
_ADDRESS = re.compile(r"^(\S+?):\S*<\d+>$")
_MAX_LINE = 4_000
"""NCCL writes shorter lines; a longer one, of a program that writes there, too, would take long to search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport(Written):
    """How NCCL sends from one rank, or from the ranks of a node."""

    network: str
    """NCCL's own name of it: IB (RoCE, too), Socket, or that of a plugin."""
    devices: tuple[str, ...] = ()
    """Of the network: mlx5_0:1/IB, or the interfaces of sockets."""
    links: tuple[str, ...] = ()
    """Kinds of links to other ranks that were opened so far: NET/IB/GDRDMA, P2P/CUMEM, SHM/direct."""
    complaint: str = ""
    """The line of NCCL's log that explains why there is no InfiniBand."""


def read_transport(log: str) -> Transport | None:
    """Read one rank's log as far as it is written; None: NCCL has not chosen a network yet."""
    log = "\n".join(line for line in log.split("\n") if len(line) <= _MAX_LINE)
    networks = _NETWORK.findall(log)
    if not networks:
        return None
    found = _DEVICES.findall(log)
    devices = re.findall(r"\[\d+\](\S+)", found[-1]) if found else []
    complaint = _MISSING.search(log)
    return Transport(
        network=networks[-1],
        devices=tuple(_ADDRESS.sub(r"\1", device) for device in devices),
        links=tuple(sorted({_kind(*match) for match in _LINK.findall(log)})),
        complaint=complaint[1] if complaint and networks[-1] == SOCKETS else "",
    )


def merge(transports: list[Transport]) -> Transport:
    """Merge the transports of a node's ranks; the slowest network is the node's."""
    of_sockets = [each for each in transports if each.network == SOCKETS]
    first = (of_sockets or transports)[0]
    return dataclasses.replace(first, links=tuple(sorted({link for each in transports for link in each.links})))


def _kind(way: str, rest: str) -> str:
    """Return the kind of a link, without its device number and buffers."""
    if way == "NET":
        name = rest.partition("/")[0]
        return f"NET/{name}/GDRDMA" if "/GDRDMA" in rest else f"NET/{name}"
    return f"{way}/{rest.partition('/')[0]}"

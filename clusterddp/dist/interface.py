"""Which network interface carries a node's traffic, and its address: found by the route, or named by the user."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from clusterddp.dist.devices import loopback_interface
from clusterddp.errors import ClusterddpError

LOOPBACK_ADDRESS = "127.0.0.1"
_ANY_PORT = 9
"""For asking the kernel for a route; nothing is sent there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One interface of this host, with the address that others reach it at, and why it was chosen."""

    name: str | None
    """None: the address belongs to no interface that this process can see."""
    address: str
    why: str


def loopback() -> Interface:
    """Return the interface of a gang that does not leave its host."""
    return Interface(name=loopback_interface(), address=LOOPBACK_ADDRESS, why="all ranks are on one host")


def interface_towards(address: str) -> Interface:
    """Return the interface by which this host sends to `address`, or that has it when the address is its own.

    Raises: ClusterddpError: there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))  # a datagram socket only chooses the route
            source = str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterddpError(f"{socket.gethostname()} has no route to {address}: {error.strerror}") from error
    # Towards one of its own addresses the kernel goes from that very address.
    why = "it has the master address" if source == address else f"the route to {address} goes out there"
    return Interface(name=_owner(source), address=source, why=why)


def named_interface(name: str) -> Interface:
    """Return the interface that the user has named.

    Raises: ClusterddpError: this host has none of that name, or it has no address.
    """
    addresses = _addresses()
    host = socket.gethostname()
    if name not in addresses:
        raise ClusterddpError(
            f"{host} has no network interface {name!r}, it has {', '.join(sorted(addresses))}",
            hint="network.interface: auto chooses on each host the one that reaches the others",
        )
    usable = sorted(addresses[name], key=lambda address: ":" in address)
    if not usable:
        raise ClusterddpError(f"{host}: network interface {name!r} has no address")
    return Interface(name=name, address=usable[0], why="network.interface names it")


def is_loopback(address: str) -> bool:
    """Say whether an address means this very host, 127.0.1.1 included."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def plain_address(address: str) -> str:
    """Write an IPv4 address that came over an IPv6 socket (`::ffff:10.0.0.1`) as people do."""
    return address.removeprefix("::ffff:") if "." in address else address


def _owner(address: str) -> str | None:
    return next((name for name, addresses in _addresses().items() if address in addresses), None)


def _addresses() -> dict[str, list[str]]:
    return {name: list(_usable(entries)) for name, entries in psutil.net_if_addrs().items()}


def _usable(entries: Iterable[object]) -> Iterable[str]:
    for entry in entries:
        family, address = getattr(entry, "family", None), str(getattr(entry, "address", ""))
        if family == socket.AF_INET or (family == socket.AF_INET6 and not address.startswith("fe80")):
            yield address.partition("%")[0]

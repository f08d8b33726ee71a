"""The network interfaces of this host, and the one for a node's traffic: found by the route, or named by the user.

They are read from the Linux kernel, by netlink and ethtool. /sys/class/net is not used: in a container it may show the
interfaces of another network namespace.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.system.devices import loopback_interface
from clusterddp.system.netlink import ask_kernel, attributes_of
from clusterddp.wire import Written

_GET_LINKS, _GET_ADDRESSES = 18, 22
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_LINK_NAME, _LINK_MTU, _LINK_INFO, _INFO_KIND = 3, 4, 18, 1
_ADDRESS_PEER, _ADDRESS_OWN, _ADDRESS_FLAGS = 1, 2, 8
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_INFINIBAND = 32  # ARPHRD_INFINIBAND
_TEMPORARY, _DUPLICATE, _DEPRECATED, _TENTATIVE = 0x01, 0x08, 0x20, 0x40
_LINK_SCOPE = 253
_ETHTOOL, _ETHTOOL_SETTINGS, _WIRELESS_NAME = 0x8946, 0x1, 0x8B01
_UNKNOWN_SPEEDS = {0, 0xFFFF, 0xFFFFFFFF}


def read_addresses() -> Iterator[tuple[int, str, int, bool]]:
    """List the addresses: number of the interface, address, prefix length, and whether it is permanent.

    Link-local ones (fe80) are left out.
    Raises: OSError.
    """
    for body in ask_kernel(socket.NETLINK_ROUTE, _GET_ADDRESSES, _ADDRESS.pack(0, 0, 0, 0, 0)):
        family, prefix, flags, scope, index = _ADDRESS.unpack_from(body)
        attributes = attributes_of(body[_ADDRESS.size :])
        packed = attributes.get(_ADDRESS_OWN) or attributes.get(_ADDRESS_PEER)
        if family not in (socket.AF_INET, socket.AF_INET6) or packed is None:
            continue
        if _ADDRESS_FLAGS in attributes:
            flags = struct.unpack("=I", attributes[_ADDRESS_FLAGS])[0]
        if family == socket.AF_INET:
            yield index, socket.inet_ntop(family, packed), prefix, True
        elif scope != _LINK_SCOPE:
            temporary = flags & (_TEMPORARY | _DUPLICATE | _DEPRECATED | _TENTATIVE)
            yield index, socket.inet_ntop(family, packed), prefix, not temporary


def read_speed(name: str) -> int | None:
    """Return the speed of an interface in Mbit/s; None: its driver reports none, as most virtual ones."""
    settings = array.array("B", struct.pack("=I", _ETHTOOL_SETTINGS) + bytes(40))
    if _ask_device(_ETHTOOL, name, struct.pack("P", settings.buffer_info()[0])) is None:
        return None
    low, high = struct.unpack_from("=H", settings, 12)[0], struct.unpack_from("=H", settings, 28)[0]
    speed = int(low | high << 16)
    return None if speed in _UNKNOWN_SPEEDS else speed


def _ask_device(request: int, name: str, argument: bytes) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return fcntl.ioctl(asking, request, struct.pack("16s24s", name.encode(), argument))
        except OSError:
            return None


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


LOOPBACK_ADDRESS = "127.0.0.1"
_ANY_PORT = 9
"""For asking the kernel for a route; nothing is sent there."""
_OF_CONTAINERS = re.compile(
    r"(docker|br-[0-9a-f]{12}$|veth|virbr|vnet|cni|flannel|cali|cilium|weave|podman|lxc|lxd|incusbr|kube)"
)
"""Names of interfaces between the containers and virtual machines of one host."""
_TUNNELS = {"tun", "wireguard", "ipip", "gre", "gretap", "sit", "vti", "ip6tnl", "ip6gre", "vxlan", "dummy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """An interface of this host, the address at which others reach it, and why it was chosen."""

    name: str | None
    """None: this process sees no interface with the address."""
    address: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAddress:
    """An address of a link, and the prefix length of its subnet."""

    address: str
    prefix: int
    lasting: bool = True
    """False: a temporary IPv6 address."""

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address

    @property
    def subnet(self) -> str:
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Written):
    """A network interface, usable for a gang or not."""

    name: str
    kind: str = ""
    """Its kind in Linux: bridge, veth, bond, tun, wireguard, ...; empty for a network card."""
    mtu: int = 1500
    speed_mbit_per_s: int | None = None
    """None: the driver reports none."""
    up: bool = True
    """It is switched on, and its cable, if any, is connected."""
    loopback: bool = False
    wireless: bool = False
    infiniband: bool = False
    """It carries IP over InfiniBand."""
    addresses: tuple[LinkAddress, ...] = ()
    """Without link-local ones (fe80)."""

    @property
    def of_containers(self) -> bool:
        return _OF_CONTAINERS.match(self.name) is not None

    @property
    def is_tunnel(self) -> bool:
        return self.kind in _TUNNELS

    @property
    def leads_out(self) -> bool:
        """It may carry a gang: neither the loopback nor one between containers, and it is up."""
        return self.up and not (self.loopback or self.of_containers)

    @property
    def assumed_mbit_per_s(self) -> int:
        """Its speed, or a default for its kind where the driver reports none."""
        return self.speed_mbit_per_s or (10_000 if self.infiniband else 1000)


def read_links() -> tuple[Link, ...]:
    """List this host's network interfaces, in the kernel's order.

    Raises: OSError.
    """
    return tuple(_read_links())


def is_cut_off(name: str | None) -> bool:
    """Return whether an interface of this host is switched off, or its cable unplugged; False when that is unknown."""
    try:
        return any(link.name == name and not link.up for link in read_links())
    except OSError:
        return False


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
    # To one of its own addresses the kernel sends from the same address.
    owner = next((name for name, addresses in _addresses().items() if source in addresses), None)
    why = "it has the master address" if source == address else f"the route to {address} goes out there"
    return Interface(name=owner, address=source, why=why)


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
    """Return whether an address is a loopback address, such as 127.0.1.1."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve(name: str) -> tuple[str, ...]:
    """Resolve the addresses of a host on this machine, IPv4 first; none when the name is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    ordered = sorted(found, key=lambda entry: entry[0] == socket.AF_INET6)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of a host, those of IPv4 first; none: its name is not known here."""
    return resolve(host_name(host))


def host_name(host: str) -> str:
    """Return a host without the user that SSH would log in as."""
    return host.rpartition("@")[2]


def plain_address(address: str) -> str:
    """Return `10.0.0.1` for an IPv4 address of an IPv6 socket (`::ffff:10.0.0.1`)."""
    return address.removeprefix("::ffff:") if "." in address else address


def _addresses() -> dict[str, list[str]]:
    return {link.name: [entry.address for entry in link.addresses] for link in read_links()}


def _read_links() -> Iterator[Link]:
    addresses: dict[int, list[LinkAddress]] = {}
    for index, address, prefix, lasting in read_addresses():
        addresses.setdefault(index, []).append(LinkAddress(address=address, prefix=prefix, lasting=lasting))
    for body in ask_kernel(socket.NETLINK_ROUTE, _GET_LINKS, _LINK.pack(0, 0, 0, 0, 0)):
        _, hardware, index, flags, _ = _LINK.unpack_from(body)
        attributes = attributes_of(body[_LINK.size :])
        name, info = _text(attributes[_LINK_NAME]), attributes_of(attributes.get(_LINK_INFO, b""))
        yield Link(
            name=name,
            kind=_text(info.get(_INFO_KIND, b"")),
            mtu=struct.unpack("=I", attributes[_LINK_MTU])[0],
            up=flags & _UP != 0 and flags & _RUNNING != 0,
            loopback=flags & _LOOPBACK != 0,
            infiniband=hardware == _INFINIBAND,
            speed_mbit_per_s=read_speed(name),
            wireless=_ask_device(_WIRELESS_NAME, name, b"") is not None,
            addresses=tuple(addresses.get(index, ())),
        )

"""Read this host's network interfaces from the Linux kernel, by netlink and ethtool.

/sys/class/net is not used: in a container it may show the interfaces of another network namespace.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_GET_LINKS, _GET_ADDRESSES = 18, 22
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
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


def read_links() -> dict[int, dict[str, Any]]:
    """List the interfaces by number: name, kind ("" for a network card), mtu, up, loopback, infiniband.

    `up`: it is switched on and its cable, if any, is connected.
    Raises: OSError.
    """
    links = {}
    for body in _dump(_GET_LINKS, _LINK.pack(0, 0, 0, 0, 0)):
        _, hardware, index, flags, _ = _LINK.unpack_from(body)
        attributes = _attributes(body[_LINK.size :])
        info = _attributes(attributes.get(_LINK_INFO, b""))
        links[index] = {
            "name": _text(attributes[_LINK_NAME]),
            "kind": _text(info.get(_INFO_KIND, b"")),
            "mtu": struct.unpack("=I", attributes[_LINK_MTU])[0],
            "up": flags & _UP != 0 and flags & _RUNNING != 0,
            "loopback": flags & _LOOPBACK != 0,
            "infiniband": hardware == _INFINIBAND,
        }
    return links


def read_addresses() -> Iterator[tuple[int, str, int, bool]]:
    """List the addresses: number of the interface, address, prefix length, and whether it is permanent.

    Link-local ones (fe80) are left out.
    Raises: OSError.
    """
    for body in _dump(_GET_ADDRESSES, _ADDRESS.pack(0, 0, 0, 0, 0)):
        family, prefix, flags, scope, index = _ADDRESS.unpack_from(body)
        attributes = _attributes(body[_ADDRESS.size :])
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


def is_wireless(name: str) -> bool:
    """Return whether an interface is wireless."""
    return _ask_device(_WIRELESS_NAME, name, b"") is not None


def _ask_device(request: int, name: str, argument: bytes) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return fcntl.ioctl(asking, request, struct.pack("16s24s", name.encode(), argument))
        except OSError:
            return None


def _dump(kind: int, question: bytes) -> Iterator[bytes]:
    """Ask the kernel for a whole table; yield its entries."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(5)
        kernel.sendall(_HEADER.pack(_HEADER.size + len(question), kind, _DUMP, 1, 0) + question)
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, entry, _, _, _ = _HEADER.unpack_from(data)
                body, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if entry == _DONE:
                    return
                if entry == _ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise OSError(code, os.strerror(code))
                yield body


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")

"""The TCP connections of this host, as the kernel lists them; a closed one stays listed for a minute."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_NOT_CONNECTED = frozenset({"02", "03", "07", "0A"})
"""SYN_SENT, SYN_RECV, CLOSE, LISTEN. Source: include/net/tcp_states.h of Linux."""
_MAPPED = bytes(10) + b"\xff\xff"
_End = tuple[bytes, int]


def was_connected(address: str, port: int) -> bool | None:
    """Return whether a connection to this address and port has an end on this host, or had one in the last minute.

    None: the kernel lists no connections here (no Linux), or `address` is a name.
    """
    try:
        wanted = _without_mapping(ipaddress.ip_address(address).packed), port
        return any(wanted in ends for table in _TABLES for ends in _read(Path(table)))
    except (OSError, ValueError):
        return None


def _read(table: Path) -> Iterator[tuple[_End, _End]]:
    """Return the local and the remote end of each connection."""
    if table.name == "tcp6" and not table.exists():  # IPv6 is switched off
        return
    with table.open(encoding="ascii") as lines:
        next(lines, None)
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if state not in _NOT_CONNECTED:
                yield _end(local), _end(remote)


def _end(text: str) -> _End:
    """Read `0100007F:1F90`: each 32 bits of the address in the byte order of the machine."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    return _without_mapping(b"".join(struct.pack("=I", word) for word in words)), int(port, 16)


def _without_mapping(address: bytes) -> bytes:
    """Return the IPv4 address of `::ffff:10.0.0.1`, any other as it is."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address

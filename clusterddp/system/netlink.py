"""Questions to the Linux kernel by netlink(7): its tables of interfaces, addresses and sockets."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_TIMEOUT_S = 5


def ask_kernel(protocol: int, kind: int, question: bytes) -> Iterator[bytes]:
    """Ask for a whole table, by a protocol of netlink and a kind of its messages; yield the entries.

    Raises: OSError: the kernel does not answer, or has no such table.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        kernel.settimeout(_TIMEOUT_S)
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


def attributes_of(data: bytes) -> dict[int, bytes]:
    """Return the attributes of an entry, which follow its fixed part, by their kinds."""
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found

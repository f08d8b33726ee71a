"""The socket between a node's supervisor and its tasks: its name, and the process at the other end."""

from __future__ import annotations

import hashlib
import socket
import struct

MAX_PACKET = 1 << 20
PREFIX = "\0clusterddp-"
"""The prefix of the names of our sockets; they are abstract and so in no directory."""
_PEER = struct.Struct("3i")


def socket_name(token: str, *, job: str, start: int, step: str, attempt: int, node_rank: int) -> str:
    """Name the socket of one node for one step of one start of a job."""
    facts = f"tasks of {token}:{job}:{start}:{step}:{attempt}:{node_rank}"
    return PREFIX + hashlib.sha256(facts.encode()).hexdigest()[:40]


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid

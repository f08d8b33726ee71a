"""The master port: chosen so that two runs differ, and held so that no stranger takes it before rank 0 listens."""

from __future__ import annotations

import errno
import hashlib
import socket

from clusterddp.errors import ClusterddpError

FIRST_PORT = 10_000
LAST_PORT = 31_999
"""Below Linux's ephemeral ports (32768 and up), which any outgoing connection may take."""
LAST_OF_ALL = 65_535
_TRIES = 512


def walk_ports(seed: str, count: int) -> list[int]:
    """List the first ports of the walk that follows from `seed`: whoever knows the seed knows where to look."""
    span = LAST_PORT - FIRST_PORT + 1
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % span
    return [FIRST_PORT + (start + step) % span for step in range(count)]


def reserve_port(seed: str, *, host: str = "") -> tuple[socket.socket, int]:
    """Reserve a free TCP port; return the socket that holds it and the port.

    The search starts at a port that follows from `seed`, so the same run asks for the same port, and walks on past
    ports that are taken. The socket is bound and does not listen. It was bound without SO_REUSEADDR, so only one
    reservation succeeds, and allows it afterwards: torch's TCPStore, which sets SO_REUSEADDR, may then listen on the
    port while the reservation is held; a program that does not set it cannot.
    Raises: ClusterddpError: no free port was found.
    """
    ports = walk_ports(seed, _TRIES)
    for port in ports:
        holder = _try_port(host, port)
        if holder is not None:
            return holder, port
    raise ClusterddpError(
        f"no free port among {_TRIES} from {ports[0]} on", hint="network.master_port names one yourself"
    )


def hold_port(port: int, *, host: str = "") -> socket.socket:
    """Hold the one port that the user named, even if connections of an earlier attempt still linger on it.

    Raises: ClusterddpError: somebody else listens there.
    """
    holder = _try_port(host, port, shared=True)
    if holder is None:
        raise ClusterddpError(f"port {port} is in use", hint="network.master_port: auto finds a free one")
    return holder


def _try_port(host: str, port: int, *, shared: bool = False) -> socket.socket | None:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        holder.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ClusterddpError(f"{host or '*'}:{port} cannot be bound: {error.strerror}") from error
        return None
    return holder

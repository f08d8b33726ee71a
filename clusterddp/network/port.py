"""The master port: chosen so that two runs differ, and held so that no other user takes it before rank 0 serves there.

A socket that is bound and does not listen does not protect its port: any process of any user that sets SO_REUSEADDR
can listen there first. A listening socket does. So where rank 0 can take over a listening socket
(node/store_listener.py), the socket listens as soon as the port is chosen.
"""

from __future__ import annotations

import errno
import hashlib
import socket

from clusterddp.errors import ClusterddpError

FIRST_PORT = 10_000
LAST_PORT = 31_999
"""Below Linux's ephemeral ports (32768 and up), which any outgoing connection may take."""
BACKLOG = 4096
"""Connections of ranks that come before rank 0; Linux's own limit (net.core.somaxconn) as a rule."""
_TRIES = 512


def walk_ports(seed: str, count: int) -> list[int]:
    """List the first ports of the walk that follows from `seed`: a process that knows the seed finds the port."""
    span = LAST_PORT - FIRST_PORT + 1
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % span
    return [FIRST_PORT + (start + step) % span for step in range(count)]


def reserve_port(seed: str, *, listening: bool = False) -> tuple[socket.socket, int]:
    """Reserve a free TCP port; return the socket that holds it and the port.

    The search starts at a port that follows from `seed`, so the same run asks for the same port, and walks on past
    ports that are taken: of several reservations of one port only one succeeds. See `bind_port` for `listening`.
    Raises: ClusterddpError: no free port was found.
    """
    ports = walk_ports(seed, _TRIES)
    for port in ports:
        holder = _try_port(port, shared=False, listening=listening)
        if holder is not None:
            return holder, port
    raise ClusterddpError(
        f"no free port among {_TRIES} from {ports[0]} on", hint="network.master_port names one yourself"
    )


def hold_port(port: int, *, listening: bool = False) -> socket.socket:
    """Hold the port that the user named, even while connections of an earlier attempt are in TIME_WAIT.

    Raises: ClusterddpError: another process listens there.
    """
    holder = _try_port(port, shared=True, listening=listening)
    if holder is None:
        raise ClusterddpError(f"port {port} is in use", hint="network.master_port: auto finds a free one")
    return holder


def bind_port(port: int, *, shared: bool, listening: bool) -> socket.socket:
    """Bind a port on all addresses, IPv6 and IPv4 alike.

    `shared`: next to sockets that are bound and do not listen. `listening`: true: no other socket can be bound to the
    port from now on. False: a program of any user that sets SO_REUSEADDR, as torch's TCPStore does, can listen on
    the port.
    Raises: OSError: EADDRINUSE: the port is taken.
    """
    family, everywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((everywhere, port))
        if listening:
            sock.listen(BACKLOG)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        sock.close()
        raise
    return sock


def _try_port(port: int, *, shared: bool, listening: bool) -> socket.socket | None:
    try:
        return bind_port(port, shared=shared, listening=listening)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ClusterddpError(f"port {port} cannot be bound: {error.strerror}") from error
        return None

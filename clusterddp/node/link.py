"""The link between the head (node 0's supervisor) and another supervisor: its messages, heartbeats and listeners.

A link is a series of connections (peer.py), signed and unencrypted (rendezvous/connection.py); their key is the run's
token.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from clusterddp.network.port import bind_port
from clusterddp.rendezvous.connection import Loss, Message, Protocol

HEARTBEAT_S = 1.0
PROCESS_ENDED = Loss("process_ended", "its process has ended")
"""The other host refuses connections to the port of the process."""
_MAX_MESSAGE = 512 * 1024
SUPERVISORS = Protocol(
    name="supervisor",
    key="token",
    max_bytes_to_server=_MAX_MESSAGE,
    max_bytes_to_client=_MAX_MESSAGE,
    fields={
        "heartbeat": {"received": int},
        "join": {"node_rank": int, "pid": int, "port": int},
        "join_again": {"node_rank": int, "session": str, "received": int},
        "welcome": {"session": str, "received": int},
    },
)
"""supervisor.py lists all kinds of messages; the fields that a link itself reads are checked as they arrive."""


def given_up(why: str) -> Loss:
    """Return the loss of a link that the head has given up."""
    return Loss("given_up", f"node 0 has given it up: {why}")


def watch_host(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel end a connection whose other host has not answered for this long, on Linux.

    The other kernel answers, not the process: a process that blocks on a file server does not count as a dead host.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    options = {
        socket.TCP_USER_TIMEOUT: int(silence_s * 1000),
        socket.TCP_KEEPIDLE: max(1, int(silence_s / 4)),
        socket.TCP_KEEPINTVL: max(1, int(silence_s / 4)),
        socket.TCP_KEEPCNT: 3,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def facts_of(message: Message) -> Message:
    """Return the fields of a message without its kind."""
    return {key: value for key, value in message.items() if key != "kind"}


def listen(host: str) -> socket.socket:
    """Listen on `host` at a port that the kernel chooses.

    Raises: OSError: `host` is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_walk(ports: Sequence[int]) -> socket.socket:
    """Listen, on all addresses of this host, at the first of these ports that is free.

    Without SO_REUSEADDR: a port that another process has bound, and does not listen on yet, counts as taken.
    Raises: OSError: all are taken.
    """
    last: OSError | None = None
    for port in ports:
        try:
            listener = bind_port(port, shared=False, listening=True)
        except OSError as error:
            last = error
        else:
            listener.setblocking(False)
            return listener
    raise OSError(f"no port is free from {ports[0]} to {ports[-1]}") from last

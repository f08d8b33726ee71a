"""A listener that answers every process that knows the nonce, on every address of this host, with the name of the host.

The first message and the answer are PAYLOAD bytes long, so large packets are tried as well: a wrong MTU lets a
connection through and nothing else.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

from clusterddp.network.port import bind_port
from clusterddp.rendezvous.connection import Connection, Protocol
from clusterddp.rendezvous.server import INTRODUCTION_S, Server

PAYLOAD = 1 << 15
"""Bytes each way: more than the largest packet (9000), less than any buffer."""
WAYS = Protocol(name="way", key="nonce", max_bytes_to_server=2 * PAYLOAD, max_bytes_to_client=2 * PAYLOAD)
"""Its key is the nonce of the run's probe."""
_AT_ONCE = 100
"""How many hosts are expected to connect at the same time; others wait in the backlog."""
_FLUSH_EVERY_S = 0.05


class Listener:
    """Listens until it is closed, in a thread of its own."""

    def __init__(self, nonce: str, name: str, port: int) -> None:
        """Listen on `port`; 0: on one that the kernel gives.

        Raises: OSError: the port is taken.
        """
        self._name = name
        listener = bind_port(port, shared=True, listening=True)
        self.port = int(listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._server = Server(
            listener, self._selector, protocol=WAYS, key=nonce, num_expected=_AT_ONCE, report=lambda refused: None
        )
        self._end, self._ended = socket.socketpair()
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port, and close all connections."""
        self._end.close()
        self._thread.join()

    def _serve(self) -> None:
        answered: list[Connection] = []
        while True:
            ready = self._selector.select(_FLUSH_EVERY_S if answered else 1.0)
            if any(key.fileobj is self._ended for key, _ in ready):
                break
            now = time.monotonic()
            for connection, _ in self._server.accept(now):
                here = {"kind": "here", "name": self._name, "seen": connection.peer_address}
                connection.send(here | {"padding": " " * PAYLOAD})
                answered.append(connection)
            answered = [connection for connection in answered if not _is_over(connection, now)]
        self._server.close()
        for connection in answered:
            connection.close()
        self._ended.close()
        self._selector.close()


def _is_over(connection: Connection, now: float) -> bool:
    """Go on with a connection, and close it after the client has.

    The end that closes first keeps the port busy for a minute: that is to be the client.
    """
    connection.receive(now)
    if connection.lost is None and now - connection.opened <= 2 * INTRODUCTION_S:
        return False
    connection.close()
    return True

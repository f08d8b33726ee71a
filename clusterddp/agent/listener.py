"""A listener that tells everybody who knows the nonce who it is, on every address of this host.

Whoever connects sends PAYLOAD bytes, the nonce first, and gets as many back: who answers, and from where he was seen.
So large packets are tried as well: a wrong MTU lets a connection through and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from clusterddp.network.interface import plain_address

PAYLOAD = 1 << 15
"""Bytes each way: more than the largest packet (9000), less than any buffer."""
_BACKLOG = 4096
_PATIENCE_S = 5.0
"""For one caller."""


@dataclass(kw_only=True)
class _Caller:
    socket: socket.socket
    seen: str
    deadline: float
    heard: bytes = b""
    unsent: bytes = b""
    answered: bool = False


class Listener:
    """Listens until it is closed, in a thread of its own."""

    def __init__(self, nonce: str, name: str, port: int) -> None:
        """Listen on `port`; 0: on one that the kernel gives.

        Raises: OSError: the port is taken.
        """
        self._nonce = nonce.encode()
        self._name = name
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._end, self._ended = socket.socketpair()
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port, and hang up on everybody."""
        self._end.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._ended:
                    self._hang_up()
                    return
                if key.fileobj is self._socket:
                    self._accept()
                elif not self._go_on(key.data):
                    self._drop(key.data)
            now = time.monotonic()
            callers = [key.data for key in self._selector.get_map().values() if key.data is not None]
            for caller in callers:
                if caller.deadline < now:
                    self._drop(caller)

    def _accept(self) -> None:
        try:
            peer, address = self._socket.accept()
        except OSError:
            time.sleep(0.01)  # too many open files, for a moment
            return
        peer.setblocking(False)
        seen, deadline = plain_address(str(address[0])), time.monotonic() + _PATIENCE_S
        self._selector.register(peer, selectors.EVENT_READ, _Caller(socket=peer, seen=seen, deadline=deadline))

    def _go_on(self, caller: _Caller) -> bool:
        """Hear and answer what can be now; False: there is no more to it."""
        try:
            if not caller.answered:
                data = caller.socket.recv(PAYLOAD)
                caller.heard += data
                if not data or not caller.heard.startswith(self._nonce[: len(caller.heard)]):
                    return False
                if len(caller.heard) < PAYLOAD:
                    return True
                caller.answered = True
                caller.unsent = json.dumps({"name": self._name, "seen": caller.seen}).encode().ljust(PAYLOAD)
                self._selector.modify(caller.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, caller)
            if caller.unsent:
                caller.unsent = caller.unsent[caller.socket.send(caller.unsent) :]
                if not caller.unsent:
                    # Whoever closes first keeps the port busy for a minute: let it be the other one.
                    self._selector.modify(caller.socket, selectors.EVENT_READ, caller)
                return True
            return bool(caller.socket.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.socket)
        caller.socket.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        self._selector.close()

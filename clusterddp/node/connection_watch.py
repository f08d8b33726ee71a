"""Whether a rank of this node has connected to the rendezvous of its attempt: ranks that never do train apart."""

from __future__ import annotations

from clusterddp.network.connections import was_connected

_FIRST_S = 1.0
_EVERY_S = 20.0
"""The kernel lists a connection for 60 s after its end, unless it was reset."""


class ConnectionWatch:
    """Looks until a connection is seen."""

    def __init__(self, address: str, port: int, now: float) -> None:
        self._address = address
        self._port = port
        self._wait_s = _FIRST_S
        self._next = now + self._wait_s
        self.seen = False
        """True as well where it cannot be known."""

    def tick(self, now: float) -> None:
        """Look now and then, as long as nothing was seen."""
        if not self.seen and now >= self._next:
            self._wait_s = min(2 * self._wait_s, _EVERY_S)
            self._next = now + self._wait_s
            self.look()

    def look(self) -> None:
        """Look now."""
        self.seen = self.seen or was_connected(self._address, self._port) is not False

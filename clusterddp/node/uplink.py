"""How a supervisor reaches the head: node 0 has it in its own process, every other node has a link to it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.node.failure import CERTAIN
from clusterddp.node.link import SUPERVISORS, given_up
from clusterddp.node.log import log_line
from clusterddp.node.peer import Limits, Peer
from clusterddp.rendezvous.client import Attempt, AuthenticatedAttempt, Found, Search
from clusterddp.rendezvous.connection import HOST_SILENT, Loss, Message
from clusterddp.run.gang import Gang
from clusterddp.run.supervisors import Link

_REPORT_FATAL_S = 1.0
_CONNECT_S = 8.0
"""How long the host of a head that is known to listen may take to accept a connection at first."""
_MAX_PROBES = 16
"""How many connections of the head, which only tests whether this process listens, are closed in one turn."""


class Uplink(Protocol):
    """What the supervisor's loop needs of the head, on this host or another."""

    @property
    def exit_code(self) -> int | None:
        """Set when the supervisor is to exit as soon as nothing of its node is left."""

    @property
    def head_lost(self) -> Loss | None:
        """Why the head is lost, when it is."""

    @property
    def joined(self) -> bool:
        """True once the head has accepted this node."""

    @property
    def polls_fast(self) -> bool:
        """True while something is to be done at once, or things change within milliseconds."""

    def report(self, message: Message) -> None:
        """Send the head a message."""

    def pump(self, now: float) -> list[Message]:
        """Receive and send messages; return the head's orders for this node."""

    def report_fatal_error(self, error: str) -> None:
        """Report an error that ends this supervisor: to the head, or, when this is the head, by closing all links."""


class HeadElsewhere:
    """The uplink of a node without the head: the head is a peer; when it is lost the node ends its ranks and exits."""

    def __init__(
        self,
        gang: Gang,
        node_rank: int,
        search: Search,
        selector: selectors.BaseSelector,
        limits: Limits,
        *,
        listener: socket.socket,
        known: Link | None,
        on_slurm: bool,
        now: float,
    ) -> None:
        """`listener`: the head connects to it after a connection broke, to test whether this process lives.

        `known`: the address where the head listens already; None: it starts to listen at one of the candidates.
        """
        self.exit_code: int | None = None
        self.head_lost: Loss | None = None
        self.joined = False
        self._token = gang.token
        self._node_rank = node_rank
        self._selector = selector
        self._listener = listener
        self._search = search
        self._known = known
        self._on_slurm = on_slurm
        self._start_timeout_s = gang.start_timeout_s
        self._join_until = now + gang.start_timeout_s
        self._connect_until = now + min(_CONNECT_S, gang.start_timeout_s)
        self._session = ""
        self._now = now
        self._address = ("", 0)
        self._peer = Peer(limits, self._connect_again, when_quiet=True)

    @property
    def polls_fast(self) -> bool:
        return not self.joined or self._peer.broken

    def report(self, message: Message) -> None:
        if self.head_lost is None:
            self._peer.send(message)
        if self._on_slurm and message.get("signal") == "SIGTERM" and self._peer.is_quiet(self._now):
            self._peer.lose(HOST_SILENT)  # Slurm has found the same, and is about to kill the job

    def pump(self, now: float) -> list[Message]:
        if self.head_lost is not None:
            return []
        self._now = now
        self._take_probes()
        messages = self._peer.receive(now) if self.joined else self._join(now)
        if self.joined and (found := self._peer.keep_up(now)) is not None:
            messages += self._welcomed(found, now)
        orders = [self._take_order(message) for message in messages]
        if self._peer.lost is not None and self.exit_code is None:
            log_line(f"the head is lost: {self._peer.lost}")
            self.head_lost = self._peer.lost
            self.exit_code = 1
            orders.append({"kind": "kill", "whole_gang": True})
        return orders

    def report_fatal_error(self, error: str) -> None:
        self.report({"kind": "failed", "error": error, "weight": CERTAIN})
        behind = time.monotonic() - self._now  # on the supervisor's clock, which does not tick any more
        until = self._now + _REPORT_FATAL_S
        while self.head_lost is None and (now := time.monotonic() - behind) < until:
            self.pump(now)
            if self.joined and not self._peer.owes_acknowledgement(now):
                return
            time.sleep(0.02)

    def _take_order(self, message: Message) -> Message:
        if message["kind"] == "finish":
            self.exit_code = int(message["exit_code"])
        elif message["kind"] == "gave_up":
            self._peer.lose(given_up(str(message["why"])))
        return message

    def _join(self, now: float) -> list[Message]:
        """Find the head, and wait for its welcome.

        Raises: ClusterddpError: it was not found in time, or cannot be reached.
        """
        found = self._search.find(now)
        if found is not None:
            self.joined = True
            self._search.close()
            log_line(f"the head is at {found.connection.peer_address}:{found.connection.peer_port}")
            return self._welcomed(found, now)
        if self._known is not None:
            self._await_known_head(self._known, now)
        elif now >= self._join_until:
            raise ClusterddpError(f"the head was not found within {self._start_timeout_s:g} s")
        return []

    def _await_known_head(self, known: Link, now: float) -> None:
        """Check a head that is known to listen: it may refuse, or not answer in time.

        Raises: ClusterddpError: it cannot be reached.
        """
        loss = self._search.failure.loss if self._search.failure is not None else Loss("no_answer", "no answer")
        late = not self._search.answered and now >= self._connect_until
        if loss.kind == "refused" or late:
            raise ClusterddpError(f"the head at {known['host']}:{known['port']} cannot be reached: {loss}")
        if now >= self._join_until:
            self._peer.lose(loss)

    def _welcomed(self, found: Found, now: float) -> list[Message]:
        """Use a connection to the head, whose first message is its welcome, or `gave_up`."""
        first, *others = found.messages
        if first["kind"] != "welcome":
            found.connection.close()
            return [first]
        self._session = str(first["session"])
        self._address = (found.connection.peer_address, found.connection.peer_port)
        self._peer.connect(found.connection, int(first["received"]), now)
        return self._peer.take(others)

    def _connect_again(self, now: float) -> Attempt:
        again = {
            "kind": "join_again",
            "node_rank": self._node_rank,
            "session": self._session,
            "received": self._peer.received,
        }
        return AuthenticatedAttempt(
            self._address,
            now,
            self._selector,
            protocol=SUPERVISORS,
            key=self._token,
            introduce=lambda connection: again,
        )

    def _take_probes(self) -> None:
        """Close the connections that wait at the listener: the head only tests whether they are accepted."""
        with contextlib.suppress(OSError):
            for _ in range(_MAX_PROBES):
                self._listener.accept()[0].close()

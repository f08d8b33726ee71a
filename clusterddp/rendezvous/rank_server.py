"""How rank 0 meets the other ranks: it listens, counts each rank that comes, and sends all of them the verdict."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.network.interface import is_loopback
from clusterddp.ranks.launched import Launched
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.rendezvous.connection import Message, refusal
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.rank_client import ask_rank_0
from clusterddp.rendezvous.rank_messages import RANKS, Decide, RankHello, RanksMet, find_mismatch, find_twin
from clusterddp.rendezvous.server import Arrival, Member, Members, refuse

LINGER_S = 10.0
"""How long rank 0 stays to refuse latecomers."""
_FLUSH_S = 5.0


def serve_ranks(
    listener: socket.socket,
    launched: Launched,
    own: RankHello,
    decide: Decide,
    *,
    deadline: float,
    timeout_s: float,
    key: str,
) -> dict[str, Any]:
    """Count all ranks, decide, and send them the decision; return it.

    Raises: PreflightError: the gang does not come together. ClusterddpError: what `decide` raises.
    """
    with contextlib.closing(RankServer(listener, launched, own, deadline=deadline, key=key)) as server:
        try:
            server.await_all(timeout_s)
            server.send_all({"kind": "complete"})
            decided = decide(server.met())
        except ClusterddpError as error:
            server.refuse_all(error)
            raise
        server.send_all({"kind": "decided", "decided": decided})
    return decided


class RankServer:
    """The ranks that have come to rank 0."""

    def __init__(self, listener: socket.socket, launched: Launched, own: RankHello, deadline: float, key: str) -> None:
        self._port = int(listener.getsockname()[1])
        self._launched = launched
        self._own = own
        self._deadline = deadline
        self._left: dict[int, RankHello] = {}
        """Ranks that came and have left again."""
        self._reached: Counter[str] = Counter()
        """The addresses at which ranks of other hosts have reached this one."""
        self._reached_locally: list[str] = []
        self._members: Members[RankHello] = Members(
            listener, protocol=RANKS, key=key, num_expected=launched.world_size, report=lambda refused: None
        )
        self._elsewhere = _Elsewhere(launched, own, self._port, deadline, key)

    def close(self) -> None:
        """Close all connections; the listener stays open for torch's store."""
        self._members.close(_FLUSH_S)

    def await_all(self, timeout_s: float) -> None:
        """Wait until every rank is here.

        Raises: PreflightError: one does not fit, or does not come in time.
        """
        while len(self._members.by_number) + 1 < self._launched.world_size:
            if self._elsewhere.error:
                raise self._elsewhere.error
            if time.monotonic() >= self._deadline:
                raise self._absence(timeout_s)
            for member in self.take_turn():
                self._admit(member)

    def met(self) -> RanksMet:
        hellos = {0: self._own} | {rank: member.introduction for rank, member in self._members.by_number.items()}
        reached = self._reached or Counter(self._reached_locally)
        return RanksMet(
            hellos=tuple(hellos[rank] for rank in sorted(hellos)),
            reached=reached.most_common(1)[0][0],
            port=self._port,
        )

    def send_all(self, message: Message) -> None:
        self._members.send_all(message)

    def refuse_all(self, error: ClusterddpError) -> None:
        """Send all ranks, and for a moment also those that come too late, why there is no gang."""
        refused = set(self._members.by_number)
        self.send_all(refusal(error))
        until = time.monotonic() + LINGER_S
        while len(refused) + 1 < self._launched.world_size and time.monotonic() < until:
            for member in self.take_turn():
                refuse(member.connection, error)
                refused.add(member.introduction.rank)

    def take_turn(self, wait_s: float = 0.2) -> list[Member[RankHello]]:
        """Wait a moment; return the ranks that have introduced themselves."""
        arrivals, left = self._members.take_turn(wait_s)
        self._left |= {rank: member.introduction for rank, member in left.items()}
        introduced = [self._introduced(arrival) for arrival in arrivals]
        return [member for member in introduced if member is not None]

    def _introduced(self, arrival: Arrival) -> Member[RankHello] | None:
        """Read how a client introduces itself; None: it is no rank of this job."""
        connection, message = arrival
        try:
            hello = RankHello.from_json(message)
        except ValueError:
            connection.close()
            return None
        if hello.nonce == self._own.nonce:  # a name that is no address of this host leads here all the same
            self._elsewhere.found = ""
        elif hello.identity == self._own.identity:
            return Member(connection, hello)
        connection.send({"kind": "other_job"})
        connection.close()
        return None

    def _admit(self, member: Member[RankHello]) -> None:
        """Count a rank.

        Raises: PreflightError: there can be no gang with it.
        """
        connection, hello = member.connection, member.introduction
        error = find_mismatch(self._own, hello)
        for other in [self._own, *(each.introduction for each in self._members.by_number.values())]:
            error = error or find_twin(other, hello)
        if error:
            refuse(connection, error)
            raise error
        self._members.by_number[hello.rank] = member
        self._left.pop(hello.rank, None)
        if hello.place == self._own.place:
            self._reached_locally.append(connection.own_address)
        elif not is_loopback(connection.own_address):
            self._reached[connection.own_address] += 1
        self._deadline = min(self._deadline, time.monotonic() + max(0.0, float(hello.left_s)))
        connection.send({"kind": "welcome"})

    def _absence(self, timeout_s: float) -> PreflightError:
        """Name the ranks that are missing and those that are here, so that the missing machine is known."""
        size = self._launched.world_size
        missing = [rank for rank in range(1, size) if rank not in self._members.by_number]
        hosts: dict[str, list[int]] = {self._own.host: [0]}
        for rank, member in sorted(self._members.by_number.items()):
            hosts.setdefault(member.introduction.host, []).append(rank)
        here = "; ".join(f"{spell_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        gone = "".join(f"; {hello.name} came and left again" for hello in self._left.values())
        if self._members.server.unproven:
            address, count = self._members.server.unproven.most_common(1)[0]
            gone += f"; {count} connections from {address} did not know the same {JOIN_KEY}"
        astray = self._elsewhere.found
        return PreflightError(
            f"{spell_ranks(missing)} of {size} did not come to {self._own.host}, port {self._port}, "
            f"within {timeout_s:g} s (here: {here}{gone})" + (f"; {astray}" if astray else ""),
            hint="look at the output of those ranks; network.start_timeout waits longer",
        )


class _Elsewhere:
    """Looks where MASTER_ADDR leads when that is not here: there may be another rank 0, or no process."""

    def __init__(self, launched: Launched, own: RankHello, port: int, deadline: float, key: str) -> None:
        self.error: PreflightError | None = None
        self.found = ""
        elsewhere = [address for address in launched.master_addrs if not _is_here(address)]
        if elsewhere and len(elsewhere) == len(launched.master_addrs):
            origin = launched.variables["MASTER_ADDR"].origin if "MASTER_ADDR" in launched.variables else "the launcher"
            self.found = f"{elsewhere[0]} (from {origin}) is no address of {own.host}, where rank 0 is"
            look = threading.Thread(target=self._look, args=(elsewhere[0], own, port, deadline, key), daemon=True)
            look.start()

    def _look(self, address: str, own: RankHello, port: int, deadline: float, key: str) -> None:
        try:
            ask_rank_0([address], own, [port], deadline, key)
        except PreflightError as error:
            self.error = error


def _is_here(address: str) -> bool:
    """Say whether this host has an address, or the one that a name means."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False

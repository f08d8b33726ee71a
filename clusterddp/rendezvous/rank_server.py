"""The rendezvous of ranks, on rank 0: it listens, counts the ranks that connect, and sends its decision to all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.network.interface import is_loopback
from clusterddp.ranks.environment import spell_ranks
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.connection import Message, refusal
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.rank_client import ask_rank_0
from clusterddp.rendezvous.rank_messages import RANKS, Decide, RankHello, RanksMet, find_mismatch, find_twin
from clusterddp.rendezvous.server import Arrival, Participant, Participants, refuse

LINGER_S = 10.0
"""How long rank 0 still accepts and refuses late ranks after a failure."""
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
    """Rank 0's server, and the ranks that have connected to it."""

    def __init__(self, listener: socket.socket, launched: Launched, own: RankHello, deadline: float, key: str) -> None:
        self._port = int(listener.getsockname()[1])
        self._launched = launched
        self._own = own
        self._deadline = deadline
        self._left: dict[int, RankHello] = {}
        """Ranks that were counted and have disconnected."""
        self._arrived: list[Participant[RankHello]] = []
        """Ranks that have introduced themselves, and are neither counted nor refused yet."""
        self._refused: set[int] = set()
        """Ranks that know why the gang cannot begin."""
        self._reached: Counter[str] = Counter()
        """The addresses at which ranks of other hosts have reached this one."""
        self._reached_locally: list[str] = []
        self._participants: Participants[RankHello] = Participants(
            listener, protocol=RANKS, key=key, num_expected=launched.world_size, report=lambda refused: None
        )
        self._address_check = _AddressCheck(launched, own, self._port, deadline, key)

    def close(self) -> None:
        """Close all connections; the listener stays open for torch's store."""
        self._participants.close(_FLUSH_S)

    def await_all(self, timeout_s: float) -> None:
        """Wait until every rank has connected.

        Raises: PreflightError: a rank does not match this gang, or does not connect in time.
        """
        while len(self._participants.by_number) + 1 < self._launched.world_size:
            if self._address_check.error:
                raise self._address_check.error
            if time.monotonic() >= self._deadline:
                raise self._missing_ranks(timeout_s)
            self._arrived = self.take_turn()
            while self._arrived:
                self._admit(self._arrived.pop(0))

    def met(self) -> RanksMet:
        hellos = {0: self._own} | {rank: each.introduction for rank, each in self._participants.by_number.items()}
        reached = self._reached or Counter(self._reached_locally)
        return RanksMet(
            hellos=tuple(hellos[rank] for rank in sorted(hellos)),
            reached=reached.most_common(1)[0][0],
            port=self._port,
        )

    def send_all(self, message: Message) -> None:
        self._participants.send_all(message)

    def refuse_all(self, error: ClusterddpError) -> None:
        """Send all ranks the error that ends the gang, and for `LINGER_S` also those that connect late."""
        self.send_all(refusal(error))
        self._refused |= self._participants.by_number.keys()
        others = set(range(1, self._launched.world_size))
        until = time.monotonic() + LINGER_S
        while True:
            for participant in self._arrived:
                self._refuse(participant, error)
            if others <= self._refused or time.monotonic() >= until:
                return
            self._arrived = self.take_turn()

    def take_turn(self, wait_s: float = 0.2) -> list[Participant[RankHello]]:
        """Wait up to `wait_s`; return the ranks that have introduced themselves."""
        arrivals, left = self._participants.take_turn(wait_s)
        self._left |= {rank: participant.introduction for rank, participant in left.items()}
        introduced = [self._read_introduction(arrival) for arrival in arrivals]
        return [participant for participant in introduced if participant is not None]

    def _read_introduction(self, arrival: Arrival) -> Participant[RankHello] | None:
        """Read the introduction of a client; None: it is no rank of this job."""
        connection, message = arrival
        try:
            hello = RankHello.from_json(message)
        except ValueError:
            connection.close()
            return None
        if hello.nonce == self._own.nonce:  # MASTER_ADDR is no address of this host, but leads here, as behind NAT
            self._address_check.found = ""
        elif hello.identity == self._own.identity:
            return Participant(connection, hello)
        connection.send({"kind": "other_job"})
        connection.close()
        return None

    def _admit(self, participant: Participant[RankHello]) -> None:
        """Count a rank.

        Raises: PreflightError: it does not match the other ranks.
        """
        connection, hello = participant.connection, participant.introduction
        error = find_mismatch(self._own, hello)
        for other in [self._own, *(each.introduction for each in self._participants.by_number.values())]:
            error = error or find_twin(other, hello)
        if error:
            self._refuse(participant, error)
            raise error
        self._participants.by_number[hello.rank] = participant
        self._left.pop(hello.rank, None)
        if hello.place == self._own.place:
            self._reached_locally.append(connection.own_address)
        elif not is_loopback(connection.own_address):
            self._reached[connection.own_address] += 1
        self._deadline = min(self._deadline, time.monotonic() + max(0.0, float(hello.left_s)))
        connection.send({"kind": "welcome"})

    def _refuse(self, participant: Participant[RankHello], error: ClusterddpError) -> None:
        refuse(participant.connection, error)
        self._refused.add(participant.introduction.rank)

    def _missing_ranks(self, timeout_s: float) -> PreflightError:
        """Make the error that names the missing ranks, and the connected ones, which show the missing machine."""
        size = self._launched.world_size
        missing = [rank for rank in range(1, size) if rank not in self._participants.by_number]
        hosts: dict[str, list[int]] = {self._own.host: [0]}
        for rank, participant in sorted(self._participants.by_number.items()):
            hosts.setdefault(participant.introduction.host, []).append(rank)
        here = "; ".join(f"{spell_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        gone = "".join(f"; {hello.name} had connected and has disconnected" for hello in self._left.values())
        if self._participants.server.unproven:
            address, count = self._participants.server.unproven.most_common(1)[0]
            gone += f"; {count} connections from {address} did not know the same {JOIN_KEY}"
        other_address = self._address_check.found
        return PreflightError(
            f"{spell_ranks(missing)} of {size} did not connect to {self._own.host}, port {self._port}, "
            f"within {timeout_s:g} s (here: {here}{gone})" + (f"; {other_address}" if other_address else ""),
            hint="look at the output of those ranks; network.start_timeout waits longer",
        )


class _AddressCheck:
    """Connects to MASTER_ADDR when that is not this host: another rank 0 may listen there, or no process."""

    def __init__(self, launched: Launched, own: RankHello, port: int, deadline: float, key: str) -> None:
        self.error: PreflightError | None = None
        self.found = ""
        elsewhere = [address for address in launched.master_addrs if not _is_here(address)]
        if elsewhere and len(elsewhere) == len(launched.master_addrs):
            origin = launched.variables["MASTER_ADDR"].origin if "MASTER_ADDR" in launched.variables else "the launcher"
            self.found = f"{elsewhere[0]} (from {origin}) is no address of {own.host}, where rank 0 is"
            arguments = (elsewhere[0], own, port, deadline, key)
            threading.Thread(target=self._connect, args=arguments, daemon=True).start()

    def _connect(self, address: str, own: RankHello, port: int, deadline: float, key: str) -> None:
        try:
            ask_rank_0([address], own, [port], deadline, key)
        except PreflightError as error:
            self.error = error


def _is_here(address: str) -> bool:
    """Return whether an address, or one that a name resolves to, is this host's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False

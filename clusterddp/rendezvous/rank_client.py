"""The rendezvous of ranks, on all ranks but 0: connects to rank 0 until it accepts or refuses, or the time is up."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Sequence
from typing import Any

from clusterddp.errors import PreflightError
from clusterddp.network.own_host import addresses_of
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.client import Found, NotFound, Search
from clusterddp.rendezvous.connection import Connection, Loss, Message, raise_if_refused
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.rank_messages import RANKS, RankHello

_DECISION_S = 300.0
"""How long rank 0 may take to make the run's directory, once all ranks have been counted."""
_EXTRA_S = 5.0
"""How long rank 0's decision may take that is due when this rank's time is up."""
_NO_RANK_0 = Loss("stranger", "another program than rank 0 answers there, or the gang has started without this rank")
_OTHER_JOB = Loss("failed", "the ranks of another job meet there")
_NO_DECISION = Loss("failed", "rank 0 has accepted the connection and sent no decision")
_NO_KEY = Loss("unproven", f"the process that answers there does not know the same {JOIN_KEY}")


def meet_rank_0(
    launched: Launched, own: RankHello, ports: Sequence[int], *, deadline: float, timeout_s: float, key: str
) -> dict[str, Any]:
    """Connect to rank 0; return its decision.

    Raises: PreflightError: rank 0 refuses, or cannot be reached in time.
    """
    answer = ask_rank_0(launched.master_addrs, own, ports, deadline, key)
    if isinstance(answer, dict):
        return answer
    raise _unreached(launched, own, ports, answer, timeout_s)


def ask_rank_0(
    hosts: Sequence[str], own: RankHello, ports: Sequence[int], deadline: float, key: str
) -> dict[str, Any] | NotFound | None:
    """Look for rank 0 until the deadline; return its decision, or why it was not found.

    Raises: PreflightError: rank 0 refuses the gang.
    """

    def introduce(connection: Connection) -> Message:
        left_s = max(0.0, deadline - time.monotonic())
        return {"kind": "join", **dataclasses.asdict(own), "left_s": left_s}

    def list_addresses() -> list[str]:
        return [address for host in hosts for address in addresses_of(host) or (host,)]

    with selectors.DefaultSelector() as selector:
        search = Search(list_addresses, ports, protocol=RANKS, key=key, introduce=introduce, selector=selector)
        try:
            while isinstance(found := search.wait(deadline), Found):
                decision = _await_decision(found, deadline)
                if not isinstance(decision, Loss):
                    found.connection.close()
                    return decision
                search.reject(found, decision)
        finally:
            search.close()
    return found


def _await_decision(found: Found, deadline: float) -> dict[str, Any] | Loss:
    """Wait until rank 0 has counted all ranks; return its decision, or why this server is not rank 0.

    Raises: PreflightError: rank 0 refuses the gang.
    """
    connection, messages = found
    while messages:
        for message in messages:
            raise_if_refused(message)
            if message["kind"] == "decided":
                decided = message.get("decided")
                return decided if isinstance(decided, dict) else _NO_RANK_0
            if message["kind"] == "other_job":
                return _OTHER_JOB
            if message["kind"] == "complete":
                deadline = time.monotonic() + _DECISION_S
        messages = connection.wait(deadline + _EXTRA_S)
    return _NO_DECISION


def _unreached(
    launched: Launched, own: RankHello, ports: Sequence[int], failure: NotFound | None, timeout_s: float
) -> PreflightError:
    master_addr, master_port = launched.variables.get("MASTER_ADDR"), launched.variables.get("MASTER_PORT")
    address_from = master_addr.origin if master_addr else "the launcher"
    port_from = master_port.origin if master_port and not launched.port_is_taken else "the job's name"
    more = " or other addresses" if launched.master_addrs[4:] else ""
    where = " or ".join(launched.master_addrs[:4]) + more
    port = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    hint = "rank 0 is not started, or that is another machine's address, or a firewall closes the port"
    found = "no attempt was made"
    if failure is not None:
        texts = {"closed": _NO_RANK_0, "stranger": _NO_RANK_0, "unproven": _NO_KEY}
        found = f"{failure.address}:{failure.port}: {texts.get(failure.loss.kind, failure.loss)}"
        if failure.loss.kind == "unproven":
            hint = f"{JOIN_KEY} has to have the same value for all ranks, or be set for none"
    return PreflightError(
        f"{own.name} did not reach rank 0 at {where} (from {address_from}), {port} (from {port_from}), "
        f"within {timeout_s:g} s; {found}",
        hint=hint,
    )

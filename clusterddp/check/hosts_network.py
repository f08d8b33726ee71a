"""What hosts are asked that decides nothing and tells much: their clocks, runs, and the network between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError, SshError
from clusterddp.launchers.ssh.interfaces import PROBE_AGAIN_S, Settled, probe_network, settle
from clusterddp.network.paths import Findings
from clusterddp.run.leftovers import RunHere
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.session import Reply, Session, ask_all

if TYPE_CHECKING:
    from clusterddp.run.gang import Gang

_ROUND_TRIPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The clock of a host, asked over its session."""

    offset_s: float
    """Its time minus ours; wrong by half the round trip at most."""
    round_trip_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What was found out about the network between hosts, and what would be chosen."""

    findings: Findings | None
    settled: Settled | None
    error: PreflightError | None = None


def read_clocks(sessions: Mapping[str, Session]) -> dict[str, Clock]:
    """Ask the hosts for the time, the quickest of a few answers counts; those that do not answer are left out."""

    def ask(host: str) -> Clock | SshError:
        best = None
        try:
            for _ in range(_ROUND_TRIPS):
                started, before = time.time(), time.monotonic()
                there = sessions[host].ask("facts.clock").facts["time"]
                passed = time.monotonic() - before
                if best is None or passed < best.round_trip_s:
                    best = Clock(offset_s=there - (started + passed / 2), round_trip_s=passed)
        except SshError as error:
            return error
        assert best is not None
        return best

    results = Fan(sessions, ask, lambda result: None).results(AT_ONCE)
    return {host: result for host, result in results.items() if isinstance(result, Clock)}


def look_for_runs(sessions: Mapping[str, Session]) -> dict[str, list[RunHere]]:
    """Find this user's runs on hosts; those that do not answer are left out."""
    replies = ask_all(sessions, "table.look", {"tokens": None})
    return {host: reply.facts["runs"] for host, reply in replies.items() if isinstance(reply, Reply)}


def examine_network(gang: Gang, sessions: Mapping[str, Session]) -> Network:
    """Try the network between those hosts of a gang that there are sessions with."""
    nodes = tuple(node for node in gang.nodes if node.host in sessions)
    if not nodes:
        return Network(findings=None, settled=None)
    gang = dataclasses.replace(gang, nodes=nodes)
    by_node = {node.node_rank: sessions[node.host] for node in nodes}
    findings = None
    error: PreflightError | None = None
    for within_s in (None, PROBE_AGAIN_S):
        try:
            findings = probe_network(gang, by_node, **({} if within_s is None else {"within_s": within_s}))
            return Network(findings=findings, settled=settle(gang, findings))
        except PreflightError as failure:
            error = failure
            if findings is None:  # a host did not answer, or the master's port is taken there
                break
    return Network(findings=findings, settled=None, error=error)

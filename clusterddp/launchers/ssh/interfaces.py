"""The network of a gang on hosts that are reached by SSH: the hosts try the ways between them, one choice is made."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from clusterddp.errors import NetworkError, SshError
from clusterddp.network.choice import choose_network
from clusterddp.network.diagnosis import explain_trouble
from clusterddp.network.explanation import say_notes, say_oddities, say_strange_names, say_why
from clusterddp.network.interface import loopback
from clusterddp.network.paths import Findings, HostNetwork, Way, plan_probes, usable_addresses
from clusterddp.run.gang import Gang
from clusterddp.ssh.session import Reply, Session, ask_all, raise_for

PROBE_S = 2.0
"""How long a host tries to reach others: enough for one packet that is lost."""
PROBE_AGAIN_S = 4.0
"""The same before a run is refused: hosts may be very busy."""


class NodeNetwork(NamedTuple):
    """Where a node stands."""

    interface: str
    address: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The network that carries a gang."""

    master_addr: str
    nodes: dict[int, NodeNetwork]
    """By node rank."""
    notes: tuple[str, ...] = ()
    """What people may want to mend."""
    oddities: tuple[str, ...] = ()
    """What does no harm, and misleads other programs: an address that is everywhere, a name that means 127.0.1.1."""


def settle_network(gang: Gang, sessions: Mapping[int, Session]) -> Settled:
    """Find the network by which all nodes reach each other; `sessions` by node rank.

    Raises: NetworkError: there is none, or the user's interface or port is not one, with what was tried and what
    mends it. SshError: a host cannot be asked.
    """
    try:
        return settle(gang, probe_network(gang, sessions))
    except NetworkError:
        return settle(gang, probe_network(gang, sessions, within_s=PROBE_AGAIN_S))


def settle(gang: Gang, findings: Findings) -> Settled:
    """Choose from what was found out.

    Raises: NetworkError.
    """
    places = {host.host: place for place, host in enumerate(findings.hosts)}
    if findings.on_one_machine:
        here = loopback()
        alone = NodeNetwork(here.name or "lo", here.address, here.why)
        return Settled(master_addr=here.address, nodes={node.node_rank: alone for node in gang.nodes})
    choice = choose_network(findings, gang.interface)
    if choice.taken is None:
        raise explain_trouble(findings, choice, gang.master_port)
    why = say_why(findings, choice)
    grounds = choice.taken.grounds
    nodes = {}
    for node in gang.nodes:
        place = places[node.host]
        nodes[node.node_rank] = NodeNetwork(grounds[place].link.name, grounds[place].address.address, why[place])
    return Settled(
        master_addr=choice.taken.master.address.address,
        nodes=nodes,
        notes=(*say_notes(findings, choice), *say_strange_names(findings, gang.env)),
        oddities=tuple(say_oddities(findings)),
    )


def probe_network(gang: Gang, sessions: Mapping[int, Session], *, within_s: float = PROBE_S) -> Findings:
    """Have every host tell its interfaces, and try to reach the others; `Findings.rows` shows the whole matrix.

    Raises: SshError, PreflightError: a host cannot be asked, or the master's port is taken there.
    """
    by_host = {node.host: sessions[node.node_rank] for node in sorted(gang.nodes, key=lambda node: node.node_rank)}
    hosts = list(by_host)
    nonce = secrets.token_hex(16)

    def introduce(host: str) -> dict[str, object]:
        head = {"head": True, "master_port": gang.master_port} if host == hosts[0] else {}
        return {"nonce": nonce, "name": host, **head}

    try:
        told = _all_or_raise(ask_all(by_host, "net.listen", introduce))
        findings = Findings(hosts=tuple(HostNetwork(host=host, **told[host].facts) for host in hosts), ways=())
        if findings.on_one_machine:
            return findings
        probes = dict(zip(hosts, plan_probes(findings, gang.interface), strict=True))
        names = [address.address for _, address in usable_addresses(findings, gang.interface)[0]]

        def order(host: str) -> dict[str, object]:
            targets = [
                {"target": target, "address": address, "port": port, "name": hosts[target]}
                for target, address, port in probes[host]
            ]
            return {"nonce": nonce, "targets": targets, "names": names, "within_s": within_s}

        tried = _all_or_raise(ask_all(by_host, "net.probe", order))
    finally:
        with contextlib.suppress(SshError):
            ask_all(by_host, "net.close")
    ways = [Way(source=place, **way) for place, host in enumerate(hosts) for way in tried[host].facts["ways"]]
    slow = [(place, address) for place, host in enumerate(hosts) for address in tried[host].facts["slow_names"]]
    return Findings(hosts=findings.hosts, ways=tuple(ways), slow_names=tuple(slow))


def _all_or_raise(results: Mapping[str, Reply | SshError]) -> dict[str, Reply]:
    raise_for([each for each in results.values() if isinstance(each, SshError)], "cannot tell of their network")
    return {host: result for host, result in results.items() if isinstance(result, Reply)}

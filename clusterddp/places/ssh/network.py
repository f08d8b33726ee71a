"""The network of a gang on hosts that are reached over SSH: the hosts probe each other, and one network is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import NetworkError, NonsenseError, PreflightError, SshError
from clusterddp.network.choice import Findings, speed_text
from clusterddp.network.interface import loopback
from clusterddp.places.ssh.session import Session
from clusterddp.places.ssh.sessions import all_or_raise, ask_all
from clusterddp.run.gang import Gang

PROBE_S = 2.0
"""How long a host tries to reach others: enough to resend one lost packet."""
PROBE_AGAIN_S = 4.0
"""How long a second probe takes before the run is refused: hosts may be very busy."""
_SILENT = "do not report their network"


@dataclass(frozen=True, kw_only=True, slots=True)
class GangNetwork:
    """What the hosts of a gang have found of the network between them, and what was chosen."""

    findings: Findings | None
    """None: a host does not answer, or the master port is in use."""
    gang: Gang | None = None
    """With the interface and the address of each node; None: `error` prevents a choice."""
    notes: tuple[str, ...] = ()
    """Warnings for the user."""
    error: PreflightError | None = None


def settle_network(gang: Gang, sessions: Mapping[str, Session]) -> tuple[Gang, tuple[str, ...]]:
    """Find the network by which all nodes reach each other; return the gang with it, and warnings for the user.

    `sessions`: by host.
    Raises: NetworkError: no network, or not the user's interface or port, connects all nodes; with the probes and a
    remedy. SshError, PreflightError: a host does not answer, or the master port is in use there.
    """
    network = examine_network(gang, sessions)
    if network.gang is None:
        assert network.error is not None
        raise network.error
    return network.gang, network.notes


def examine_network(gang: Gang, sessions: Mapping[str, Session]) -> GangNetwork:
    """Probe the network between the hosts of a gang; if no network is found, probe once more for longer."""
    findings = None
    for within_s in (PROBE_S, PROBE_AGAIN_S):
        try:
            findings = probe_network(gang, sessions, within_s=within_s)
            settled, notes = choose(gang, findings)
            return GangNetwork(findings=findings, gang=settled, notes=notes)
        except NetworkError as error:
            network = GangNetwork(findings=findings, error=error)
        except PreflightError as error:
            return GangNetwork(findings=findings, error=error)
    return network


def choose(gang: Gang, findings: Findings) -> tuple[Gang, tuple[str, ...]]:
    """Choose the network for a gang from the findings; return the gang with it, and warnings for the user.

    Raises: NetworkError.
    """
    if findings.on_one_machine:
        here = loopback()
        nodes = tuple(
            dataclasses.replace(node, interface=here.name or "lo", address=here.address, why=here.why)
            for node in gang.nodes
        )
        return dataclasses.replace(gang, nodes=nodes, master_addr=here.address), ()
    candidates = findings.candidates()
    if not candidates or not candidates[0].works:
        raise findings.diagnose(candidates)
    taken, why = candidates[0], findings.explain(candidates)
    places = {host.host: place for place, host in enumerate(findings.hosts)}
    nodes = tuple(
        dataclasses.replace(node, interface=link.name, address=address.address, why=f"{why}; {speed_text(link)}")
        for node in gang.nodes
        for link, address in [taken.endpoints[places[node.host]]]
    )
    settled = dataclasses.replace(gang, nodes=nodes, master_addr=taken.master_addr)
    return settled, tuple(findings.warnings(candidates, gang.env))


def probe_network(gang: Gang, sessions: Mapping[str, Session], *, within_s: float = PROBE_S) -> Findings:
    """Have every host list its interfaces and probe the others; `Findings.rows` is the matrix of results.

    Raises: SshError, PreflightError: a host does not answer, or the master port is in use there.
    """
    hosts = list(dict.fromkeys(node.host for node in sorted(gang.nodes, key=lambda node: node.node_rank)))
    by_host = {host: sessions[host] for host in hosts}
    nonce = secrets.token_hex(16)

    def listen(host: str) -> dict[str, object]:
        head = {"head": True, "master_port": gang.master_port} if host == hosts[0] else {}
        return {"nonce": nonce, "name": host, **head}

    try:
        listening = all_or_raise(ask_all(by_host, "host.listen", listen), _SILENT)
        networks = {host: reply.facts["network"] for host, reply in listening.items()}
        for host, network in networks.items():
            if network is None:
                raise NonsenseError(host, "no network")
        here = tuple(dataclasses.replace(networks[host], host=host) for host in hosts)
        findings = Findings(hosts=here, interface=gang.interface)
        if findings.on_one_machine:
            return findings
        planned = dict(zip(hosts, findings.plan_probes(), strict=True))

        def probe(host: str) -> dict[str, object]:
            targets = [dataclasses.asdict(target) for target in planned[host]]
            return {"nonce": nonce, "source": hosts.index(host), "targets": targets, "within_s": within_s}

        tried = all_or_raise(ask_all(by_host, "host.probe", probe), _SILENT)
    finally:
        with contextlib.suppress(SshError):
            ask_all(by_host, "host.listen", {"nonce": None, "name": ""})
    probes = [
        dataclasses.replace(each, source=place)
        for place, host in enumerate(hosts)
        for each in tried[host].facts["probes"]
    ]
    return dataclasses.replace(findings, probes=tuple(probes))

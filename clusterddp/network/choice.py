"""Chooses the network of a run from probes between its hosts, each one connection attempt.

A candidate is an address of the first host. Every other host connects to it by the interface of its route, whatever
the name, and must be reached at that interface. The best candidate by which all hosts reach each other is taken.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.network.interface import Link, LinkAddress, is_loopback

Outcome = Literal["reached", "no answer", "refused", "no way", "stuck", "stranger"]
"""`no way`: the kernel or a router reports no route; `stuck`: connected, and large packets are lost;
`stranger`: another machine has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNetwork:
    """The network of one host, as it reports it; it listens while it is probed."""

    host: str
    """Its name in the spec."""
    machine: str
    """The same for two names of one machine."""
    own_addresses: tuple[str, ...] | None
    """The addresses of the host's own name there; None: not resolved in time."""
    links: tuple[Link, ...]
    port: int
    """A port given by the kernel, as those of ranks are."""
    master_port: int | None = None
    """Of the first host: the master's port, or one of its range."""
    firewall: str | None = None
    """ufw, firewalld, or None: none was found."""

    def link(self, name: str) -> Link | None:
        return next((link for link in self.links if link.name == name), None)

    def owner(self, address: str | None) -> Link | None:
        """Find the interface that has an address."""
        return next((link for link in self.links for entry in link.addresses if entry.address == address), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One connection attempt, from a host to an address of another."""

    source: int
    target: int
    address: str
    port: int
    outcome: Outcome
    detail: str = ""
    """The kernel's error, or the name of the machine that answered."""
    left_from: str | None = None
    """The address that the source used."""
    seen_from: str | None = None
    """The source's address as the target saw it."""
    round_trip_ms: float | None = None

    @property
    def reached(self) -> bool:
        return self.outcome == "reached"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The network between the hosts of a gang, as it was probed."""

    hosts: tuple[HostNetwork, ...]
    """The master's host first; other fields refer to hosts by their index."""
    probes: tuple[Probe, ...]
    slow_names: tuple[tuple[int, str], ...] = ()
    """Hosts, and addresses of the master's host whose names take them over a second to resolve."""

    @property
    def on_one_machine(self) -> bool:
        return len({host.machine for host in self.hosts}) == 1

    def link_used(self, probe: Probe) -> Link | None:
        """Find the interface by which a probe left its host."""
        return self.hosts[probe.source].owner(probe.left_from)

    def shared_addresses(self) -> dict[str, tuple[str, ...]]:
        """Find the addresses that several machines have, and which are therefore ambiguous, with their hosts."""
        owners: dict[str, dict[str, str]] = {}
        for host in self.hosts:
            for address in (entry.address for link in host.links if not link.loopback for entry in link.addresses):
                owners.setdefault(address, {}).setdefault(host.machine, host.host)
        return {address: tuple(machines.values()) for address, machines in owners.items() if len(machines) > 1}

    def rows(self) -> list[dict[str, Any]]:
        """Return all probes as rows for -o json, with the names of hosts and interfaces."""
        rows = []
        for probe in self.probes:
            source, target = self.hosts[probe.source], self.hosts[probe.target]
            leaves_by, arrives_at = self.link_used(probe), target.owner(probe.address)
            rows.append(
                dataclasses.asdict(probe)
                | {
                    "source": source.host,
                    "target": target.host,
                    "leaves_by": leaves_by.name if leaves_by else None,
                    "interface": arrives_at.name if arrives_at else None,
                }
            )
        return rows


def usable_addresses(findings: Findings, interface: str | None = None) -> list[list[tuple[Link, LinkAddress]]]:
    """List for each host the addresses at which it may be reached, IPv4 first; of `interface` only, when it is named.

    Left out: addresses that are down, temporary, on several machines, or between the containers of one host (unless
    it is named).
    """
    shared = findings.shared_addresses()

    def usable(host: HostNetwork) -> list[tuple[Link, LinkAddress]]:
        found = [
            (link, entry)
            for link in host.links
            if link.up and not link.loopback and (link.name == interface if interface else not link.of_containers)
            for entry in link.addresses
            if entry.lasting and not is_loopback(entry.address) and entry.address not in shared
        ]
        return sorted(found, key=lambda pair: pair[1].is_ipv6)

    return [usable(host) for host in findings.hosts]


def plan_probes(findings: Findings, interface: str | None = None) -> list[list[tuple[int, str, int]]]:
    """List the probes of each host: (target, address, port).

    A star and a ring: the first host probes all others; each of them probes the first one and the next one.
    """
    usable = usable_addresses(findings, interface)
    last = len(findings.hosts) - 1
    probes = []
    for place in range(last + 1):
        targets = list(range(1, last + 1)) if place == 0 else [0, place + 1] if place < last else [0]
        probes.append(
            [
                (target, entry.address, port)
                for target in targets
                for _, entry in usable[target]
                for port in (findings.hosts[target].port, findings.hosts[target].master_port)
                if port is not None
            ]
        )
    return probes


TUNNELS = {"tun", "wireguard", "ipip", "gre", "gretap", "sit", "vti", "ip6tnl", "ip6gre", "vxlan", "dummy"}
_LINK_LOCAL = "169.254."


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An interface of a host, and its address there."""

    link: Link
    address: LinkAddress

    @property
    def reserve(self) -> int:
        """Its class, which counts before speed: 0 a cable, 1 wireless, 2 a tunnel or a link-local address."""
        if self.link.kind in TUNNELS or self.address.address.startswith(_LINK_LOCAL):
            return 2
        return int(self.link.wireless)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A network that may carry the gang, and its problems."""

    endpoints: dict[int, Endpoint]
    """By the index of the host; the first host's is the master's."""
    order: int = 0
    """Its index in the kernel's order, which decides last."""
    failed: tuple[Probe, ...] = ()
    """Required connections that failed."""
    detours: tuple[Probe, ...] = ()
    """Connections that left by another interface than the host's endpoint."""
    lost: tuple[int, ...] = ()
    """Hosts without an interface in it."""

    @property
    def works(self) -> bool:
        return not self.failed and not self.lost

    @property
    def master(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def speed_mbit_per_s(self) -> int:
        return min(endpoint.link.assumed_mbit_per_s for endpoint in self.endpoints.values())

    @property
    def merit(self) -> tuple[bool, int, int, int]:
        """The sort key, the least is the best: IPv4, cables, then speed."""
        reserve = max(endpoint.reserve for endpoint in self.endpoints.values())
        return self.master.address.is_ipv6, reserve, -self.speed_mbit_per_s, self.order


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The candidate that is taken, if there is one, and the others, the best first."""

    taken: Candidate | None
    others: tuple[Candidate, ...]
    interface: str | None = None
    """The interface that the user has named."""


def choose_network(findings: Findings, interface: str | None = None) -> Choice:
    """Choose the network by the findings; `interface`: only by this one, which the user has named."""
    usable = usable_addresses(findings, interface)
    index = {(probe.source, probe.target, probe.address, probe.port): probe for probe in findings.probes}
    judge = _Judge(findings, index, usable, interface)
    candidates = [
        judge.judge(Endpoint(link=link, address=address), order) for order, (link, address) in enumerate(usable[0])
    ]
    # Detours do not count when the user has named the interface.
    ranked = sorted(candidates, key=lambda one: (not one.works, bool(one.detours) and not interface, one.merit))
    taken = ranked[0] if ranked and ranked[0].works else None
    others = sorted((one for one in candidates if one is not taken), key=lambda one: one.merit)
    return Choice(taken=taken, others=tuple(others), interface=interface)


class _Judge:
    """Judges candidates by the probes."""

    def __init__(
        self,
        findings: Findings,
        probes: dict[tuple[int, int, str, int], Probe],
        usable: list[list[tuple[Link, LinkAddress]]],
        interface: str | None,
    ) -> None:
        self._findings = findings
        self._probes = probes
        self._usable = usable
        self._interface = interface

    def judge(self, master: Endpoint, order: int) -> Candidate:
        """Judge all connections that the gang needs for an address of the first host."""
        endpoints, lost = {0: master}, []
        for place in range(1, len(self._findings.hosts)):
            endpoint = self._endpoint_of(place, master)
            if endpoint is None:
                lost.append(place)
            else:
                endpoints[place] = endpoint
        needed = [(place, 0) for place in range(1, len(self._findings.hosts))]
        needed += [(0, place) for place in endpoints if place]
        needed += [(place - 1, place) for place in endpoints if place > 1 and place - 1 in endpoints]
        probes = [probe for source, target in needed for probe in self._tried(source, target, endpoints[target])]
        return Candidate(
            endpoints=endpoints,
            order=order,
            failed=tuple(probe for probe in probes if not probe.reached),
            detours=tuple(probe for probe in probes if probe.reached and self._is_detour(probe, endpoints)),
            lost=tuple(lost),
        )

    def _endpoint_of(self, place: int, master: Endpoint) -> Endpoint | None:
        """Find a host's endpoint: on the interface that leads to the master, or on the one that the user named."""
        link = None
        for probe in self._tried(place, 0, master):
            link = self._findings.link_used(probe) or link
            source = probe.left_from
        if self._interface:
            link = self._findings.hosts[place].link(self._interface)
        found = [
            Endpoint(link=one, address=address)
            for one, address in self._usable[place]
            if link and one.name == link.name and address.is_ipv6 == master.address.is_ipv6
        ]
        return next((endpoint for endpoint in found if endpoint.address.address == source), found[0] if found else None)

    def _tried(self, source: int, target: int, endpoint: Endpoint) -> list[Probe]:
        host = self._findings.hosts[target]
        address = endpoint.address.address
        return [
            self._probes.get((source, target, address, port))
            or Probe(source=source, target=target, address=address, port=port, outcome="no answer", detail="not tried")
            for port in (host.port, host.master_port)
            if port is not None
        ]

    def _is_detour(self, probe: Probe, endpoints: dict[int, Endpoint]) -> bool:
        link = self._findings.link_used(probe)
        same_machine = self._findings.hosts[probe.source].machine == self._findings.hosts[probe.target].machine
        return (
            probe.source in endpoints
            and not same_machine
            and (link is None or link.name != endpoints[probe.source].link.name)
        )

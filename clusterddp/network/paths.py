"""The networks of a gang's hosts as they report them, and the probes between them, each one connection attempt."""

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

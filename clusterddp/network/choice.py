"""The network of a run, chosen from probes between its hosts, and explained.

A candidate is an address of the first host. Every other host connects to it by the interface of its route, whatever
the name, and must be reached at that interface. The best candidate by which all hosts reach each other is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.errors import NetworkError
from clusterddp.network.interface import Link, LinkAddress, is_loopback

Outcome = Literal["reached", "no answer", "refused", "no way", "stuck", "stranger"]
"""`no way`: the kernel or a router reports no route; `stuck`: connected, and large packets are lost;
`stranger`: another machine has answered."""
_SHOWN = 4
"""How many candidates an error shows, and how many lines of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNetwork:
    """The network of one host, as it reports it; it listens while it is probed."""

    host: str
    """Its name in the spec."""
    machine: str
    """The same for two names of one machine."""
    links: tuple[Link, ...]
    port: int
    """A port given by the kernel, as those of ranks are."""
    master_port: int | None = None
    """Of the first host: the master's port, or one of its range."""

    def link(self, name: str) -> Link | None:
        return next((link for link in self.links if link.name == name), None)

    def owner(self, address: str | None) -> Link | None:
        """Find the interface that has an address."""
        return next((link for link in self.links for entry in link.addresses if entry.address == address), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An address to connect to, and the name that must answer there."""

    target: int
    address: str
    port: int
    name: str


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
    round_trip_ms: float | None = None

    def text(self) -> str:
        """Return the result as text."""
        texts = {
            "no way": self.detail or "no route",
            "stuck": "connected, but large packets are lost",
            "stranger": f"{self.detail or 'another machine'} answers there",
        }
        return texts.get(self.outcome, self.outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An address of the first host, and what the probes say of a run that meets there."""

    endpoints: dict[int, tuple[Link, LinkAddress]]
    """By the index of the host; the first host's is the master's."""
    failed: tuple[Probe, ...]
    """Required connections that failed."""
    detours: tuple[Probe, ...]
    """Connections that left by another interface than the host's endpoint."""
    lost: tuple[int, ...]
    """Hosts without an interface in it."""

    @property
    def works(self) -> bool:
        return not self.failed and not self.lost

    @property
    def link(self) -> Link:
        """The interface of the first host."""
        return self.endpoints[0][0]

    @property
    def master_addr(self) -> str:
        return self.endpoints[0][1].address

    @property
    def speed_mbit_per_s(self) -> int:
        return min(link.assumed_mbit_per_s for link, _ in self.endpoints.values())

    @property
    def merit(self) -> tuple[bool, int, int]:
        """The sort key, the least is the best: IPv4, then cables before wireless before tunnels, then speed."""
        reserve = max(
            2 if link.is_tunnel or address.address.startswith("169.254.") else int(link.wireless)
            for link, address in self.endpoints.values()
        )
        return ":" in self.master_addr, reserve, -self.speed_mbit_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The network between the hosts of a gang, as it was probed."""

    hosts: tuple[HostNetwork, ...]
    """The master's host first; other fields refer to hosts by their index."""
    interface: str | None = None
    """The interface that the user has named: no other one is probed or taken."""
    probes: tuple[Probe, ...] = ()

    @property
    def on_one_machine(self) -> bool:
        return len({host.machine for host in self.hosts}) == 1

    def link_used(self, probe: Probe) -> Link | None:
        """Find the interface by which a probe left its host."""
        return self.hosts[probe.source].owner(probe.left_from)

    def shared_addresses(self) -> set[str]:
        """Find the addresses that several machines have, and which are therefore ambiguous."""
        owners: dict[str, set[str]] = {}
        for host in self.hosts:
            for address in (entry.address for link in host.links if not link.loopback for entry in link.addresses):
                owners.setdefault(address, set()).add(host.machine)
        return {address for address, machines in owners.items() if len(machines) > 1}

    def usable_addresses(self, place: int) -> list[tuple[Link, LinkAddress]]:
        """List the addresses at which a host may be reached, IPv4 first.

        Left out: addresses that are down, temporary, on several machines, or between the containers of one host
        (unless the user has named the interface).
        """
        shared = self.shared_addresses()
        found = [
            (link, entry)
            for link in self.hosts[place].links
            if link.up and not link.loopback
            if (link.name == self.interface if self.interface else not link.of_containers)
            for entry in link.addresses
            if entry.lasting and not is_loopback(entry.address) and entry.address not in shared
        ]
        return sorted(found, key=lambda pair: pair[1].is_ipv6)

    def plan_probes(self) -> list[list[Target]]:
        """List what each host probes.

        A star and a ring: the first host probes all others; each of them probes the first one and the next one.
        """
        wanted = [
            [
                Target(target=place, address=entry.address, port=port, name=host.host)
                for _, entry in self.usable_addresses(place)
                for port in (host.port, host.master_port)
                if port is not None
            ]
            for place, host in enumerate(self.hosts)
        ]
        last = len(self.hosts) - 1
        targets = [range(1, last + 1), *([0, place + 1] if place < last else [0] for place in range(1, last + 1))]
        return [[probe for target in each for probe in wanted[target]] for each in targets]

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

    def candidates(self) -> list[Candidate]:
        """Judge each usable address of the first host by the probes, the best first."""
        found = [self._judge(link, address) for link, address in self.usable_addresses(0)]
        # Detours do not count when the user has named the interface.
        return sorted(found, key=lambda one: (not one.works, bool(one.detours) and not self.interface, one.merit))

    def _judge(self, link: Link, address: LinkAddress) -> Candidate:
        """Judge all connections that the gang needs for an address of the first host."""
        endpoints = {0: (link, address)}
        others = range(1, len(self.hosts))
        for place in others:
            if endpoint := self._endpoint_of(place, address):
                endpoints[place] = endpoint
        needed = [(place, 0) for place in others] + [(0, place) for place in endpoints if place]
        needed += [(place - 1, place) for place in endpoints if place > 1 and place - 1 in endpoints]
        probes = [
            probe for source, target in needed for probe in self._probes(source, target, endpoints[target][1].address)
        ]
        between = [
            probe
            for probe in probes
            if self.hosts[probe.source].machine != self.hosts[probe.target].machine and probe.source in endpoints
        ]
        detours = (probe for probe in between if self.link_used(probe) != endpoints[probe.source][0])
        return Candidate(
            endpoints=endpoints,
            failed=tuple(probe for probe in probes if probe.outcome != "reached"),
            detours=tuple(probe for probe in detours if probe.outcome == "reached"),
            lost=tuple(place for place in others if place not in endpoints),
        )

    def _endpoint_of(self, place: int, master: LinkAddress) -> tuple[Link, LinkAddress] | None:
        """Find a host's endpoint: on the interface that leads to the master, or on the one that the user named."""
        sources = [probe.left_from for probe in self._probes(place, 0, master.address)]
        host = self.hosts[place]
        used = [host.link(self.interface)] if self.interface else [host.owner(source) for source in sources]
        found = [
            (link, entry)
            for link, entry in self.usable_addresses(place)
            if link in used and entry.is_ipv6 == master.is_ipv6
        ]
        return min(found, key=lambda endpoint: endpoint[1].address not in sources, default=None)

    def _probes(self, source: int, target: int, address: str) -> list[Probe]:
        return [
            probe for probe in self.probes if (probe.source, probe.target, probe.address) == (source, target, address)
        ]

    # What users read of it.

    def explain(self, candidates: list[Candidate]) -> str:
        """Return why the first of the candidates was taken."""
        taken, hosts = candidates[0], self.spell(range(len(self.hosts)))
        if self.interface:
            return f"network.interface names it, {hosts} reach each other by it"
        rivals = [one for one in candidates if one.works and one.link.name != taken.link.name]
        if not rivals:
            return f"the only network by which {hosts} reach each other"
        fastest = all(taken.speed_mbit_per_s > one.speed_mbit_per_s for one in rivals)
        number = 1 + len({one.link.name for one in rivals})
        return f"the {'fastest' if fastest else 'best'} of {number} networks by which {hosts} reach each other"

    def warnings(self, candidates: list[Candidate], env: Mapping[str, str]) -> Iterator[str]:
        """Say what may surprise about the first of the candidates, and why networks that are no worse are not used.

        `env`: the user's variables, which override the choice.
        """
        taken, *others = candidates
        for one in others:
            if one.link.name == taken.link.name or not (
                one.merit <= taken.merit or any(self._overlap(probe) for probe in one.detours)
            ):
                continue
            if problem := next(self._problems(one), None) or next(map(self._detour_text, one.detours), None):
                subject = f"{one.link.name} of {self.hosts[0].host} ({one.master_addr}, {speed_text(one.link)})"
                yield f"{subject} is not used: {problem}"
        yield from map(self._detour_text, taken.detours[:1])
        for text in (speed_text, lambda link: f"MTU {link.mtu}"):
            by_text: dict[str, list[int]] = {}
            for place, (link, _) in sorted(taken.endpoints.items()):
                by_text.setdefault(text(link), []).append(place)
            if len(by_text) > 1:
                parts = [f"{value} on {self.spell(where)}" for value, where in by_text.items()]
                yield f"the interfaces of the hosts differ: {'; '.join(parts)}"
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            value = env.get(variable, "")
            exact = variable.startswith("GLOO") or value.startswith("=")
            names = value.removeprefix("=").split(",")
            missing = [
                place
                for place, host in enumerate(self.hosts)
                if not any(link.name in names if exact else link.name.startswith(tuple(names)) for link in host.links)
            ]
            if value and not value.startswith("^") and missing:
                yield f"env.{variable} is {value}, and {self.spell(missing)} has no such interface"

    def diagnose(self, candidates: list[Candidate]) -> NetworkError:
        """Return the error for candidates of which none works."""
        missing = [place for place in range(len(self.hosts)) if not self.usable_addresses(place)]
        if missing and (self.interface or 0 in missing):
            subject = f"network.interface {self.interface} does not lead" if self.interface else "no interface leads"
            lines = [f"{self.hosts[place].host} has {self._describe(place)}" for place in missing[:_SHOWN]]
            return NetworkError(
                "\n  ".join([f"{subject} to {self.spell(missing)}", *lines]),
                hint="network.interface: auto chooses on each host the one that reaches the others, names may differ"
                if self.interface
                else "network.interface: NAME takes one that is not used by default",
            )
        candidates = sorted(candidates, key=lambda one: (len(one.lost) + len(one.failed), one.merit))
        hosts = self.spell(range(len(self.hosts)))
        lines = [
            f"network.interface {self.interface} does not connect {hosts}"
            if self.interface
            else f"there is no network by which {hosts} reach each other"
        ]
        for one in candidates[:_SHOWN]:
            problems = list(self._problems(one))
            more = len(problems) - _SHOWN
            lines.append(f"{one.link.name} {one.master_addr} of {self.hosts[0].host}:")
            lines += [f"  {line}" for line in problems[:_SHOWN]] + ([f"  and {more} more"] if more > 0 else [])
        return NetworkError("\n  ".join(lines), hint=self._hint(candidates[0]))

    def spell(self, places: Iterable[int]) -> str:
        """Name hosts: all 3 hosts, gpu01, or gpu01, gpu02 and 5 more."""
        names = [self.hosts[place].host for place in dict.fromkeys(places)]
        if len(names) == len(self.hosts) and len(names) > 1:
            return "both hosts" if len(names) == 2 else f"all {len(names)} hosts"
        return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"

    def _problems(self, candidate: Candidate) -> Iterator[str]:
        """List the failures of a candidate, equal ones of several hosts together."""
        sources: dict[tuple[int, str, int, str], list[int]] = {}
        for probe in candidate.failed:
            sources.setdefault((probe.target, probe.address, probe.port, probe.text()), []).append(probe.source)
        for (target, address, port, outcome), places in sources.items():
            link = self.hosts[target].owner(address)
            there = f"{self.hosts[target].host} {link.name if link else ''} {address} port {port}"
            yield f"{self.spell(places)} -> {there}: {outcome}"
        blamed = {probe.source for probe in candidate.failed}
        for place in (place for place in candidate.lost if place not in blamed):
            yield f"{self.hosts[place].host} has no interface of its own into it: {self._describe(place)}"

    def _hint(self, candidate: Candidate) -> str:
        """Return the fix."""
        for probe in candidate.failed:
            if hint := self._hint_of_probe(probe):
                return hint
        if not candidate.failed:
            return "network.interface: NAME takes one that is not used by default"
        first, head = candidate.failed[0], self.hosts[0]
        if not candidate.lost and {(probe.target, probe.port) for probe in candidate.failed} == {(0, head.master_port)}:
            return (
                f"port {head.port} of {head.host} is reached, and port {first.port} is not: "
                "network.master_port: PORT names one that is open in the firewall"
            )
        # The host in most of the failures; of equal ones the one that is not reached.
        places = [place for probe in candidate.failed for place in (probe.target, probe.source)]
        culprit = max(dict.fromkeys(places), key=places.count)
        subnet = candidate.endpoints.get(culprit, candidate.endpoints[0])[1].subnet
        return (
            f"does a firewall on {self.hosts[culprit].host}, or before it, let every TCP port in from {subnet}? "
            "Ranks listen on ports that the kernel gives them"
        )

    def _hint_of_probe(self, probe: Probe) -> str | None:
        """Return the fix where one probe shows the cause."""
        source, link = self.hosts[probe.source].host, self.link_used(probe)
        if found := self._overlap(probe):
            used, other, subnet = found
            return (
                f"on {source} {used.name} and {other.name} both have the subnet {subnet}, and what goes to "
                f"{probe.address} leaves by {used.name} (ip route get {probe.address}); give one of them another "
                f"subnet, or take it down"
            )
        if probe.outcome == "stranger":
            return (
                f"two machines have the address {probe.address}, or something on the way answers for "
                f"{self.hosts[probe.target].host}; ip neigh show {probe.address} on {source}"
            )
        if probe.outcome == "stuck" and link:
            return (
                f"{source} {link.name} has MTU {link.mtu}, and what is between lets less through: ping -M do "
                f"-s {link.mtu - 28} {probe.address} there; set MTU 1500 on all hosts, or {link.mtu} on the switch"
            )
        if probe.outcome == "no way" and probe.left_from is None:
            return f"on {source}: ip route get {probe.address}"
        return None

    def _overlap(self, probe: Probe) -> tuple[Link, Link, str] | None:
        """Find another interface of the source with the target's subnet: used one, other one, subnet."""
        used, reserved = self.link_used(probe), self.hosts[probe.target].owner(probe.address)
        if used is None or reserved is None:
            return None
        subnet = next(entry.subnet for entry in reserved.addresses if entry.address == probe.address)
        with_it = [
            link
            for link in self.hosts[probe.source].links
            if link.up and subnet in {entry.subnet for entry in link.addresses}
        ]
        other = next((link for link in with_it if link is not used), None)
        return (used, other, subnet) if other and used in with_it else None

    def _detour_text(self, probe: Probe) -> str:
        source, used = self.hosts[probe.source].host, self.link_used(probe)
        detour = f"what {source} sends to {probe.address} leaves by {used.name if used else probe.left_from}"
        found = self._overlap(probe)
        return detour + (f", which has the subnet {found[2]} as {found[1].name} has" if found else "")

    def _describe(self, place: int) -> str:
        """List the interfaces of a host, with the reason for each that is not usable."""
        shared = self.shared_addresses()
        described = []
        for link in self.hosts[place].links:
            addresses = [entry.address for entry in link.addresses]
            if link.loopback or (link.of_containers and not addresses):
                continue
            if not link.up:
                addresses.append("down")
            elif shared.issuperset(addresses):
                addresses.append("the same on other hosts" if addresses else "no address")
            elif link.of_containers:
                addresses.append("between containers")
            described.append(f"{link.name} ({', '.join(addresses)})")
        return ", ".join(described) or "none but the loopback"


def speed_text(link: Link) -> str:
    speed = link.speed_mbit_per_s
    if speed is None:
        return "speed not known"
    return f"{speed / 1000:g} Gb/s" if speed >= 1000 else f"{speed} Mb/s"

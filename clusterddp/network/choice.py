"""The choice of the network that carries a gang: for each address of the first host, who reaches whom by what.

A candidate is an address of the first host. Each of the others goes there by the interface of its route, whatever its
name, and is reached there in turn. The best candidate by which all reach each other is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterddp.network.interface import Link, LinkAddress
from clusterddp.network.paths import Findings, Way, usable_addresses

TUNNELS = {"tun", "wireguard", "ipip", "gre", "gretap", "sit", "vti", "ip6tnl", "ip6gre", "vxlan", "dummy"}
_LINK_LOCAL = "169.254."


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """Where a host would stand: an interface, and its address there."""

    link: Link
    address: LinkAddress

    @property
    def reserve(self) -> int:
        """How little it is liked, whatever its speed: 0 a cable, 1 a radio, 2 a tunnel or an address of last resort."""
        if self.link.kind in TUNNELS or self.address.address.startswith(_LINK_LOCAL):
            return 2
        return int(self.link.wireless)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A network that may carry the gang, and everything that speaks against it."""

    grounds: dict[int, Ground]
    """By the place of the host; the first host's is the master's."""
    order: int = 0
    """Which one it is in the kernel's order: what decides last."""
    failed: tuple[Way, ...] = ()
    """What had to be reached, and was not."""
    detours: tuple[Way, ...] = ()
    """What was reached by another interface than the host's."""
    lost: tuple[int, ...] = ()
    """Hosts that have no way into it."""

    @property
    def works(self) -> bool:
        return not self.failed and not self.lost

    @property
    def master(self) -> Ground:
        return self.grounds[0]

    @property
    def speed_mbit_per_s(self) -> int:
        return min(ground.link.assumed_mbit_per_s for ground in self.grounds.values())

    @property
    def merit(self) -> tuple[bool, int, int, int]:
        """How good it would be if it worked, the least the best: IPv4, cables, then speed."""
        reserve = max(ground.reserve for ground in self.grounds.values())
        return self.master.address.is_ipv6, reserve, -self.speed_mbit_per_s, self.order


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The candidate that is taken, if there is one, and the others, the most deserving first."""

    taken: Candidate | None
    others: tuple[Candidate, ...]
    interface: str | None = None
    """The one that the user has named."""


def choose_network(findings: Findings, interface: str | None = None) -> Choice:
    """Choose from what was found out; by `interface` only, when the user names it."""
    usable = usable_addresses(findings, interface)
    index = {(way.source, way.target, way.address, way.port): way for way in findings.ways}
    judge = _Judge(findings, index, usable, interface)
    candidates = [
        judge.judge(Ground(link=link, address=address), order) for order, (link, address) in enumerate(usable[0])
    ]
    # A detour that the user has ordered is none of our business.
    ranked = sorted(candidates, key=lambda one: (not one.works, bool(one.detours) and not interface, one.merit))
    taken = ranked[0] if ranked and ranked[0].works else None
    others = sorted((one for one in candidates if one is not taken), key=lambda one: one.merit)
    return Choice(taken=taken, others=tuple(others), interface=interface)


class _Judge:
    """Judges candidates by the ways that were tried."""

    def __init__(
        self,
        findings: Findings,
        ways: dict[tuple[int, int, str, int], Way],
        usable: list[list[tuple[Link, LinkAddress]]],
        interface: str | None,
    ) -> None:
        self._findings = findings
        self._ways = ways
        self._usable = usable
        self._interface = interface

    def judge(self, master: Ground, order: int) -> Candidate:
        """Look at everything that the gang needs for an address of the first host."""
        grounds, lost = {0: master}, []
        for place in range(1, len(self._findings.hosts)):
            ground = self._ground_of(place, master)
            if ground is None:
                lost.append(place)
            else:
                grounds[place] = ground
        needed = [(place, 0) for place in range(1, len(self._findings.hosts))]
        needed += [(0, place) for place in grounds if place]
        needed += [(place - 1, place) for place in grounds if place > 1 and place - 1 in grounds]
        ways = [way for source, target in needed for way in self._tried(source, target, grounds[target])]
        return Candidate(
            grounds=grounds,
            order=order,
            failed=tuple(way for way in ways if not way.reached),
            detours=tuple(way for way in ways if way.reached and self._is_detour(way, grounds)),
            lost=tuple(lost),
        )

    def _ground_of(self, place: int, master: Ground) -> Ground | None:
        """Find where a host stands: the interface by which it goes to the master, or the one that the user named."""
        link = None
        for way in self._tried(place, 0, master):
            link = self._findings.link_used(way) or link
            source = way.left_from
        if self._interface:
            link = self._findings.hosts[place].link(self._interface)
        found = [
            Ground(link=one, address=address)
            for one, address in self._usable[place]
            if link and one.name == link.name and address.is_ipv6 == master.address.is_ipv6
        ]
        return next((ground for ground in found if ground.address.address == source), found[0] if found else None)

    def _tried(self, source: int, target: int, ground: Ground) -> list[Way]:
        host = self._findings.hosts[target]
        address = ground.address.address
        return [
            self._ways.get((source, target, address, port))
            or Way(source=source, target=target, address=address, port=port, outcome="no answer", detail="not tried")
            for port in (host.port, host.master_port)
            if port is not None
        ]

    def _is_detour(self, way: Way, grounds: dict[int, Ground]) -> bool:
        link = self._findings.link_used(way)
        same_machine = self._findings.hosts[way.source].machine == self._findings.hosts[way.target].machine
        return (
            way.source in grounds and not same_machine and (link is None or link.name != grounds[way.source].link.name)
        )

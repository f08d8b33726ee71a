"""A choice of the network in words: why this one, and what people may want to know of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterddp.network.choice import Candidate, Choice
from clusterddp.network.interface import Link, is_loopback
from clusterddp.network.paths import Findings, Way, usable_addresses

_RESERVES = ("a cable", "a radio", "a tunnel or an address of last resort")


def say_why(findings: Findings, choice: Choice) -> dict[int, str]:
    """Say for each host, by its place, why its interface was taken."""
    taken = choice.taken
    assert taken is not None
    reason = _reason(findings, choice, taken)
    return {place: f"{reason}; {speed_words(ground.link)}" for place, ground in sorted(taken.grounds.items())}


def say_notes(findings: Findings, choice: Choice) -> Iterator[str]:
    """Say what is odd, the most important first."""
    taken = choice.taken
    assert taken is not None
    for candidate in choice.others:
        if candidate.master.link.name == taken.master.link.name:
            continue
        # What would have been taken otherwise, and what looks like a mistake of whoever gave out the addresses.
        missed = candidate.merit < taken.merit or any(overlap(findings, way) for way in candidate.detours)
        if missed and (problem := first_problem(findings, candidate)):
            place = f"{candidate.master.link.name} of {findings.hosts[0].host}"
            address, speed = candidate.master.address.address, speed_words(candidate.master.link)
            yield f"{place} ({address}, {speed}) is not used: {problem}"
    for way in taken.detours[:1]:
        yield _say_detour(findings, way)
    yield from _say_differences(findings, taken)
    yield from _say_translations(findings, taken)
    yield from _say_slow_names(findings, taken)


def say_oddities(findings: Findings) -> Iterator[str]:
    """Say what does no harm here, and misleads programs that look for an address themselves."""
    yield from say_shared(findings)
    misled = [host.host for host in findings.hosts if host.own_addresses and all(map(is_loopback, host.own_addresses))]
    if misled and not findings.on_one_machine:
        meaning = next(host.own_addresses[0] for host in findings.hosts if host.own_addresses and host.host in misled)
        yield (
            f"the own name of {spell_hosts(findings, misled)} means {meaning} there (/etc/hosts); "
            "the ranks are told addresses instead"
        )
    slow = [host.host for host in findings.hosts if host.own_addresses is None]
    if slow:
        yield f"{spell_hosts(findings, slow)}: looking up the own name takes over a second; is the name server gone?"


def say_shared(findings: Findings) -> Iterator[str]:
    """Name the addresses that several machines have."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for address, hosts in findings.shared_addresses().items():
        link = next(host.owner(address) for host in findings.hosts if host.host == hosts[0])
        shared.setdefault(hosts, []).append(f"{link.name} {address}" if link else address)
    for hosts, addresses in shared.items():
        yield f"{', '.join(addresses)}: the same on {spell_hosts(findings, hosts)}, so it leads nowhere and is not used"


def say_strange_names(findings: Findings, env: Mapping[str, str]) -> Iterator[str]:
    """Say which hosts lack an interface that the user's own variables name; these go before what is chosen here."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = env.get(variable, "")
        exact = variable.startswith("GLOO") or value.startswith("=")
        wanted = value.removeprefix("=").split(",")
        if not value or value.startswith("^"):
            continue
        missing = [
            host.host
            for host in findings.hosts
            if not any(
                link.name == name if exact else link.name.startswith(name) for link in host.links for name in wanted
            )
        ]
        if missing:
            yield f"env.{variable} is {value}, and {spell_hosts(findings, missing)} has no such interface"


def first_problem(findings: Findings, candidate: Candidate) -> str | None:
    """Say what speaks against a candidate, the first thing only."""
    for way in candidate.failed:
        hosts = findings.hosts
        return f"{hosts[way.source].host} -> {hosts[way.target].host} {way.address} port {way.port}: {say_outcome(way)}"
    for place in candidate.lost:
        return f"{findings.hosts[place].host} has no way into it"
    for way in candidate.detours:
        return _say_detour(findings, way)
    return None


def say_outcome(way: Way) -> str:
    """Say what came of a try."""
    words = {
        "reached": "reached",
        "no answer": "no answer",
        "refused": "refused",
        "no way": way.detail or "no way there",
        "stuck": "connected, but large packets are lost",
        "stranger": f"{way.detail or 'somebody else'} answers there",
    }
    return words[way.outcome]


def speed_words(link: Link) -> str:
    speed = link.speed_mbit_per_s
    if speed is None:
        return "speed not known"
    return f"{speed / 1000:g} Gb/s" if speed >= 1000 else f"{speed} Mb/s"


def spell_hosts(findings: Findings, hosts: Iterable[str]) -> str:
    """Name hosts: all 3 hosts, gpu01, or gpu01, gpu02 and 5 more."""
    names = list(dict.fromkeys(hosts))
    if len(names) == len(findings.hosts) and len(names) > 1:
        return "both hosts" if len(names) == 2 else f"all {len(names)} hosts"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def overlap(findings: Findings, way: Way) -> tuple[Link, Link, str] | None:
    """Find the other interface of the source that has the target's subnet as well: used one, other one, subnet."""
    used = findings.link_used(way)
    reserved = findings.hosts[way.target].owner(way.address)
    subnet = (
        next((entry.subnet for entry in reserved.addresses if entry.address == way.address), "") if reserved else ""
    )
    if used is None or subnet not in _subnets(used):
        return None
    links = findings.hosts[way.source].links
    other = next((link for link in links if link.up and link is not used and subnet in _subnets(link)), None)
    return (used, other, subnet) if other else None


def _reason(findings: Findings, choice: Choice, taken: Candidate) -> str:
    everybody = spell_hosts(findings, [host.host for host in findings.hosts])
    if choice.interface:
        return f"network.interface names it, {everybody} reach each other by it"
    rivals = [one for one in choice.others if one.works and one.master.link.name != taken.master.link.name]
    number = 1 + len({one.master.link.name for one in rivals})
    if not rivals:
        return f"the only network by which {everybody} reach each other"
    rival = rivals[0]
    if all(taken.speed_mbit_per_s > one.speed_mbit_per_s for one in rivals):
        return f"the fastest of {number} networks by which {everybody} reach each other"
    reserve = max(ground.reserve for ground in rival.grounds.values())
    if reserve > taken.merit[1]:
        return f"{everybody} reach each other by it, and {rival.master.link.name} is {_RESERVES[reserve]}"
    if rival.detours and not taken.detours:
        return f"{everybody} reach each other by it; what goes to {rival.master.link.name} leaves by another interface"
    return f"the first of {number} networks by which {everybody} reach each other"


def _say_detour(findings: Findings, way: Way) -> str:
    source, used = findings.hosts[way.source].host, findings.link_used(way)
    words = f"what {source} sends to {way.address} leaves by {used.name if used else way.left_from}"
    found = overlap(findings, way)
    return words + (f", which has the subnet {found[2]} as {found[1].name} has" if found else "")


def _say_differences(findings: Findings, taken: Candidate) -> Iterator[str]:
    for words in (speed_words, lambda link: f"MTU {link.mtu}"):
        by_words: dict[str, list[str]] = {}
        for place, ground in sorted(taken.grounds.items()):
            name = f"{findings.hosts[place].host} {ground.link.name}"
            by_words.setdefault(words(ground.link), []).append(name)
        if len(by_words) > 1:
            parts = [f"{said} on {_few(names)}" for said, names in by_words.items()]
            yield f"the interfaces differ: {'; '.join(parts)}"


def _say_translations(findings: Findings, taken: Candidate) -> Iterator[str]:
    grounds = {place: ground.address.address for place, ground in taken.grounds.items()}
    for way in findings.ways:
        if way.reached and way.address == grounds.get(way.target) and way.seen_from != way.left_from:
            source, target = findings.hosts[way.source].host, findings.hosts[way.target].host
            yield f"{target} sees {source} as {way.seen_from}, not {way.left_from}: addresses are translated on the way"
            return


def _say_slow_names(findings: Findings, taken: Candidate) -> Iterator[str]:
    master = taken.master.address.address
    slow = [findings.hosts[place].host for place, address in findings.slow_names if address == master]
    if slow:
        yield (
            f"{spell_hosts(findings, slow)}: looking up the name of {master} takes over a second, and torch does so "
            "when a rank connects; is the name server gone? A line for this address in /etc/hosts there helps"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _subnets(link: Link) -> set[str]:
    return {entry.subnet for entry in link.addresses}


def describe_host(findings: Findings, place: int) -> str:
    """List the interfaces of a host, and why those that are not usable are not."""
    usable = {link.name for link, _ in usable_addresses(findings)[place]}
    shared = set(findings.shared_addresses())
    words = []
    for link in findings.hosts[place].links:
        addresses = [entry.address for entry in link.addresses]
        if link.loopback or (link.of_containers and not addresses):
            continue
        reason = [] if link.name in usable else [_why_unusable(link, set(addresses), shared)]
        words.append(f"{link.name} ({', '.join([*addresses[:2], *reason])})")
    return ", ".join(words) or "none but the loopback"


def _why_unusable(link: Link, addresses: set[str], shared: set[str]) -> str:
    if not link.up:
        return "down"
    if not addresses:
        return "no address"
    if addresses <= shared:
        return "the same on other hosts"
    return "between containers" if link.of_containers else "its addresses do not last"

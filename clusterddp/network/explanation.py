"""Explain the choice of a network: why it was taken, and problems of the others that users may want to fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterddp.network.choice import Candidate, Choice
from clusterddp.network.interface import Link
from clusterddp.network.paths import Findings, Probe, usable_addresses

_RESERVES = ("a cable", "wireless", "a tunnel or a link-local address")


def explain_choice(findings: Findings, choice: Choice) -> dict[int, str]:
    """Return for each host, by its index, why its interface was taken."""
    taken = choice.taken
    assert taken is not None
    reason = _reason(findings, choice, taken)
    return {place: f"{reason}; {speed_text(endpoint.link)}" for place, endpoint in sorted(taken.endpoints.items())}


def warn_of_choice(findings: Findings, choice: Choice) -> Iterator[str]:
    """Warn of problems that users may want to fix, the most important first."""
    taken = choice.taken
    assert taken is not None
    for candidate in choice.others:
        if candidate.master.link.name == taken.master.link.name:
            continue
        # A better network that failed, or one whose addresses look misconfigured.
        missed = candidate.merit < taken.merit or any(overlap(findings, probe) for probe in candidate.detours)
        if missed and (problem := first_problem(findings, candidate)):
            place = f"{candidate.master.link.name} of {findings.hosts[0].host}"
            address, speed = candidate.master.address.address, speed_text(candidate.master.link)
            yield f"{place} ({address}, {speed}) is not used: {problem}"
    for probe in taken.detours[:1]:
        yield _detour_text(findings, probe)
    yield from _warn_of_differences(findings, taken)
    yield from _warn_of_translation(findings, taken)
    yield from _warn_of_slow_names(findings, taken)


def warn_of_shared_addresses(findings: Findings) -> Iterator[str]:
    """Warn of addresses that several machines have."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for address, hosts in findings.shared_addresses().items():
        link = next(host.owner(address) for host in findings.hosts if host.host == hosts[0])
        shared.setdefault(hosts, []).append(f"{link.name} {address}" if link else address)
    for hosts, addresses in shared.items():
        yield f"{', '.join(addresses)}: the same on {spell_hosts(findings, hosts)}, so it is ambiguous and not used"


def warn_of_missing_interfaces(findings: Findings, env: Mapping[str, str]) -> Iterator[str]:
    """Warn of hosts that lack an interface named by the user's own variables, which override the choice made here."""
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
    """Return the first problem of a candidate."""
    for probe in candidate.failed:
        hosts = findings.hosts
        target = f"{hosts[probe.target].host} {probe.address} port {probe.port}"
        return f"{hosts[probe.source].host} -> {target}: {outcome_text(probe)}"
    for place in candidate.lost:
        return f"{findings.hosts[place].host} has no interface in it"
    for probe in candidate.detours:
        return _detour_text(findings, probe)
    return None


def outcome_text(probe: Probe) -> str:
    """Return the result of a probe as text."""
    texts = {
        "reached": "reached",
        "no answer": "no answer",
        "refused": "refused",
        "no way": probe.detail or "no route",
        "stuck": "connected, but large packets are lost",
        "stranger": f"{probe.detail or 'another machine'} answers there",
    }
    return texts[probe.outcome]


def speed_text(link: Link) -> str:
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


def overlap(findings: Findings, probe: Probe) -> tuple[Link, Link, str] | None:
    """Find another interface of the source with the target's subnet: used one, other one, subnet."""
    used = findings.link_used(probe)
    reserved = findings.hosts[probe.target].owner(probe.address)
    subnet = (
        next((entry.subnet for entry in reserved.addresses if entry.address == probe.address), "") if reserved else ""
    )
    if used is None or subnet not in _subnets(used):
        return None
    links = findings.hosts[probe.source].links
    other = next((link for link in links if link.up and link is not used and subnet in _subnets(link)), None)
    return (used, other, subnet) if other else None


def _reason(findings: Findings, choice: Choice, taken: Candidate) -> str:
    hosts = spell_hosts(findings, [host.host for host in findings.hosts])
    if choice.interface:
        return f"network.interface names it, {hosts} reach each other by it"
    rivals = [one for one in choice.others if one.works and one.master.link.name != taken.master.link.name]
    number = 1 + len({one.master.link.name for one in rivals})
    if not rivals:
        return f"the only network by which {hosts} reach each other"
    rival = rivals[0]
    if all(taken.speed_mbit_per_s > one.speed_mbit_per_s for one in rivals):
        return f"the fastest of {number} networks by which {hosts} reach each other"
    reserve = max(endpoint.reserve for endpoint in rival.endpoints.values())
    if reserve > taken.merit[1]:
        return f"{hosts} reach each other by it, and {rival.master.link.name} is {_RESERVES[reserve]}"
    if rival.detours and not taken.detours:
        return f"{hosts} reach each other by it; what goes to {rival.master.link.name} leaves by another interface"
    return f"the first of {number} networks by which {hosts} reach each other"


def _detour_text(findings: Findings, probe: Probe) -> str:
    source, used = findings.hosts[probe.source].host, findings.link_used(probe)
    detour = f"what {source} sends to {probe.address} leaves by {used.name if used else probe.left_from}"
    found = overlap(findings, probe)
    return detour + (f", which has the subnet {found[2]} as {found[1].name} has" if found else "")


def _warn_of_differences(findings: Findings, taken: Candidate) -> Iterator[str]:
    for text in (speed_text, lambda link: f"MTU {link.mtu}"):
        by_text: dict[str, list[str]] = {}
        for place, endpoint in sorted(taken.endpoints.items()):
            name = f"{findings.hosts[place].host} {endpoint.link.name}"
            by_text.setdefault(text(endpoint.link), []).append(name)
        if len(by_text) > 1:
            parts = [f"{value} on {_few(names)}" for value, names in by_text.items()]
            yield f"the interfaces differ: {'; '.join(parts)}"


def _warn_of_translation(findings: Findings, taken: Candidate) -> Iterator[str]:
    endpoints = {place: endpoint.address.address for place, endpoint in taken.endpoints.items()}
    for probe in findings.probes:
        if probe.reached and probe.address == endpoints.get(probe.target) and probe.seen_from != probe.left_from:
            source, target = findings.hosts[probe.source].host, findings.hosts[probe.target].host
            seen = f"{target} sees {source} as {probe.seen_from}, not {probe.left_from}"
            yield f"{seen}: addresses are translated on the way"
            return


def _warn_of_slow_names(findings: Findings, taken: Candidate) -> Iterator[str]:
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
    """List the interfaces of a host, with the reason for each that is not usable."""
    usable = {link.name for link, _ in usable_addresses(findings)[place]}
    shared = set(findings.shared_addresses())
    described = []
    for link in findings.hosts[place].links:
        addresses = [entry.address for entry in link.addresses]
        if link.loopback or (link.of_containers and not addresses):
            continue
        reason = [] if link.name in usable else [_why_unusable(link, set(addresses), shared)]
        described.append(f"{link.name} ({', '.join([*addresses[:2], *reason])})")
    return ", ".join(described) or "none but the loopback"


def _why_unusable(link: Link, addresses: set[str], shared: set[str]) -> str:
    if not link.up:
        return "down"
    if not addresses:
        return "no address"
    if addresses <= shared:
        return "the same on other hosts"
    return "between containers" if link.of_containers else "only temporary addresses"

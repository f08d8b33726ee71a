"""Explains the choice of a network: why it was taken, or why none carries the run, with the tried connections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterddp.errors import NetworkError
from clusterddp.network.choice import Candidate, Choice, Findings, Probe, usable_addresses
from clusterddp.network.interface import Link

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


_CANDIDATES_SHOWN = 4
_LINES_SHOWN = 4


def diagnose(findings: Findings, choice: Choice, master_port: int | None = None) -> NetworkError:
    """Return the error for a choice without a network; `master_port`: the one that the user named."""
    if unusable := _explain_unusable(findings, choice.interface):
        return unusable
    candidates = sorted(choice.others, key=lambda one: (len(one.lost) + len(one.failed), one.merit))
    best = candidates[0]
    if _only_master_port(findings, best):
        return _explain_master_port(findings, best, master_port)
    hosts = spell_hosts(findings, [host.host for host in findings.hosts])
    lines = [
        f"network.interface {choice.interface} does not connect {hosts}"
        if choice.interface
        else f"there is no network by which {hosts} reach each other"
    ]
    for candidate in candidates[:_CANDIDATES_SHOWN]:
        lines.append(f"{candidate.master.link.name} {candidate.master.address.address} of {findings.hosts[0].host}:")
        lines += [f"  {line}" for line in _problems(findings, candidate)]
    return NetworkError("\n  ".join(lines), hint=_hint(findings, best))


def _explain_unusable(findings: Findings, interface: str | None) -> NetworkError | None:
    """Return the error for hosts without an address that others could reach, if there are any."""
    usable = usable_addresses(findings, interface)
    missing = [place for place in range(len(findings.hosts)) if not usable[place]]
    if not missing or (not interface and 0 not in missing):
        return None
    lines = [f"{findings.hosts[place].host} has {describe_host(findings, place)}" for place in missing[:_LINES_SHOWN]]
    hosts = spell_hosts(findings, [findings.hosts[place].host for place in missing])
    if interface:
        message = f"network.interface {interface} does not lead to {hosts}"
        hint = "network.interface: auto chooses on each host the one that reaches the others, names may differ"
    else:
        message = f"no network interface leads to {hosts}"
        hint = "network.interface: NAME takes one that is not used by default"
    return NetworkError("\n  ".join([message, *lines]), hint=hint)


def _problems(findings: Findings, candidate: Candidate) -> list[str]:
    """List the failures of a candidate, equal ones of several hosts together."""
    ports = {(probe.target, probe.address): set[int]() for probe in findings.probes}
    for probe in findings.probes:
        ports[probe.target, probe.address].add(probe.port)
    failed_ports: dict[tuple[int, int, str, str], set[int]] = {}
    for probe in candidate.failed:
        failed_ports.setdefault((probe.source, probe.target, probe.address, outcome_text(probe)), set()).add(probe.port)
    sources: dict[tuple[int, str, str, str], list[int]] = {}
    for (source, target, address, outcome), numbers in failed_ports.items():
        all_failed = numbers == ports.get((target, address), numbers)
        port = "any port" if all_failed else f"port {', '.join(str(number) for number in sorted(numbers))}"
        sources.setdefault((target, address, port, outcome), []).append(source)
    lines = []
    for (target, address, port, outcome), places in sources.items():
        names = spell_hosts(findings, [findings.hosts[place].host for place in places])
        link = findings.hosts[target].owner(address)
        lines.append(
            f"{names} -> {findings.hosts[target].host} {link.name if link else ''} {address}, {port}: {outcome}"
        )
    blamed = {probe.source for probe in candidate.failed}
    for place in (place for place in candidate.lost if place not in blamed):
        lines.append(
            f"{findings.hosts[place].host} has no interface of its own into it: {describe_host(findings, place)}"
        )
    more = len(lines) - _LINES_SHOWN
    return lines[:_LINES_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _only_master_port(findings: Findings, candidate: Candidate) -> bool:
    """Return whether only the master's port was not reached."""
    port = findings.hosts[0].master_port
    return not candidate.lost and all(probe.target == 0 and probe.port == port for probe in candidate.failed)


def _explain_master_port(findings: Findings, candidate: Candidate, master_port: int | None) -> NetworkError:
    head, probe = findings.hosts[0], candidate.failed[0]
    names = spell_hosts(findings, [findings.hosts[failed.source].host for failed in candidate.failed])
    place = f"port {probe.port} of {head.host} ({candidate.master.link.name} {probe.address})"
    message = f"{place} is not reached by {names}: {outcome_text(probe)}; port {head.port} is reached"
    if master_port is None:
        return NetworkError(message, hint="network.master_port: PORT names one that is open in the firewall")
    commands = {
        "ufw": f"sudo ufw allow {probe.port}/tcp",
        "firewalld": f"sudo firewall-cmd --permanent --add-port={probe.port}/tcp && sudo firewall-cmd --reload",
    }
    command = commands.get(head.firewall or "")
    opening = f"{head.firewall} is on: on {head.host} {command}" if command else "a firewall? open the port there"
    return NetworkError(f"network.master_port: {message}", hint=f"{opening}, or choose another port")


def _hint(findings: Findings, candidate: Candidate) -> str:
    """Return the fix."""
    for probe in candidate.failed:
        hosts = findings.hosts
        if found := overlap(findings, probe):
            used, other, subnet = found
            return (
                f"on {hosts[probe.source].host} {used.name} and {other.name} both have the subnet {subnet}, and what "
                f"goes to {probe.address} leaves by {used.name} (ip route get {probe.address}); give one of them "
                f"another subnet, or take it down"
            )
        if probe.outcome == "stranger":
            return (
                f"two machines have the address {probe.address}, or something on the way answers for "
                f"{hosts[probe.target].host}; ip neigh show {probe.address} on {hosts[probe.source].host}"
            )
        if probe.outcome == "stuck":
            return _hint_mtu(findings, probe)
    if not candidate.failed:
        return "network.interface: NAME takes one that is not used by default"
    probe = candidate.failed[0]
    if probe.left_from is None and probe.outcome == "no way":
        return f"on {findings.hosts[probe.source].host}: ip route get {probe.address}"
    return _hint_firewall(findings, candidate)


def _hint_mtu(findings: Findings, probe: Probe) -> str:
    source, target = findings.hosts[probe.source], findings.hosts[probe.target]
    ours, theirs = findings.link_used(probe), target.owner(probe.address)
    mtu = min(link.mtu for link in (ours, theirs) if link) if ours or theirs else 1500
    settings = ", ".join(
        f"{host.host} {link.name} has MTU {link.mtu}" for host, link in ((source, ours), (target, theirs)) if link
    )
    return (
        f"{settings}, and what lies between lets less through: ping -M do -s {mtu - 28} {probe.address} "
        f"on {source.host}; ip link set {ours.name if ours else 'IFACE'} mtu 1500 on all hosts, "
        f"or the switch's ports set to {mtu}"
    )


def _hint_firewall(findings: Findings, candidate: Candidate) -> str:
    culprit = _culprit(candidate.failed)
    host = findings.hosts[culprit]
    endpoint = candidate.endpoints.get(culprit) or candidate.master
    subnet = endpoint.address.subnet
    commands = {
        "ufw": f"sudo ufw allow from {subnet}",
        "firewalld": f"sudo firewall-cmd --permanent --zone=trusted --add-source={subnet} "
        "&& sudo firewall-cmd --reload",
    }
    command = commands.get(host.firewall or "")
    why = "ranks listen on ports that the kernel gives them"
    if command:
        return f"{host.firewall} is on: on {host.host} {command} ({why})"
    return f"does a firewall on {host.host}, or before it, let every TCP port in from {subnet}? {why}"


def _culprit(failed: tuple[Probe, ...]) -> int:
    """Find the host in most of the failures; of equal ones the one that is not reached."""
    first = failed[0]
    places = dict.fromkeys([first.target, *(place for probe in failed for place in (probe.target, probe.source))])
    return max(places, key=lambda place: sum(place in (probe.source, probe.target) for probe in failed))

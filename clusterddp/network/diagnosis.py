"""Explain why no network carries a gang: the connections that were tried, their results, and the fix."""

from __future__ import annotations

from clusterddp.errors import NetworkError
from clusterddp.network.choice import Candidate, Choice
from clusterddp.network.explanation import describe_host, outcome_text, overlap, spell_hosts
from clusterddp.network.paths import Findings, Probe, usable_addresses

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

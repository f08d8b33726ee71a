"""Why no network carries a gang: what was tried, what came of it, and what mends it."""

from __future__ import annotations

from clusterddp.errors import NetworkError
from clusterddp.network.choice import Candidate, Choice
from clusterddp.network.explanation import describe_host, overlap, say_outcome, spell_hosts
from clusterddp.network.paths import Findings, Way, usable_addresses

_CANDIDATES_SHOWN = 4
_LINES_SHOWN = 4


def explain_trouble(findings: Findings, choice: Choice, master_port: int | None = None) -> NetworkError:
    """Return the error of a choice that has taken nothing; `master_port`: the one that the user named."""
    if unusable := _explain_unusable(findings, choice.interface):
        return unusable
    candidates = sorted(choice.others, key=lambda one: (len(one.lost) + len(one.failed), one.merit))
    best = candidates[0]
    if _only_master_port(findings, best):
        return _explain_master_port(findings, best, master_port)
    everybody = spell_hosts(findings, [host.host for host in findings.hosts])
    words = [
        f"network.interface {choice.interface} does not connect {everybody}"
        if choice.interface
        else f"there is no network by which {everybody} reach each other"
    ]
    for candidate in candidates[:_CANDIDATES_SHOWN]:
        words.append(f"{candidate.master.link.name} {candidate.master.address.address} of {findings.hosts[0].host}:")
        words += [f"  {line}" for line in _problems(findings, candidate)]
    return NetworkError("\n  ".join(words), hint=_hint(findings, best))


def _explain_unusable(findings: Findings, interface: str | None) -> NetworkError | None:
    """Say which hosts have no address that others could reach."""
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
        hint = "network.interface: NAME takes one that is left out otherwise"
    return NetworkError("\n  ".join([message, *lines]), hint=hint)


def _problems(findings: Findings, candidate: Candidate) -> list[str]:
    """Say what went wrong, alike ways together."""
    ports = {(way.target, way.address): set[int]() for way in findings.ways}
    for way in findings.ways:
        ports[way.target, way.address].add(way.port)
    failed_ports: dict[tuple[int, int, str, str], set[int]] = {}
    for way in candidate.failed:
        failed_ports.setdefault((way.source, way.target, way.address, say_outcome(way)), set()).add(way.port)
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
    blamed = {way.source for way in candidate.failed}
    for place in (place for place in candidate.lost if place not in blamed):
        lines.append(
            f"{findings.hosts[place].host} has no interface of its own into it: {describe_host(findings, place)}"
        )
    more = len(lines) - _LINES_SHOWN
    return lines[:_LINES_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _only_master_port(findings: Findings, candidate: Candidate) -> bool:
    """Say whether everything but the master's port was reached."""
    port = findings.hosts[0].master_port
    return not candidate.lost and all(way.target == 0 and way.port == port for way in candidate.failed)


def _explain_master_port(findings: Findings, candidate: Candidate, master_port: int | None) -> NetworkError:
    head, way = findings.hosts[0], candidate.failed[0]
    names = spell_hosts(findings, [findings.hosts[failed.source].host for failed in candidate.failed])
    place = f"port {way.port} of {head.host} ({candidate.master.link.name} {way.address})"
    message = f"{place} is not reached by {names}: {say_outcome(way)}; port {head.port} is reached"
    if master_port is None:
        return NetworkError(message, hint="network.master_port: PORT names one that is open in the firewall")
    commands = {
        "ufw": f"sudo ufw allow {way.port}/tcp",
        "firewalld": f"sudo firewall-cmd --permanent --add-port={way.port}/tcp && sudo firewall-cmd --reload",
    }
    command = commands.get(head.firewall or "")
    opening = f"{head.firewall} is on: on {head.host} {command}" if command else "a firewall? open the port there"
    return NetworkError(f"network.master_port: {message}", hint=f"{opening}, or name another port")


def _hint(findings: Findings, candidate: Candidate) -> str:
    """Say what mends it."""
    for way in candidate.failed:
        hosts = findings.hosts
        if found := overlap(findings, way):
            used, other, subnet = found
            return (
                f"on {hosts[way.source].host} {used.name} and {other.name} both have the subnet {subnet}, and what "
                f"goes to {way.address} leaves by {used.name} (ip route get {way.address}); give one of them another "
                f"subnet, or take it down"
            )
        if way.outcome == "stranger":
            return (
                f"two machines have the address {way.address}, or something on the way answers for "
                f"{hosts[way.target].host}; ip neigh show {way.address} on {hosts[way.source].host}"
            )
        if way.outcome == "stuck":
            return _hint_mtu(findings, way)
    if not candidate.failed:
        return "network.interface: NAME takes one that is left out otherwise"
    way = candidate.failed[0]
    if way.left_from is None and way.outcome == "no way":
        return f"on {findings.hosts[way.source].host}: ip route get {way.address}"
    return _hint_firewall(findings, candidate)


def _hint_mtu(findings: Findings, way: Way) -> str:
    source, target = findings.hosts[way.source], findings.hosts[way.target]
    ours, theirs = findings.link_used(way), target.owner(way.address)
    mtu = min(link.mtu for link in (ours, theirs) if link) if ours or theirs else 1500
    settings = ", ".join(
        f"{host.host} {link.name} has MTU {link.mtu}" for host, link in ((source, ours), (target, theirs)) if link
    )
    return (
        f"{settings}, and what lies between lets less through: ping -M do -s {mtu - 28} {way.address} "
        f"on {source.host}; ip link set {ours.name if ours else 'IFACE'} mtu 1500 on all hosts, "
        f"or the switch's ports set to {mtu}"
    )


def _hint_firewall(findings: Findings, candidate: Candidate) -> str:
    culprit = _culprit(candidate.failed)
    host = findings.hosts[culprit]
    ground = candidate.grounds.get(culprit) or candidate.master
    subnet = ground.address.subnet
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


def _culprit(failed: tuple[Way, ...]) -> int:
    """Find the host that takes part in most of the failures; of equal ones the one that is not reached."""
    first = failed[0]
    places = dict.fromkeys([first.target, *(place for way in failed for place in (way.target, way.source))])
    return max(places, key=lambda place: sum(place in (way.source, way.target) for way in failed))

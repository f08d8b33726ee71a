"""Find which of several hosts this one is, by its own addresses and names."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterddp.errors import PreflightError
from clusterddp.network.interface import is_loopback, read_links, resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnHost:
    """The names and addresses of this host."""

    names: tuple[str, ...]
    addresses: Mapping[str, str]
    """Address -> its interface, without the loopback."""

    def __str__(self) -> str:
        addresses = ", ".join(f"{address} on {name}" for address, name in self.addresses.items())
        return f"{self.names[0]} ({addresses or 'no address'})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One of the hosts, and its addresses as resolved here."""

    host: str
    addresses: tuple[str, ...]
    """Empty: the name does not resolve here."""

    def __str__(self) -> str:
        plain = host_name(self.host)
        if self.addresses == (plain,):
            return plain
        return f"{plain} ({', '.join(self.addresses) or 'a name that is not known here'})"


def read_own_host() -> OwnHost:
    """Read the names and addresses of this host.

    Raises: OSError.
    """
    name = socket.gethostname()
    addresses = {
        entry.address: link.name for link in read_links() for entry in link.addresses if not is_loopback(entry.address)
    }
    return OwnHost(names=tuple(dict.fromkeys((name, name.partition(".")[0]))), addresses=addresses)


def look_up(hosts: Sequence[str]) -> tuple[Candidate, ...]:
    """Look the addresses of hosts up, those of IPv4 first."""
    return tuple(Candidate(host=host, addresses=addresses_of(host)) for host in hosts)


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of a host, those of IPv4 first; none: its name is not known here."""
    return resolve(host_name(host))


def host_name(host: str) -> str:
    """Return a host without the user that SSH would log in as."""
    return host.rpartition("@")[2]


def find_own_index(candidates: Sequence[Candidate], own: OwnHost) -> int:
    """Return which of the hosts this one is, counted from 0.

    Raises: PreflightError: none of them, or several.
    """
    reasons = {index: why for index, each in enumerate(candidates) if (why := _why(each, own))}
    if len(reasons) == 1:
        return next(iter(reasons))
    if not reasons:
        listed = ", ".join(map(str, candidates))
        raise PreflightError(
            f"this machine, {own}, is none of the hosts of the spec: {listed}",
            hint="ssh.hosts names each machine once, by a name or address of its own; or --node-rank gives its number",
        )
    listed = "; ".join(f"node {index} ({candidates[index].host}): {why}" for index, why in reasons.items())
    raise PreflightError(
        f"this machine, {own}, is {len(reasons)} of the hosts of the spec: {listed}",
        hint="ssh.hosts names each machine once, by what no other machine has; or --node-rank gives its number",
    )


def _why(candidate: Candidate, own: OwnHost) -> str:
    """Return by what this host is the candidate; empty when it is not."""
    name = host_name(candidate.host).lower().rstrip(".")
    ours = {each.lower() for each in own.names}
    for address in candidate.addresses:
        if address in own.addresses:
            return f"{address} is on its {own.addresses[address]}"
    if name in ours or (name.partition(".")[0] in ours and candidate.addresses == ()):
        return f"{name} is its name"
    # 127.0.1.1 stands for the own name in Debian's /etc/hosts.
    if candidate.addresses and all(is_loopback(address) for address in candidate.addresses):
        return f"{candidate.addresses[0]} means any machine itself"
    return ""

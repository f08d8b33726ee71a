"""Choose the networks for NCCL's sockets: the fastest that all hosts have, by the links that each host reports.

It does not affect RDMA, which NCCL prefers. Without RDMA the route to the first host is often a slow management
network, so NCCL must not be limited to it.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterddp.network.interface import Link, LinkAddress

_Place = ipaddress.IPv4Interface | ipaddress.IPv6Interface
_MAX_REPORTED = 32
"""A host may have hundreds, and the message to the head is short."""


def report_links(links: Iterable[Link]) -> dict[str, int]:
    """Return the links that a host reports: address with prefix -> Mbit/s, the fastest first."""
    reported = {f"{entry.address}/{entry.prefix}": link.assumed_mbit_per_s for link, entry in _usable(links)}
    return dict(sorted(reported.items(), key=lambda item: -item[1])[:_MAX_REPORTED])


def faster_networks(reported: Sequence[Mapping[str, int]], master_addr: str) -> tuple[str, ...]:
    """Return the networks that are faster than the one with the master's address; none: it is the fastest.

    `reported`: the links of each host, the first host's first. A network is as fast as its slowest link.
    Several are equally fast where hosts have a link for each rail.
    """
    hosts = [_read(links) for links in reported]
    speeds: dict[str, list[int]] = {}
    for links in hosts:
        of_host: dict[str, int] = {}
        for place, speed in links.items():
            network = str(place.network)
            of_host[network] = max(speed, of_host.get(network, 0))
        for network, speed in of_host.items():
            speeds.setdefault(network, []).append(speed)
    # An address that several hosts have is ambiguous.
    owners = Counter(place for links in hosts for place in links)
    dead = {str(place.network) for place, count in owners.items() if count > 1}
    common = {
        network: min(each) for network, each in speeds.items() if len(each) == len(reported) and network not in dead
    }
    best = max(common.values(), default=0)
    of_master = ((place, speed) for place, speed in (hosts[0] if hosts else {}).items() if str(place.ip) == master_addr)
    if best <= next((common.get(str(place.network), speed) for place, speed in of_master), 0):
        return ()
    return tuple(network for network, speed in common.items() if speed == best)


def names_in(networks: Iterable[str], links: Iterable[Link]) -> tuple[str, ...]:
    """Name this host's links into these networks."""
    wanted = set(networks)
    return tuple(dict.fromkeys(link.name for link, entry in _usable(links) if entry.subnet in wanted))


def _usable(links: Iterable[Link]) -> Iterator[tuple[Link, LinkAddress]]:
    for link in links:
        if link.up and not (link.loopback or link.wireless or link.of_containers or link.is_tunnel):
            for entry in link.addresses:
                if entry.lasting and not ipaddress.ip_address(entry.address).is_link_local:
                    yield link, entry


def _read(links: Mapping[str, int]) -> dict[_Place, int]:
    """Parse the links that a host has reported, without invalid addresses."""
    found: dict[_Place, int] = {}
    for text, speed in links.items():
        with contextlib.suppress(ValueError):
            found[ipaddress.ip_interface(text)] = speed
    return found

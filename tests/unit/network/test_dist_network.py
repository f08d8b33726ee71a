"""The choice of a network from what hosts said and tried: tables, no network."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping
from ipaddress import ip_interface

import pytest

from clusterddp.network.choice import (
    Findings,
    HostNetwork,
    Outcome,
    Probe,
)
from clusterddp.network.interface import Link, LinkAddress

Links = Mapping[str, Link]


def link(*addresses: str, speed: int | None = 10_000, **facts: object) -> Link:
    """A link but for its name; addresses with prefix."""
    entries = tuple(LinkAddress(address=text.split("/")[0], prefix=int(text.split("/")[1])) for text in addresses)
    return Link(name="", speed_mbit_per_s=speed, addresses=entries, **facts)  # type: ignore[arg-type]


def find(
    hosts: Mapping[str, Links],
    *,
    closed: Mapping[tuple[str, str, str], Outcome] = {},
    closed_ports: Collection[int] = (),
    interface: str | None = None,
    machines: Mapping[str, str] = {},
) -> Findings:
    """Try the probes between hosts of which each goes to a subnet by the first link that has it.

    `closed`: (source, target, name of the target's link) -> what comes of it.
    """
    listed = tuple(
        HostNetwork(
            host=name,
            machine=machines.get(name, name),
            links=tuple(dataclasses.replace(one, name=at) for at, one in links.items()),
            port=40_000 + place,
            master_port=20_000 if place == 0 else None,
        )
        for place, (name, links) in enumerate(hosts.items())
    )
    findings = Findings(hosts=listed, interface=interface)
    probes = []
    for source, targets in enumerate(findings.plan_probes()):
        for each in targets:
            target, address, port = each.target, each.address, each.port
            probe = Probe(source=source, target=target, address=address, port=port, outcome="no way", detail="no route")
            arrives, left_from = (
                listed[target].owner(address),
                route(listed[source], listed[target], address),
            )
            assert arrives is not None
            if left_from:
                outcome = closed.get((listed[source].host, listed[target].host, arrives.name), "reached")
                outcome = "no answer" if port in closed_ports else outcome
                probe = dataclasses.replace(probe, outcome=outcome, left_from=left_from, detail="")
            probes.append(probe)
    return dataclasses.replace(findings, probes=tuple(probes))


def route(source: HostNetwork, target: HostNetwork, address: str) -> str | None:
    if source.machine == target.machine:
        return address
    for one in source.links:
        for entry in one.addresses:
            if one.up and not one.loopback and ip_interface(address).ip in ip_interface(entry.subnet).network:
                return entry.address
    return None


def two_networks(number: int, *, fast: int | None = 100_000, slow: int | None = 1000) -> dict[str, Links]:
    return {
        f"gpu{place}": {
            "eth0": link(f"10.0.0.{place}/24", speed=slow),
            "ib0": link(f"10.1.0.{place}/24", speed=fast),
        }
        for place in range(1, number + 1)
    }


def taken(findings: Findings) -> list[tuple[str, str]]:
    best = findings.candidates()[0]
    assert best.works
    return [(link.name, address.address) for _, (link, address) in sorted(best.endpoints.items())]


def names(findings: Findings) -> list[str]:
    return [name for name, _ in taken(findings)]


def notes(findings: Findings, env: Mapping[str, str] = {}) -> str:
    return "\n".join(findings.warnings(findings.candidates(), env))


def diagnosis(findings: Findings) -> str:
    candidates = findings.candidates()
    assert not any(one.works for one in candidates)
    error = findings.diagnose(candidates)
    return f"{error.message}\nhint: {error.hint}"


def test_the_fastest_network_is_taken() -> None:
    assert names(find(two_networks(3))) == ["ib0"] * 3


def test_the_choice_of_the_fastest_network_is_explained() -> None:
    findings = find(two_networks(3))
    assert findings.explain(findings.candidates()) == "the fastest of 2 networks by which all 3 hosts reach each other"


def test_of_equally_fast_networks_the_first_is_taken() -> None:
    assert names(find(two_networks(2, fast=1000))) == ["eth0"] * 2


def test_a_speed_that_is_not_known_counts_as_a_gigabit() -> None:
    assert names(find(two_networks(2, slow=None, fast=100))) == ["eth0"] * 2
    assert names(find(two_networks(2, slow=None, fast=10_000))) == ["ib0"] * 2


def test_the_slowest_host_determines_the_speed_of_a_network() -> None:
    hosts = two_networks(3)
    hosts["gpu3"] = {**hosts["gpu3"], "ib0": link("10.1.0.3/24", speed=100)}
    assert names(find(hosts)) == ["eth0"] * 3


@pytest.mark.parametrize("facts", [{"wireless": True}, {"kind": "wireguard"}, {"kind": "tun"}])
def test_a_cable_goes_before_a_radio_and_a_tunnel(facts: dict[str, object]) -> None:
    hosts = {
        f"gpu{place}": {
            "other": link(f"10.9.0.{place}/24", speed=100_000, **facts),
            "eth0": link(f"10.0.0.{place}/24", speed=100),
        }
        for place in (1, 2)
    }
    assert names(find(hosts)) == ["eth0"] * 2


def test_a_tunnel_is_taken_where_there_is_nothing_else() -> None:
    hosts = {f"gpu{place}": {"tailscale0": link(f"100.64.0.{place}/10", kind="tun")} for place in (1, 2)}
    assert names(find(hosts)) == ["tailscale0"] * 2


def test_names_of_interfaces_may_differ() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24")},
        "gpu2": {"enp5s0": link("10.0.0.2/24")},
        "gpu3": {"wlan0": link("192.168.1.3/24"), "br0": link("10.0.0.3/24", kind="bridge")},
    }
    assert names(find(hosts)) == ["eth0", "enp5s0", "br0"]


def test_a_network_that_one_host_does_not_reach_is_passed_over() -> None:
    findings = find(two_networks(3), closed={("gpu2", "gpu3", "ib0"): "no answer"})
    assert names(findings) == ["eth0"] * 3
    assert (
        notes(findings)
        == "ib0 of gpu1 (10.1.0.1, 100 Gb/s) is not used: gpu2 -> gpu3 ib0 10.1.0.3 port 40002: no answer"
    )


def test_a_slower_network_that_does_not_work_is_not_spoken_of() -> None:
    assert notes(find(two_networks(3), closed={("gpu2", "gpu3", "eth0"): "no answer"})) == ""


def test_an_address_that_several_hosts_have_is_not_used() -> None:
    hosts = {
        f"gpu{place}": {"lab0": link("192.168.7.1/24", speed=100_000), "eth0": link(f"10.0.0.{place}/24")}
        for place in (1, 2)
    }
    findings = find(hosts)
    assert names(findings) == ["eth0"] * 2


def test_interfaces_between_containers_are_not_tried() -> None:
    hosts = {"gpu1": {"docker0": link("172.17.0.1/16"), "eth0": link("10.0.0.1/24"), "virbr0": link("10.5.0.1/24")}}
    assert [one.name for one, _ in find(hosts).usable_addresses(0)] == ["eth0"]


def test_what_is_down_or_passing_is_not_tried() -> None:
    passing = dataclasses.replace(
        link("fd00::1/64"), addresses=(LinkAddress(address="fd00::2", prefix=64, lasting=False),)
    )
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24", up=False), "eth1": passing, "lo": link("127.0.0.1/8", loopback=True)}}
    assert find(hosts).usable_addresses(0) == []


def test_ipv4_goes_before_ipv6() -> None:
    hosts = {f"gpu{place}": {"eth0": link(f"fd00::{place}/64", f"10.0.0.{place}/24")} for place in (1, 2)}
    assert taken(find(hosts)) == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")]


def test_hosts_that_have_ipv6_alone_meet_there() -> None:
    hosts = {f"gpu{place}": {"eth0": link(f"fd00::{place}/64")} for place in (1, 2)}
    assert taken(find(hosts)) == [("eth0", "fd00::1"), ("eth0", "fd00::2")]


def test_a_machine_may_have_two_names() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24")},
        "gpu1-ib": {"eth0": link("10.0.0.1/24")},
        "gpu2": {"eth0": link("10.0.0.2/24")},
    }
    findings = find(hosts, machines={"gpu1-ib": "gpu1"})
    assert taken(findings) == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")]


def test_a_network_that_traffic_does_not_take_is_passed_over() -> None:
    hosts = {
        f"gpu{place}": {"eth0": link(f"10.0.0.{place}/24", speed=1000), "eth1": link(f"10.0.0.10{place}/24")}
        for place in (1, 2)
    }
    findings = find(hosts)
    assert names(findings) == ["eth0"] * 2
    assert notes(findings) == (
        "eth1 of gpu1 (10.0.0.101, 10 Gb/s) is not used: "
        "what gpu1 sends to 10.0.0.2 leaves by eth0, which has the subnet 10.0.0.0/24 as eth1 has"
    )


def test_an_interface_that_is_named_is_taken_though_it_is_slow() -> None:
    assert names(find(two_networks(2), interface="eth0")) == ["eth0"] * 2


def test_a_detour_of_an_interface_that_is_named_is_noted() -> None:
    hosts = {
        f"gpu{place}": {"eth0": link(f"10.0.0.{place}/24"), "eth1": link(f"10.0.0.10{place}/24")} for place in (1, 2)
    }
    findings = find(hosts, interface="eth1")
    assert names(findings) == ["eth1"] * 2
    assert "what gpu2 sends to 10.0.0.101 leaves by eth0" in notes(findings)


def test_the_diagnosis_names_host_interface_address_and_result() -> None:
    closed: dict[tuple[str, str, str], Outcome] = {(f"gpu{place}", "gpu2", "ib0"): "refused" for place in (1, 3)}
    hosts = {name: {"ib0": links["ib0"]} for name, links in two_networks(3).items()}
    assert diagnosis(find(hosts, closed=closed)).splitlines()[:3] == [
        "there is no network by which all 3 hosts reach each other",
        "  ib0 10.1.0.1 of gpu1:",
        "    gpu1 -> gpu2 ib0 10.1.0.2 port 40001: refused",
    ]


def test_the_diagnosis_names_the_host_whose_firewall_may_be_on() -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.0.0.2/24")}}
    said = diagnosis(find(hosts, closed={("gpu1", "gpu2", "eth0"): "no answer"}))
    assert "hint: does a firewall on gpu2, or before it, let every TCP port in from 10.0.0.0/24?" in said


def test_a_failure_of_only_the_master_port_is_diagnosed_as_such() -> None:
    said = diagnosis(find(two_networks(2), closed_ports=[20_000]))
    assert "gpu2 -> gpu1 ib0 10.1.0.1 port 20000: no answer" in said
    assert "hint: port 40000 of gpu1 is reached, and port 20000 is not: network.master_port: PORT" in said


def test_another_machine_with_the_address_is_named() -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.0.0.2/24")}}
    said = diagnosis(find(hosts, closed={("gpu1", "gpu2", "eth0"): "stranger"}))
    assert "hint: two machines have the address 10.0.0.2" in said


def test_hosts_without_a_common_network_are_named() -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.3.0.2/24")}}
    said = diagnosis(find(hosts))
    assert "gpu2 -> gpu1 eth0 10.0.0.1 port 40000: no route" in said
    assert "hint: on gpu2: ip route get 10.0.0.1" in said


def test_the_error_for_a_missing_interface_lists_those_of_the_host() -> None:
    hosts = two_networks(2)
    hosts["gpu2"] = {"eth0": hosts["gpu2"]["eth0"]}
    said = diagnosis(find(hosts, interface="ib0"))
    assert said.startswith("network.interface ib0 does not lead to gpu2\n  gpu2 has eth0 (10.0.0.2)")


def test_64_hosts_try_few_ways() -> None:
    probes = find(two_networks(64)).plan_probes()
    assert sum(len(targets) for targets in probes) < 64 * 2 * 5


def test_what_is_taken_works_and_the_rest_is_explained() -> None:
    """No host gets a network by which it does not reach the others, and every failure is explained."""
    dice = random.Random(4)
    for _ in range(300):
        hosts = two_networks(dice.randint(2, 5))
        hosts = {name: {at: one for at, one in links.items() if dice.random() < 0.9} for name, links in hosts.items()}
        outcomes: list[Outcome] = ["no answer", "refused", "no way", "stuck", "stranger"]
        closed = {
            (source, target, at): dice.choice(outcomes)
            for source in hosts
            for target in hosts
            for at in ("eth0", "ib0")
            if dice.random() < 0.1
        }
        findings = find(hosts, closed=closed)
        if not findings.candidates() or not findings.candidates()[0].works:
            assert diagnosis(findings)
            continue
        reached = {
            (probe.source, probe.target, probe.address) for probe in findings.probes if probe.outcome == "reached"
        }
        addresses = [address for _, address in taken(findings)]
        last = len(hosts) - 1
        assert {(place, 0, addresses[0]) for place in range(1, last + 1)} <= reached
        assert {(0, place, addresses[place]) for place in range(1, last + 1)} <= reached
        assert {(place, place + 1, addresses[place + 1]) for place in range(1, last)} <= reached
        assert isinstance(notes(findings), str)


def test_interfaces_that_differ_are_noted() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24", mtu=9000)},
        "gpu2": {"eth0": link("10.0.0.2/24")},
        "gpu3": {"eno1": link("10.0.0.3/24", speed=100)},
    }
    assert notes(find(hosts)).splitlines() == [
        "the interfaces of the hosts differ: 10 Gb/s on gpu1, gpu2; 100 Mb/s on gpu3",
        "the interfaces of the hosts differ: MTU 9000 on gpu1; MTU 1500 on gpu2, gpu3",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", ""),
        ("GLOO_SOCKET_IFNAME", "ib", "both hosts"),
        ("NCCL_SOCKET_IFNAME", "ib", ""),
        ("NCCL_SOCKET_IFNAME", "=ib", "both hosts"),
        ("NCCL_SOCKET_IFNAME", "^docker", ""),
    ],
)
def test_variables_that_name_no_interface_are_noted(variable: str, value: str, missing: str) -> None:
    said = notes(find(two_networks(2)), {variable: value})
    assert (missing in said) if missing else not said

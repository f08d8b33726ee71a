"""The choice of a network from what hosts said and tried: tables, no network."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping
from ipaddress import ip_interface

import pytest

from clusterddp.network.choice import (
    Choice,
    Findings,
    HostNetwork,
    Outcome,
    Probe,
    choose_network,
    plan_probes,
    usable_addresses,
)
from clusterddp.network.explanation import (
    diagnose,
    explain_choice,
    warn_of_choice,
    warn_of_missing_interfaces,
    warn_of_shared_addresses,
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
    firewall: str | None = None,
) -> Findings:
    """Try the probes between hosts of which each goes to a subnet by the first link that has it.

    `closed`: (source, target, name of the target's link) -> what comes of it.
    """
    listed = tuple(
        HostNetwork(
            host=name,
            machine=machines.get(name, name),
            own_addresses=("127.0.1.1",),
            links=tuple(dataclasses.replace(one, name=at) for at, one in links.items()),
            port=40_000 + place,
            master_port=20_000 if place == 0 else None,
            firewall=firewall,
        )
        for place, (name, links) in enumerate(hosts.items())
    )
    findings = Findings(hosts=listed, probes=())
    probes = []
    for source, targets in enumerate(plan_probes(findings, interface)):
        for target, address, port in targets:
            probe = Probe(source=source, target=target, address=address, port=port, outcome="no way", detail="no route")
            arrives, left_from = (
                listed[target].owner(address),
                route(listed[source], listed[target], address),
            )
            assert arrives is not None
            if left_from:
                outcome = closed.get((listed[source].host, listed[target].host, arrives.name), "reached")
                outcome = "no answer" if port in closed_ports else outcome
                probe = dataclasses.replace(probe, outcome=outcome, left_from=left_from, seen_from=left_from, detail="")
            probes.append(probe)
    return Findings(hosts=listed, probes=tuple(probes))


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


def taken(choice: Choice) -> list[tuple[str, str]]:
    assert choice.taken is not None
    return [(endpoint.link.name, endpoint.address.address) for _, endpoint in sorted(choice.taken.endpoints.items())]


def names(choice: Choice) -> list[str]:
    return [name for name, _ in taken(choice)]


def notes(findings: Findings, interface: str | None = None) -> str:
    return "\n".join(warn_of_choice(findings, choose_network(findings, interface)))


def diagnosis(findings: Findings, interface: str | None = None, master_port: int | None = None) -> str:
    choice = choose_network(findings, interface)
    assert choice.taken is None
    error = diagnose(findings, choice, master_port)
    return f"{error.message}\nhint: {error.hint}"


def test_the_fastest_network_is_taken() -> None:
    assert names(choose_network(find(two_networks(3)))) == ["ib0"] * 3


def test_the_choice_of_the_fastest_network_is_explained() -> None:
    findings = find(two_networks(3))
    why = explain_choice(findings, choose_network(findings))[0]
    assert why == "the fastest of 2 networks by which all 3 hosts reach each other; 100 Gb/s"


def test_of_equally_fast_networks_the_first_is_taken() -> None:
    assert names(choose_network(find(two_networks(2, fast=1000)))) == ["eth0"] * 2


def test_a_speed_that_is_not_known_counts_as_a_gigabit() -> None:
    assert names(choose_network(find(two_networks(2, slow=None, fast=100)))) == ["eth0"] * 2
    assert names(choose_network(find(two_networks(2, slow=None, fast=10_000)))) == ["ib0"] * 2


def test_the_slowest_host_determines_the_speed_of_a_network() -> None:
    hosts = two_networks(3)
    hosts["gpu3"] = {**hosts["gpu3"], "ib0": link("10.1.0.3/24", speed=100)}
    assert names(choose_network(find(hosts))) == ["eth0"] * 3


@pytest.mark.parametrize("facts", [{"wireless": True}, {"kind": "wireguard"}, {"kind": "tun"}])
def test_a_cable_goes_before_a_radio_and_a_tunnel(facts: dict[str, object]) -> None:
    hosts = {
        f"gpu{place}": {
            "other": link(f"10.9.0.{place}/24", speed=100_000, **facts),
            "eth0": link(f"10.0.0.{place}/24", speed=100),
        }
        for place in (1, 2)
    }
    assert names(choose_network(find(hosts))) == ["eth0"] * 2


def test_a_tunnel_is_taken_where_there_is_nothing_else() -> None:
    hosts = {f"gpu{place}": {"tailscale0": link(f"100.64.0.{place}/10", kind="tun")} for place in (1, 2)}
    assert names(choose_network(find(hosts))) == ["tailscale0"] * 2


def test_names_of_interfaces_may_differ() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24")},
        "gpu2": {"enp5s0": link("10.0.0.2/24")},
        "gpu3": {"wlan0": link("192.168.1.3/24"), "br0": link("10.0.0.3/24", kind="bridge")},
    }
    assert names(choose_network(find(hosts))) == ["eth0", "enp5s0", "br0"]


def test_a_network_that_one_host_does_not_reach_is_passed_over() -> None:
    findings = find(two_networks(3), closed={("gpu2", "gpu3", "ib0"): "no answer"})
    assert names(choose_network(findings)) == ["eth0"] * 3
    assert (
        notes(findings) == "ib0 of gpu1 (10.1.0.1, 100 Gb/s) is not used: gpu2 -> gpu3 10.1.0.3 port 40002: no answer"
    )


def test_a_slower_network_that_does_not_work_is_not_spoken_of() -> None:
    assert notes(find(two_networks(3), closed={("gpu2", "gpu3", "eth0"): "no answer"})) == ""


def test_an_address_that_several_hosts_have_is_not_used() -> None:
    hosts = {
        f"gpu{place}": {"lab0": link("192.168.7.1/24", speed=100_000), "eth0": link(f"10.0.0.{place}/24")}
        for place in (1, 2)
    }
    findings = find(hosts)
    assert names(choose_network(findings)) == ["eth0"] * 2
    assert next(warn_of_shared_addresses(findings)).startswith("lab0 192.168.7.1: the same on both hosts")


def test_interfaces_between_containers_are_not_tried() -> None:
    hosts = {"gpu1": {"docker0": link("172.17.0.1/16"), "eth0": link("10.0.0.1/24"), "virbr0": link("10.5.0.1/24")}}
    [addresses] = usable_addresses(find(hosts))
    assert [one.name for one, _ in addresses] == ["eth0"]


def test_what_is_down_or_passing_is_not_tried() -> None:
    passing = dataclasses.replace(
        link("fd00::1/64"), addresses=(LinkAddress(address="fd00::2", prefix=64, lasting=False),)
    )
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24", up=False), "eth1": passing, "lo": link("127.0.0.1/8", loopback=True)}}
    assert usable_addresses(find(hosts)) == [[]]


def test_ipv4_goes_before_ipv6() -> None:
    hosts = {f"gpu{place}": {"eth0": link(f"fd00::{place}/64", f"10.0.0.{place}/24")} for place in (1, 2)}
    assert taken(choose_network(find(hosts))) == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")]


def test_hosts_that_have_ipv6_alone_meet_there() -> None:
    hosts = {f"gpu{place}": {"eth0": link(f"fd00::{place}/64")} for place in (1, 2)}
    assert taken(choose_network(find(hosts))) == [("eth0", "fd00::1"), ("eth0", "fd00::2")]


def test_a_machine_may_have_two_names() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24")},
        "gpu1-ib": {"eth0": link("10.0.0.1/24")},
        "gpu2": {"eth0": link("10.0.0.2/24")},
    }
    findings = find(hosts, machines={"gpu1-ib": "gpu1"})
    assert taken(choose_network(findings)) == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")]


def test_a_network_that_traffic_does_not_take_is_passed_over() -> None:
    hosts = {
        f"gpu{place}": {"eth0": link(f"10.0.0.{place}/24", speed=1000), "eth1": link(f"10.0.0.10{place}/24")}
        for place in (1, 2)
    }
    findings = find(hosts)
    assert names(choose_network(findings)) == ["eth0"] * 2
    assert notes(findings) == (
        "eth1 of gpu1 (10.0.0.101, 10 Gb/s) is not used: "
        "what gpu1 sends to 10.0.0.2 leaves by eth0, which has the subnet 10.0.0.0/24 as eth1 has"
    )


def test_an_interface_that_is_named_is_taken_though_it_is_slow() -> None:
    assert names(choose_network(find(two_networks(2), interface="eth0"), "eth0")) == ["eth0"] * 2


def test_a_detour_of_an_interface_that_is_named_is_noted() -> None:
    hosts = {
        f"gpu{place}": {"eth0": link(f"10.0.0.{place}/24"), "eth1": link(f"10.0.0.10{place}/24")} for place in (1, 2)
    }
    findings = find(hosts, interface="eth1")
    assert names(choose_network(findings, "eth1")) == ["eth1"] * 2
    assert "what gpu2 sends to 10.0.0.101 leaves by eth0" in notes(findings, "eth1")


def test_interfaces_that_differ_are_noted() -> None:
    hosts = {
        "gpu1": {"eth0": link("10.0.0.1/24", mtu=9000)},
        "gpu2": {"eth0": link("10.0.0.2/24")},
        "gpu3": {"eno1": link("10.0.0.3/24", speed=100)},
    }
    assert notes(find(hosts)).splitlines() == [
        "the interfaces differ: 10 Gb/s on gpu1 eth0, gpu2 eth0; 100 Mb/s on gpu3 eno1",
        "the interfaces differ: MTU 9000 on gpu1 eth0; MTU 1500 on gpu2 eth0, gpu3 eno1",
    ]


def test_translated_addresses_are_noted() -> None:
    findings = find({"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.0.0.2/24")}})
    translated = [
        dataclasses.replace(probe, seen_from="10.0.0.254") if probe.source else probe for probe in findings.probes
    ]
    assert notes(dataclasses.replace(findings, probes=tuple(translated))) == (
        "gpu1 sees gpu2 as 10.0.0.254, not 10.0.0.2: addresses are translated on the way"
    )


def test_the_diagnosis_names_host_interface_address_and_result() -> None:
    closed: dict[tuple[str, str, str], Outcome] = {(f"gpu{place}", "gpu2", "ib0"): "refused" for place in (1, 3)}
    hosts = {name: {"ib0": links["ib0"]} for name, links in two_networks(3).items()}
    assert diagnosis(find(hosts, closed=closed)).splitlines()[:3] == [
        "there is no network by which all 3 hosts reach each other",
        "  ib0 10.1.0.1 of gpu1:",
        "    gpu1 -> gpu2 ib0 10.1.0.2, any port: refused",
    ]


@pytest.mark.parametrize(
    ("firewall", "command"),
    [("ufw", "on gpu2 sudo ufw allow from 10.0.0.0/24"), ("firewalld", "--add-source=10.0.0.0/24"), (None, "on gpu2")],
)
def test_the_diagnosis_names_the_command_that_opens_a_firewall(firewall: str | None, command: str) -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.0.0.2/24")}}
    findings = find(hosts, closed={("gpu1", "gpu2", "eth0"): "no answer"}, firewall=firewall)
    assert command in diagnosis(findings).splitlines()[-1]


def test_a_failure_of_only_the_master_port_is_diagnosed_as_such() -> None:
    findings = find(two_networks(2), closed_ports=[20_000], firewall="ufw")
    assert diagnosis(findings, master_port=20_000) == (
        "network.master_port: port 20000 of gpu1 (ib0 10.1.0.1) is not reached by gpu2: no answer; "
        "port 40000 is reached\n"
        "hint: ufw is on: on gpu1 sudo ufw allow 20000/tcp, or choose another port"
    )


def test_another_machine_with_the_address_is_named() -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.0.0.2/24")}}
    said = diagnosis(find(hosts, closed={("gpu1", "gpu2", "eth0"): "stranger"}))
    assert "hint: two machines have the address 10.0.0.2" in said


def test_hosts_without_a_common_network_are_named() -> None:
    hosts = {"gpu1": {"eth0": link("10.0.0.1/24")}, "gpu2": {"eth0": link("10.3.0.2/24")}}
    said = diagnosis(find(hosts))
    assert "gpu2 -> gpu1 eth0 10.0.0.1, any port: no route" in said
    assert "hint: on gpu2: ip route get 10.0.0.1" in said


def test_the_error_for_a_missing_interface_lists_those_of_the_host() -> None:
    hosts = two_networks(2)
    hosts["gpu2"] = {"eth0": hosts["gpu2"]["eth0"]}
    said = diagnosis(find(hosts, interface="ib0"), "ib0")
    assert said.startswith("network.interface ib0 does not lead to gpu2\n  gpu2 has eth0 (10.0.0.2)")


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
    said = "".join(warn_of_missing_interfaces(find(two_networks(2)), {variable: value}))
    assert (missing in said) if missing else not said


def test_hosts_that_take_long_to_look_up_the_masters_name_are_noted() -> None:
    findings = find(two_networks(3))
    _, master = taken(choose_network(findings))[0]
    slow = dataclasses.replace(findings, slow_names=((0, master), (2, master), (1, "10.9.9.9")))
    assert f"gpu1, gpu3: looking up the name of {master} takes over a second" in notes(slow)
    assert "looking up" not in notes(findings)


def test_64_hosts_try_few_ways() -> None:
    probes = plan_probes(find(two_networks(64)))
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
        choice = choose_network(findings)
        if choice.taken is None:
            assert diagnosis(findings)
            continue
        reached = {(probe.source, probe.target, probe.address) for probe in findings.probes if probe.reached}
        addresses = [address for _, address in taken(choice)]
        last = len(hosts) - 1
        assert {(place, 0, addresses[0]) for place in range(1, last + 1)} <= reached
        assert {(0, place, addresses[place]) for place in range(1, last + 1)} <= reached
        assert {(place, place + 1, addresses[place + 1]) for place in range(1, last)} <= reached
        assert list(warn_of_choice(findings, choice)) is not None

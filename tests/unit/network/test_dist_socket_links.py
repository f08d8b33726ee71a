"""The interfaces for NCCL's sockets and gloo: golden for networks as clusters have them."""

from __future__ import annotations

import dataclasses
import ipaddress

import pytest

from clusterddp.network.interface import Link, LinkAddress
from clusterddp.network.socket_links import faster_networks, names_in, report_links
from clusterddp.node.head import JoinedNodes
from clusterddp.node.rank_network import find_rank_network
from tests.support.launch_runs import plan_text

MGMT = Link(name="eno1", speed_mbit_per_s=1000, addresses=(LinkAddress(address="10.0.0.{n}", prefix=24),))
DOCKER = Link(name="docker0", kind="bridge", addresses=(LinkAddress(address="172.17.0.1", prefix=16),))
IB0 = Link(
    name="ib0", infiniband=True, speed_mbit_per_s=200_000, addresses=(LinkAddress(address="10.1.0.{n}", prefix=16),)
)
IB1 = dataclasses.replace(IB0, name="ib1", addresses=(LinkAddress(address="10.2.0.{n}", prefix=16),))
SILENT_IB = dataclasses.replace(IB0, speed_mbit_per_s=None)
ROCE = Link(name="enp65s0f0np0", speed_mbit_per_s=100_000, addresses=(LinkAddress(address="192.168.8.{n}", prefix=24),))
RAIL = dataclasses.replace(ROCE, addresses=(LinkAddress(address="192.168.{n}.1", prefix=31),))
VLAN = Link(
    name="bond0.120", kind="vlan", speed_mbit_per_s=50_000, addresses=(LinkAddress(address="10.120.0.{n}", prefix=22),)
)
BOND = Link(name="bond0", kind="bond", speed_mbit_per_s=50_000)
TUNNEL = Link(
    name="wg0", kind="wireguard", speed_mbit_per_s=400_000, addresses=(LinkAddress(address="10.9.0.{n}", prefix=24),)
)
SAME = Link(name="usb0", speed_mbit_per_s=400_000, addresses=(LinkAddress(address="10.8.0.1", prefix=24),))


def at(number: int, *links: Link) -> tuple[Link, ...]:
    """Return a host's links; its number is in its addresses."""
    return tuple(
        dataclasses.replace(
            link,
            addresses=tuple(
                dataclasses.replace(entry, address=entry.address.format(n=number)) for entry in link.addresses
            ),
        )
        for link in links
    )


GOLDEN = [
    ("management and IPoIB", (MGMT, IB0), (MGMT, IB0), "=ib0"),
    ("IPoIB that does not report its speed", (MGMT, SILENT_IB), (MGMT, SILENT_IB), "=ib0"),
    ("two rails", (MGMT, IB0, IB1), (MGMT, IB0, IB1), "=ib0,ib1"),
    ("RoCE", (MGMT, ROCE), (MGMT, ROCE), "=enp65s0f0np0"),
    ("a VLAN on a bond", (MGMT, BOND, VLAN), (MGMT, BOND, VLAN), "=bond0.120"),
    ("docker0 on each host", (MGMT, DOCKER), (MGMT, DOCKER), "=eno1"),
    ("docker0 beside IPoIB", (DOCKER, MGMT, IB0), (DOCKER, MGMT, IB0), "=ib0"),
    ("one host lacks the card", (MGMT, IB0), (MGMT,), "=eno1"),
    ("its cable is out on one", (MGMT, IB0), (MGMT, dataclasses.replace(IB0, up=False)), "=eno1"),
    ("rails of two hosts each", (MGMT, RAIL), (MGMT, RAIL), "=eno1"),
    ("a tunnel", (MGMT, TUNNEL), (MGMT, TUNNEL), "=eno1"),
    ("an address that both have", (MGMT, SAME), (MGMT, SAME), "=eno1"),
    ("as fast as the route", (MGMT, dataclasses.replace(ROCE, speed_mbit_per_s=1000)),
     (MGMT, dataclasses.replace(ROCE, speed_mbit_per_s=1000)), "=eno1"),
    ("slow on one host", (MGMT, ROCE), (MGMT, dataclasses.replace(ROCE, speed_mbit_per_s=100)), "=eno1"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "expected"), [row[1:] for row in GOLDEN], ids=[row[0] for row in GOLDEN])
def test_nccl_s_sockets_take_the_fastest_network_and_gloo_stays_on_the_route(
    tmp_path, first: tuple[Link, ...], second: tuple[Link, ...], expected: str
) -> None:
    """The plan's own way, from what two nodes report as they join to a rank's variables; only the links are made."""
    gang = plan_text("name: a\nlauncher: slurm\nresources: {nodes: 2, gpus_per_node: 1}\n", tmp_path, environ={}).gang
    gang = dataclasses.replace(
        gang,
        master_addr="10.0.0.11",
        interface="eno1",
        nodes=tuple(dataclasses.replace(node, host=f"node{node.node_rank}") for node in gang.nodes),
    )
    joined = JoinedNodes(gang, timeout_s=1.0, now=0.0)
    hosts = [at(11, *first), at(12, *second)]
    for node, links in zip(gang.nodes, hosts, strict=True):
        joined.join(node, {"pid": 1, "links": report_links(links)}, 0.0)
    order = {"master_addr": "10.0.0.11", "networks": joined.faster_networks("10.0.0.11")}
    for node, links in zip(gang.nodes, hosts, strict=True):
        network = find_rank_network(gang, node, order, links)
        variables = network.gang.variables_of(node.ranks[0], run_dir="/r", attempt=0, master_port=1)
        found = (variables["NCCL_SOCKET_IFNAME"].value, variables["GLOO_SOCKET_IFNAME"].value)
        assert found == (expected, "eno1")
        assert network.facts()["nccl_interfaces"] == (tuple(expected[1:].split(",")) if expected != "=eno1" else ())


def test_what_is_no_address_is_left_out() -> None:
    reported = [{"x": 5, "10.1.0.11/16": 9, "10.1.0.11/99": 9}, {"10.1.0.12/16": 9, "": 1}]
    assert faster_networks(reported, "10.0.0.11") == ("10.1.0.0/16",)


def test_a_user_s_own_choice_for_nccl_stands(tmp_path) -> None:
    text = "name: a\nlauncher: slurm\nresources: {nodes: 2, gpus_per_node: 1}\nenv: {NCCL_SOCKET_IFNAME: eth7}\n"
    gang = dataclasses.replace(plan_text(text, tmp_path, environ={}).gang, master_addr="10.0.0.11", interface="eno1")
    network = find_rank_network(
        gang, gang.nodes[0], {"master_addr": "10.0.0.11", "networks": ["10.1.0.0/16"]}, at(11, MGMT, IB0)
    )
    variables = network.gang.variables_of(0, run_dir="/r", attempt=0, master_port=1)
    assert variables["NCCL_SOCKET_IFNAME"].value == "eth7"


def test_a_host_of_an_unlike_name_is_in_the_same_network() -> None:
    other = dataclasses.replace(IB0, name="ibp12s0")
    reported = [report_links(at(11, MGMT, IB0)), report_links(at(12, MGMT, other))]
    assert names_in(faster_networks(reported, "10.0.0.11"), at(12, MGMT, other)) == ("ibp12s0",)


def test_a_node_that_reports_nothing_keeps_all_on_the_route() -> None:
    assert faster_networks([report_links(at(11, MGMT, IB0)), {}], "10.0.0.11") == ()
    assert faster_networks([], "10.0.0.11") == ()


def test_the_report_of_a_host_with_hundreds_of_links_is_short_and_has_the_fastest() -> None:
    many = [
        Link(name=f"v{n}", addresses=(LinkAddress(address=str(ipaddress.ip_address("10.0.0.1") + 256 * n), prefix=24),))
        for n in range(400)
    ]
    reported = report_links([*many, *at(11, IB0)])
    assert len(reported) == 32
    assert reported["10.1.0.11/16"] == 200_000

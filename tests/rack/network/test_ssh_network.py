"""The network of a gang on real interfaces: hosts of a rack with a second one, overlapping subnets, closed ports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.testbed.network import (
    add_interface,
    block_ports,
    open_ports,
    remove_interface,
)
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

NODES = ("node1", "node2", "node3")
SETTLE = """
import json, os, sys
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.network import choose, probe_network, settle_network
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
accesses = [SshNode(host=host) for host in sys.argv[1:]]
sessions = open_sessions(accesses, environ=os.environ)
for line in sys.stdin:
    order = json.loads(line)
    nodes = tuple(Node(node_rank=number, host=host, ranks=(number,)) for number, host in enumerate(order["hosts"]))
    gang = Gang(
        run="r", token="t", nodes=nodes, entry=Entry(kind="module", target="m", working_dir="/"), threads_per_rank=1,
        backend="gloo", master_addr="", interface=order["interface"], master_port=order["master_port"],
    )
    try:
        if order["patient"]:
            (settled, notes), rows = settle_network(gang, sessions), []
        else:
            findings = probe_network(gang, sessions)
            (settled, notes), rows = choose(gang, findings), findings.rows()
        found = {"master_addr": settled.master_addr,
            "nodes": [(node.interface, node.address, node.why) for node in settled.nodes], "notes": notes, "rows": rows}
    except ClusterddpError as error:
        found = {"error": error.message, "hint": error.hint}
    print(json.dumps(found), flush=True)
for session in sessions.values():
    session.close()
"""


@dataclass(frozen=True)
class Answer:
    found: dict[str, Any]

    @property
    def interfaces(self) -> list[str]:
        return [node[0] for node in self.found["nodes"]]

    @property
    def addresses(self) -> list[str]:
        return [node[1] for node in self.found["nodes"]]

    @property
    def notes(self) -> str:
        return "\n".join(self.found["notes"])

    @property
    def error(self) -> str:
        return f"{self.found['error']}\nhint: {self.found['hint']}"


@dataclass
class Lan:
    """A rack, and a launcher on its head that has a session with every node."""

    rack: Rack
    launcher: subprocess.Popen[str]

    def settle(
        self, *hosts: str, interface: str | None = None, master_port: int | None = None, patient: bool = False
    ) -> Answer:
        """`patient`: as a submit does, which tries again before it refuses."""
        order = {"hosts": hosts or NODES, "interface": interface, "master_port": master_port, "patient": patient}
        self.launcher.stdin.write(json.dumps(order) + "\n")
        self.launcher.stdin.flush()
        return Answer(json.loads(self.launcher.stdout.readline()))

    def ip(self, host: str, *words: str) -> None:
        self.rack.run(host, ["ip", *words])


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    with running_rack(RackPlan(nodes=NODES, private_hosts=True, slurm=False)) as rack:
        argv = rack.argv("head", [sys.executable, "-c", SETTLE, *NODES], env=variables)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
            yield Lan(rack, launcher)
            launcher.stdin.close()


@contextmanager
def second_network(lan: Lan, addresses: dict[str, str], *, names: dict[str, str] | None = None) -> Iterator[None]:
    """Give hosts a second interface, eth1 unless named, on a switch of its own; host -> address/prefix."""
    with ExitStack() as undo:
        for host, address in addresses.items():
            name = (names or {}).get(host, "eth1")
            add_interface(lan.rack, host, name, address)
            undo.callback(remove_interface, lan.rack, host, name)
        yield


@contextmanager
def firewall(
    lan: Lan, host: str, ports: str = "1024-65535", *, refuse: bool = False, interface: str | None = None
) -> Iterator[None]:
    block_ports(lan.rack, host, ports, refuse=refuse, interface=interface)
    try:
        yield
    finally:
        open_ports(lan.rack, host)


@contextmanager
def listening(lan: Lan, host: str, port: int) -> Iterator[None]:
    program = f"import socket, sys; s = socket.create_server(('', {port})); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        lan.rack.argv(host, ["python", "-c", program]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        yield
        process.stdin.close()


def test_nodes_meet_on_the_one_network(lan: Lan) -> None:
    answer = lan.settle()
    assert (answer.interfaces, answer.addresses) == (["eth0"] * 3, ["10.77.0.11", "10.77.0.12", "10.77.0.13"])


def test_the_master_is_the_first_host(lan: Lan) -> None:
    assert lan.settle("node3", "node1").found["master_addr"] == "10.77.0.13"


def test_the_reason_is_reported(lan: Lan) -> None:
    why = lan.settle().found["nodes"][1][2]
    assert why == "the only network by which all 3 hosts reach each other; 10 Gb/s"


def test_one_host_alone_stays_on_its_loopback(lan: Lan) -> None:
    answer = lan.settle("node2")
    assert (answer.found["master_addr"], answer.interfaces) == ("127.0.0.1", ["lo"])


def test_no_process_listens_afterwards(lan: Lan) -> None:
    before = lan.rack.run("node1", ["ss", "-Htln"]).stdout
    lan.settle()
    assert lan.rack.run("node1", ["ss", "-Htln"]).stdout == before


def test_the_whole_matrix_is_reported(lan: Lan) -> None:
    rows = lan.settle().found["rows"]
    assert {(row["source"], row["target"]) for row in rows} == {
        ("node1", "node2"),
        ("node1", "node3"),
        ("node2", "node1"),
        ("node2", "node3"),
        ("node3", "node1"),
    }


def test_names_of_interfaces_may_differ(lan: Lan) -> None:
    cables = {"node1": "10.88.0.11/24", "node2": "10.88.0.12/24", "node3": "10.88.0.13/24"}
    names = {"node2": "enp5s0", "node3": "lan7"}
    with second_network(lan, cables, names=names), firewall(lan, "node3", interface="eth0"):
        answer = lan.settle()
    assert answer.interfaces == ["eth1", "enp5s0", "lan7"]
    assert "eth0 of node1 (10.77.0.11, 10 Gb/s) is not used: node1, node2 -> node3 eth0 10.77.0.13" in answer.notes


def test_an_interface_that_one_host_lacks_is_not_taken(lan: Lan) -> None:
    with second_network(lan, {"node1": "10.88.0.11/24", "node2": "10.88.0.12/24"}):
        assert lan.settle().interfaces == ["eth0"] * 3


def test_overlapping_subnets_are_named(lan: Lan) -> None:
    cables = {"node1": "10.77.0.111/24", "node2": "10.77.0.112/24", "node3": "10.77.0.113/24"}
    with second_network(lan, cables):
        answer = lan.settle()
    assert answer.interfaces == ["eth0"] * 3
    assert "leaves by eth0, which has the subnet 10.77.0.0/24 as eth1 has" in answer.notes


def test_an_overlapping_interface_that_leads_nowhere_is_named(lan: Lan) -> None:
    with second_network(lan, {"node2": "10.77.0.112/24"}):
        lan.ip("node2", "route", "add", "10.77.0.11/32", "dev", "eth1")
        answer = lan.settle()
    assert "on node2 eth1 and eth0 both have the subnet 10.77.0.0/24" in answer.error


def test_a_firewall_is_named(lan: Lan) -> None:
    with firewall(lan, "node3"):
        answer = lan.settle()
    assert re.search(r"node1, node2 -> node3 eth0 10.77.0.13 port \d+: no answer", answer.error)
    assert "hint: does a firewall on node3, or before it, let every TCP port in from 10.77.0.0/24?" in answer.error


def test_a_firewall_that_refuses_is_named(lan: Lan) -> None:
    with firewall(lan, "node3", refuse=True):
        answer = lan.settle()
    assert re.search(r"node1, node2 -> node3 eth0 10.77.0.13 port \d+: refused", answer.error)


def test_a_firewall_that_rejects_as_firewalld_does_is_named(lan: Lan) -> None:
    rules = "add table inet rack\nadd chain inet rack input { type filter hook input priority 0; }\nadd rule inet rack "
    rules += "input tcp flags & (syn|ack) == syn tcp dport 1024-65535 reject with icmpx admin-prohibited\n"
    lan.rack.run("node3", ["nft", "-f", "-"], stdin=rules)
    answer = lan.settle()
    open_ports(lan.rack, "node3")
    assert re.search(r"node1, node2 -> node3 eth0 10.77.0.13 port \d+: No route to host", answer.error)
    assert "hint: does a firewall on node3, or before it, let every TCP port in" in answer.error


def test_a_submit_tries_again_before_it_refuses(lan: Lan) -> None:
    rules = "add table inet rack\nadd chain inet rack input { type filter hook input priority 0; }\nadd rule inet rack "
    rules += "input tcp flags & (syn|ack) == syn tcp dport 1024-65535 quota until 400 bytes drop\n"
    lan.rack.run("node3", ["nft", "-f", "-"], stdin=rules)
    answer = lan.settle(patient=True)
    open_ports(lan.rack, "node3")
    assert answer.interfaces == ["eth0"] * 3


def test_a_closed_master_port_is_named(lan: Lan) -> None:
    with firewall(lan, "node1", "29500"):
        answer = lan.settle(master_port=29500)
    assert "node2, node3 -> node1 eth0 10.77.0.11 port 29500: no answer" in answer.error


def test_a_closed_range_of_master_ports_is_named(lan: Lan) -> None:
    with firewall(lan, "node1", "10000-31999"):
        answer = lan.settle()
    assert "network.master_port: PORT names one that is open in the firewall" in answer.error


def test_a_master_port_in_use_is_named(lan: Lan) -> None:
    with listening(lan, "node1", 29500):
        answer = lan.settle(master_port=29500)
    assert "node1: ask: port 29500 is in use" in answer.error


def test_an_interface_that_the_user_names_is_taken(lan: Lan) -> None:
    with second_network(lan, {node: f"10.88.0.{number}/24" for number, node in enumerate(NODES, 1)}):
        answer = lan.settle(interface="eth1")
    assert answer.interfaces == ["eth1"] * 3
    assert answer.found["nodes"][0][2].startswith("network.interface names it")


def test_an_interface_that_the_user_names_and_a_host_lacks_is_refused(lan: Lan) -> None:
    with second_network(lan, {"node1": "10.88.0.11/24", "node2": "10.88.0.12/24"}):
        answer = lan.settle(interface="eth1")
    assert "network.interface eth1 does not lead to node3\n  node3 has eth0 (10.77.0.13)" in answer.error


def test_an_interface_that_the_user_names_is_tried(lan: Lan) -> None:
    cables = {node: f"10.88.0.{number}/24" for number, node in enumerate(NODES, 1)}
    with second_network(lan, cables), firewall(lan, "node2", interface="eth1"):
        answer = lan.settle(interface="eth1")
    assert "network.interface eth1 does not connect all 3 hosts" in answer.error
    assert re.search(r"node1 -> node2 eth1 10.88.0.2 port \d+: no answer", answer.error)


def test_between_containers_no_host_is_reached(lan: Lan) -> None:
    assert "docker0 (172.17.0.1, the same on other hosts)" in lan.settle(interface="docker0").error


def test_large_packets_that_are_lost_are_named(lan: Lan) -> None:
    cables = {node: f"10.88.0.{number}/24" for number, node in enumerate(NODES, 1)}
    with second_network(lan, cables):
        for node in NODES:
            lan.ip(node, "link", "set", "eth1", "mtu", "9000")
            lan.rack.run(node, ["python", "-c", SEGMENT_IN_SOFTWARE])
        answer = lan.settle(interface="eth1")
    assert "connected, but large packets are lost" in answer.error
    assert "eth1 has MTU 9000" in answer.error


SEGMENT_IN_SOFTWARE = """
import array, fcntl, socket, struct
for command in (0x1f, 0x24):  # segmentation by the card, by the kernel just before it
    value = array.array("B", struct.pack("II", command, 0))
    fcntl.ioctl(socket.socket(), 0x8946, struct.pack("16sP16x", b"eth1", value.buffer_info()[0]))
"""
"""As it is on a cable: no packet is larger than the MTU."""

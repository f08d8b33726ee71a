"""This host's network interfaces, as the kernel lists them."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import Link, interface_towards, named_interface, read_links
from clusterddp.wire import build
from tests.support.paths import ROOT
from tests.testbed.rack import Rack

SHOW = """
import json
from clusterddp.network.interface import read_links
print(json.dumps([link.to_json() for link in read_links()]))
"""


def test_interfaces_are_those_that_psutil_finds() -> None:
    found = {link.name: {entry.address for entry in link.addresses} for link in read_links() if link.addresses}
    expected = {
        name: {
            entry.address for entry in entries if entry.family.name.startswith("AF_INET") and "%" not in entry.address
        }
        for name, entries in psutil.net_if_addrs().items()
    }
    assert found == {name: addresses for name, addresses in expected.items() if addresses}


def test_the_loopback_is_known() -> None:
    [loopback] = [link for link in read_links() if link.loopback]
    assert (loopback.name, loopback.addresses[0].address, loopback.addresses[0].prefix) == ("lo", "127.0.0.1", 8)


def test_psutil_is_not_needed() -> None:
    program = (
        "import sys; sys.modules['psutil'] = None; from clusterddp.network.interface import interface_towards;"
        "print(interface_towards('127.0.0.1').name)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT) == "lo\n"


def test_a_route_names_the_interface() -> None:
    assert interface_towards("127.0.0.1").name == "lo"


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ClusterddpError, match=r"has no network interface 'eth9', it has .*lo"):
        named_interface("eth9")


@pytest.mark.parametrize("name", ["docker0", "br-0a1b2c3d4e5f", "veth12ab", "virbr0", "cni0", "flannel.1", "lxdbr0"])
def test_names_between_containers_are_known(name: str) -> None:
    assert Link(name=name).of_containers


@pytest.mark.parametrize("name", ["eth0", "br0", "br-lan", "bond0", "ib0", "enp5s0", "wlan0", "vlan7"])
def test_other_names_are_not_taken_for_those(name: str) -> None:
    assert not Link(name=name).of_containers


def test_links_survive_json() -> None:
    links = read_links()
    assert tuple(build(Link, json.loads(json.dumps(link.to_json()))) for link in links) == links


@pytest.mark.root
@pytest.mark.usefixtures("needs_rack")
class TestOnAHost:
    """On a host of the rack, whose /sys shows another's interfaces."""

    @staticmethod
    def links(rack: Rack, host: str) -> dict[str, Link]:
        out = rack.run(host, [sys.executable, "-c", SHOW], env={"PYTHONPATH": str(ROOT)}).stdout
        return {data["name"]: build(Link, data) for data in json.loads(out)}

    def test_kinds_are_read(self, hosts: Rack) -> None:
        found = {name: link.kind for name, link in self.links(hosts, "node1").items() if not link.loopback}
        assert found == {"eth0": "veth", "docker0": "bridge", "veth0": "veth", "veth1": "veth"}

    def test_speed_is_that_of_the_card(self, hosts: Rack) -> None:
        assert self.links(hosts, "node1")["eth0"].speed_mbit_per_s == 10_000

    def test_a_cable_that_is_pulled_is_seen(self, hosts: Rack) -> None:
        hosts.pull_cable("node3")
        try:
            assert not self.links(hosts, "node3")["eth0"].up
        finally:
            hosts.plug_cable("node3")

    def test_an_interface_that_is_off_is_seen(self, hosts: Rack) -> None:
        hosts.run("node3", ["ip", "link", "set", "docker0", "down"])
        try:
            assert not self.links(hosts, "node3")["docker0"].up
        finally:
            hosts.run("node3", ["ip", "link", "set", "docker0", "up"])

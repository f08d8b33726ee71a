"""What can be done to the private hosts of a rack: interfaces, firewalls and GPUs."""

import json
import subprocess
from contextlib import contextmanager

import pytest

from tests.support.waiting import wait_until
from tests.testbed.gpus import break_nvidia_smi, fit_gpus, occupy_gpu, remove_gpus
from tests.testbed.network import (
    MAIN_SWITCH,
    add_interface,
    block_ports,
    claim_speed,
    open_ports,
    pull_interface,
    remove_interface,
)
from tests.testbed.plan import HEAD

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

LISTEN = (
    "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); print('up', flush=True); sys.stdin.read()"
)
CONNECT = """\
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5).getsockname()[0])
except OSError as error:
    print(type(error).__name__)
"""
QUERY = ["--format=csv,noheader"]


@contextmanager
def listening(rack, node, port):
    argv = rack.argv(node, ["python", "-c", LISTEN, str(port)])
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    try:
        yield
    finally:
        process.communicate()


def connect(rack, node, address, port):
    return rack.run(node, ["python", "-c", CONNECT, address, str(port)]).stdout.strip()


@contextmanager
def second_interfaces(rack, addresses, switch="switch2"):
    for node, address in addresses.items():
        add_interface(rack, node, "eth1", address, switch=switch)
    try:
        yield
    finally:
        for node in addresses:
            remove_interface(rack, node, "eth1")


def test_nodes_talk_over_a_second_interface(lan):
    addresses = {"node1": "10.78.0.11/24", "node2": "10.78.0.12/24"}
    with second_interfaces(lan, addresses), listening(lan, "node1", 29_500):
        assert connect(lan, "node2", "10.78.0.11", 29_500) == "10.78.0.12"
        assert connect(lan, "node2", "10.77.0.11", 29_500) == "10.77.0.12"


def test_networks_that_overlap_on_other_wires_do_not_reach(lan):
    addresses = {"node1": "10.77.0.211/24", "node2": "10.77.0.212/24"}
    with second_interfaces(lan, addresses):
        lan.run("node2", ["ip", "route", "replace", "10.77.0.11", "dev", "eth1"])
        with listening(lan, "node1", 29_500):
            assert connect(lan, "node2", "10.77.0.11", 29_500) != "10.77.0.12"


def test_a_second_interface_on_the_main_switch_is_one_more_way(lan):
    with second_interfaces(lan, {"node1": "10.77.0.211/24"}, MAIN_SWITCH), listening(lan, "node1", 29_500):
        assert connect(lan, "node2", "10.77.0.211", 29_500) == "10.77.0.12"


def test_a_pulled_interface_has_its_address_and_no_carrier(lan):
    with second_interfaces(lan, {"node1": "10.78.0.11/24"}):
        pull_interface(lan, "node1", "eth1")
        [link] = json.loads(lan.run("node1", ["ip", "-j", "address", "show", "eth1"]).stdout)
        assert ("NO-CARRIER" in link["flags"], link["addr_info"][0]["local"]) == (True, "10.78.0.11")
        pull_interface(lan, "node1", "eth1", plugged=True)
        wait_until(lambda: lan.run("node1", ["cat", "/sys/class/net/eth1/carrier"]).stdout == "1\n", 10)


def test_an_interface_reports_the_speed_that_it_was_given(lan):
    with second_interfaces(lan, {"node1": "10.78.0.11/24"}):
        claim_speed(lan, "node1", "eth1", 100_000)
        assert lan.run("node1", ["cat", "/sys/class/net/eth1/speed"]).stdout == "100000\n"
        assert lan.run("node1", ["cat", "/sys/class/net/eth0/speed"]).stdout == "10000\n"


@pytest.mark.parametrize(("refuse", "error"), [(False, "TimeoutError"), (True, "ConnectionRefusedError")])
def test_a_firewall_blocks_its_ports_and_no_others(lan, refuse, error):
    block_ports(lan, "node1", "29400-29600", refuse=refuse)
    try:
        with listening(lan, "node1", 29_500), listening(lan, "node1", 29_700):
            assert connect(lan, "node2", "10.77.0.11", 29_500) == error
            assert connect(lan, "node2", "10.77.0.11", 29_700) == "10.77.0.12"
    finally:
        open_ports(lan, "node1")
    with listening(lan, "node1", 29_500):
        assert connect(lan, "node2", "10.77.0.11", 29_500) == "10.77.0.12"


def test_a_firewall_lets_out_what_its_host_opens(lan):
    block_ports(lan, "node1", "1024-65535")
    try:
        with listening(lan, "node2", 29_500):
            assert connect(lan, "node1", "10.77.0.12", 29_500) == "10.77.0.11"
    finally:
        open_ports(lan, "node1")


def test_nvidia_smi_lists_the_gpus_of_a_node(lan):
    gpus = fit_gpus(lan, "node1", 2)
    try:
        listing = lan.run(HEAD, ["ssh", "node1", "nvidia-smi", "-L"]).stdout.splitlines()
        table = lan.run("node1", ["nvidia-smi", "--query-gpu=index,memory.total", *QUERY]).stdout
        assert lan.run("node2", ["nvidia-smi", "-L"], check=False).returncode == 127
    finally:
        remove_gpus(lan, "node1")
    assert listing == [f"GPU {gpu.index}: NVIDIA H200 (UUID: {gpu.uuid})" for gpu in gpus]
    assert table == "0, 143771 MiB\n1, 143771 MiB\n"


def test_nvidia_smi_names_the_processes_on_a_gpu(lan):
    gpus = fit_gpus(lan, "node1", 2)
    try:
        occupy_gpu(lan, "node1", 1, 1)
        apps = lan.run("node1", ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", *QUERY]).stdout
    finally:
        remove_gpus(lan, "node1")
    assert apps == f"{gpus[1].uuid}, 1, /usr/bin/bash\n"


def test_nvidia_smi_can_fail(lan):
    fit_gpus(lan, "node1", 2)
    try:
        break_nvidia_smi(lan, "node1")
        done = lan.run("node1", ["nvidia-smi", "-L"], check=False)
    finally:
        remove_gpus(lan, "node1")
    assert (done.returncode, done.stdout) == (18, "Failed to initialize NVML: Driver/library version mismatch\n")

"""The laptop and its hosts, as tests of SSH runs use them."""

import json
import subprocess
import uuid

import pytest

from clusterddp.ranks.environment import COOKIE, cookie
from tests.support.ssh_place import send
from tests.support.waiting import wait_until
from tests.testbed.network import block_ports, open_ports
from tests.testbed.plan import HEAD

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


def test_processes_of_a_run_are_found_and_killed_from_outside(ssh_place):
    token = uuid.uuid4().hex
    sleeps = [
        subprocess.Popen(ssh_place.rack.argv(node, ["sleep", "1000"], env={COOKIE: cookie(token, role)}))
        for node, role in (("node1", "s0"), ("node1", "n0"), ("node2", "s1"))
    ]
    wait_until(lambda: len([each for each in ssh_place.all_processes(token) if each.command == "sleep 1000"]) == 3, 10)
    assert [each.role for each in ssh_place.processes("node2", token)] == ["s1"]
    ssh_place.kill("node1", "n0", token)
    sleeps[1].wait(timeout=10)
    assert [each.role for each in ssh_place.processes("node1", token)] == ["s0"]
    ssh_place.kill("node1", "s0", token)
    ssh_place.kill("node2", "s1", token)
    ssh_place.await_gone(token)
    for each in sleeps:
        each.wait(timeout=10)


def test_ctrl_c_reaches_a_command_that_was_started(ssh_place):
    block_ports(ssh_place.rack, "node1", "22")
    try:
        process = ssh_place.start("hosts", "check", "node1")
        knocks = ["ss", "--no-header", "--tcp", "state", "syn-sent"]
        wait_until(lambda: ssh_place.rack.run(HEAD, knocks).stdout, 30)
        send(process)
        assert process.wait(timeout=240) == 130
    finally:
        open_ports(ssh_place.rack, "node1")


def test_the_laptop_has_clusterddp(ssh_place):
    done = ssh_place.clusterddp("hosts", "check", "node[1-3]", "-o", "json")
    assert [row["ok"] for row in json.loads(done.stdout)["hosts"]] == [True] * 3

"""The rack as machines on a LAN that share nothing, with sshd and a Python that has torch alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bare_python import VERSION, find_packages
from tests.support.paths import ROOT
from tests.support.rack_traces import find_traces, init_pids, own_interfaces
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, USER, RackPlan
from tests.testbed.rack import RackError, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SITE_PACKAGES = Path("/opt/bare/lib", VERSION, "site-packages")


def ssh(rack, host: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return rack.run(HEAD, ["ssh", host, *command], check=check)


@pytest.mark.parametrize("user", ["root", USER])
def test_a_user_of_the_head_may_log_in_to_every_node(lan, user):
    assert [ssh(lan, f"{user}@{node}", "id", "-un").stdout.strip() for node in lan.plan.nodes] == [user] * 3


def test_a_node_can_log_in_nowhere(lan):
    done = lan.run(
        "node1", ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes", "node2", "true"], check=False
    )
    assert (done.returncode, "Permission denied" in done.stderr) == (255, True)


@pytest.mark.parametrize(
    "path", ["/root/file", "/home/ana/file", "/tmp/file", "/var/tmp/file", "/srv/file", "/dev/shm/file"]
)
def test_what_one_node_writes_no_other_sees(lan, path):
    lan.run("node1", ["sh", "-c", f"echo mine > {path}"])
    assert lan.run("node2", ["test", "-e", path], check=False).returncode == 1
    assert lan.run("node1", ["cat", path]).stdout == "mine\n"


@pytest.mark.parametrize("path", [str(ROOT), sys.prefix])
def test_the_checkout_and_the_environment_of_the_tests_cannot_be_seen(lan, path):
    assert lan.run("node1", ["ls", "-A", path], check=False).stdout == ""
    assert lan.run(HEAD, ["ls", "-A", path]).stdout != ""


@pytest.mark.parametrize("user", ["root", USER])
def test_python_on_a_node_has_torch_and_not_clusterddp(lan, user):
    program = (
        "import torch, importlib.util as u; print([n for n in ('clusterddp', 'psutil', 'numpy') if u.find_spec(n)])"
    )
    assert ssh(lan, f"{user}@node3", "python", "-c", f'"{program}"').stdout == "[]\n"


def test_python_of_a_node_may_be_off_its_path(needs_rack):
    with running_rack(RackPlan(nodes=["node1"], private_hosts=True, slurm=False, bare_on_path=False)) as rack:
        assert ssh(rack, "node1", "command", "-v", "python", check=False).stdout != "/opt/bare/bin/python\n"
        assert ssh(rack, "node1", "/opt/bare/bin/python", "-c", "'import torch; print(1)'").stdout == "1\n"


@pytest.mark.parametrize("path", ["/usr", "/etc", SITE_PACKAGES / "torch", sys.base_prefix])
def test_a_node_cannot_write_to_what_it_sees_of_this_machine(lan, path):
    done = lan.run("node1", ["touch", f"{path}/file"], check=False)
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("fact", ["/proc/sys/kernel/random/boot_id", "/etc/machine-id"])
def test_nodes_are_different_machines(lan, fact):
    assert len({lan.run(node, ["cat", fact]).stdout for node in lan.plan.nodes}) == 3


def test_sys_lists_the_interfaces_of_the_node(lan):
    assert lan.run("node1", ["ls", "/sys/class/net"]).stdout.split() == ["docker0", "eth0", "lo", "veth0", "veth1"]


def test_a_file_of_a_node_is_found_from_outside(lan):
    lan.run("node1", ["sh", "-c", "echo text > ~/note"])
    assert lan.outside("node1", "/root/note").read_text() == "text\n"


def test_a_disk_survives_a_power_failure_and_memory_does_not(needs_rack):
    with running_rack(RackPlan(nodes=["node1"], private_hosts=True, slurm=False, docker=False)) as rack:
        boot = rack.run("node1", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout
        rack.run("node1", ["touch", "/root/kept", "/var/tmp/kept", "/tmp/lost", "/run/lost", "/dev/shm/lost"])
        rack.power_off("node1")
        with pytest.raises(RackError, match="node1 is off"):
            rack.run("node1", ["true"])
        rack.power_on("node1")
        found = ssh(rack, "node1", "ls", "/root", "/var/tmp", "/tmp", "/run", "/dev/shm").stdout.split()
        assert (found.count("kept"), found.count("lost")) == (2, 0)
        assert rack.run("node1", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
        assert json.loads(rack.run("node1", ["ip", "-j", "link", "show", "type", "bridge"]).stdout) == []


def test_some_nodes_can_have_a_directory_in_common(needs_rack):
    shares = {"/shared": ["node1", "node2"], "/root": ["node2", "node3"]}
    plan = RackPlan(nodes=["node1", "node2", "node3"], private_hosts=True, slurm=False, shares=shares)
    with running_rack(plan) as rack:
        rack.run("node2", ["touch", "/shared/file", "/root/file"])
        seen = {
            node: ssh(rack, node, "ls", "/shared/file", "/root/file", check=False).stdout.split() for node in plan.nodes
        }
    assert seen == {"node1": ["/shared/file"], "node2": ["/root/file", "/shared/file"], "node3": ["/root/file"]}


def test_nothing_is_left_of_private_hosts_after_the_end(needs_rack):
    before = own_interfaces()
    with running_rack(RackPlan(nodes=["node1", "node2"], private_hosts=True, slurm=False)) as rack:
        ssh(rack, "node1", "trap '' TERM HUP; setsid sleep 1000 <&- >&- 2>&- &")
        find = find_traces(init_pids(rack.dir), rack.dir)
        assert find()
    wait_until(lambda: find() == [], 10)
    assert own_interfaces() == before
    assert all(path.exists() for path in find_packages(["torch"]))


def test_two_lans_at_once_do_not_disturb_each_other(lan):
    with running_rack(RackPlan(nodes=["node1"], private_hosts=True, slurm=False)) as other:
        other.run("node1", ["touch", "/srv/other"])
        assert lan.run("node1", ["test", "-e", "/srv/other"], check=False).returncode == 1
    assert ssh(lan, "node1", "hostname").stdout == "node1\n"


def test_a_gang_of_torch_meets_across_private_hosts(lan):
    program = "import torch, torch.distributed as dist; dist.init_process_group('gloo'); t = torch.ones(1)"
    program += "; dist.all_reduce(t); print(int(t), flush=True); dist.destroy_process_group()"
    processes = []
    for rank, node in enumerate(lan.plan.nodes):
        rendezvous = {"MASTER_ADDR": lan.plan.address("node1"), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        argv = lan.argv(node, ["python", "-c", program], env={**rendezvous, "RANK": str(rank), "WORLD_SIZE": "3"})
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
    assert [process.communicate(timeout=240)[0] for process in processes] == ["3\n"] * 3

"""The rack: hosts with a real Slurm, sshd and network on this machine, for the tests of the launchers."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rack_traces import find_traces, init_pids, own_interfaces
from tests.support.waiting import wait_until
from tests.testbed.files import FREEZER
from tests.testbed.plan import HEAD, USER, RackPlan
from tests.testbed.rack import Rack, RackError, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

NODES = ["node1", "node2", "node3", "node4"]


def submit(rack: Rack, script: str, *options: str, user: str = USER) -> str:
    """Submit a script that writes into the shared storage; gives the job id."""
    sbatch = ["sbatch", "--parsable", "--output=out.%j", *options]
    return rack.run(HEAD, sbatch, cwd=rack.dir / "shared", stdin=f"#!/bin/bash\n{script}\n", user=user).stdout.strip()


def job_state(rack: Rack, job: str) -> str:
    words = rack.run(HEAD, ["scontrol", "show", "job", "-o", job]).stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)["JobState"]


def await_job(rack: Rack, job: str, state: str, within_s: float = 30) -> None:
    wait_until(lambda: job_state(rack, job) == state, within_s)


def reaches(rack: Rack, host: str, other: str) -> bool:
    return rack.run(host, ["ssh", "-o", "ConnectTimeout=1", other, "true"], check=False).returncode == 0


def qdiscs(rack: Rack, host: str, device: str) -> list[dict[str, object]]:
    answer = json.loads(rack.run(host, ["tc", "-s", "-j", "qdisc", "show", "dev", device]).stdout)
    return [qdisc for qdisc in answer if qdisc["kind"] == "tbf"]


def test_all_nodes_are_idle_when_it_is_up(rack):
    assert [rack.node_state(node) for node in NODES] == ["idle"] * 4


def test_srun_over_four_hosts_prints_their_four_names(rack):
    assert sorted(rack.run(HEAD, ["srun", "-N4", "hostname"], user=USER).stdout.split()) == NODES


def test_a_batch_job_completes_and_slurm_says_so(rack):
    job = submit(rack, "hostname; srun hostname", "-N2")
    await_job(rack, job, "COMPLETED")
    assert rack.run(HEAD, ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]).stdout == "COMPLETED\n"
    first, *both = (rack.dir / "shared" / f"out.{job}").read_text().split()
    assert (first, sorted(both)) == ("node1", ["node1", "node2"])


def test_a_job_runs_as_the_user_who_submitted_it(rack):
    job = submit(rack, "id -un")
    await_job(rack, job, "COMPLETED")
    assert (rack.dir / "shared" / f"out.{job}").read_text() == f"{USER}\n"


def test_a_higher_partition_preempts_and_the_job_comes_back(rack):
    low = submit(rack, "sleep 2", "-N4", "--exclusive", "--requeue")
    await_job(rack, low, "RUNNING")
    high = submit(rack, "true", "-N4", "--exclusive", "--partition=high")
    await_job(rack, high, "COMPLETED")
    assert job_state(rack, low) == "PENDING"
    await_job(rack, low, "COMPLETED")


@pytest.mark.skipif(not FREEZER.is_dir(), reason="this machine has no freezer of cgroup v1")
def test_a_job_s_signal_reaches_its_tasks_and_none_of_their_children(rack):
    (rack.dir / "shared" / "child.sh").write_text("trap 'echo child' TERM; echo up; sleep 2; echo done")
    (rack.dir / "shared" / "task.sh").write_text("trap 'echo task' TERM; bash child.sh & wait; wait")
    job = submit(rack, "srun bash task.sh")
    out = rack.dir / "shared" / f"out.{job}"
    wait_until(lambda: out.exists() and "up" in out.read_text(), 30)
    rack.run(HEAD, ["scancel", "-s", "TERM", job])
    await_job(rack, job, "COMPLETED")
    said = [line for line in out.read_text().splitlines() if "STEP" not in line]
    assert said == ["up", "task", "done"]


@pytest.mark.parametrize("user", ["root", USER])
def test_ssh_from_the_head_checks_each_node_s_host_key(rack, user):
    names = [rack.run(HEAD, ["ssh", node, "hostname"], user=user).stdout.strip() for node in NODES]
    assert names == NODES


def test_ssh_refuses_a_node_with_another_host_key(rack):
    swapped = "HostKeyAlias=node2"
    done = rack.run(HEAD, ["ssh", "-o", swapped, "node1", "true"], check=False)
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


def test_a_host_s_own_name_means_itself_as_on_debian(rack):
    assert rack.run("node2", ["getent", "ahostsv4", "node2"]).stdout.split()[0] == "127.0.1.1"
    assert rack.run("node1", ["getent", "ahostsv4", "node2"]).stdout.split()[0] == "10.77.0.12"


def test_every_host_has_the_same_docker_address(rack):
    show = ["ip", "-j", "-4", "address", "show", "docker0"]
    links = [json.loads(rack.run(node, show).stdout)[0] for node in NODES]
    assert [(link["addr_info"][0]["local"], link["operstate"]) for link in links] == [("172.17.0.1", "UP")] * 4


def test_gpus_show_up_in_the_allocation(rack):
    command = ["srun", "-N2", "--gpus-per-node=3", "bash", "-c", "echo $HOSTNAME $CUDA_VISIBLE_DEVICES"]
    assert sorted(rack.run(HEAD, command).stdout.splitlines()) == ["node1 0,1,2", "node2 0,1,2"]


def test_a_pulled_cable_cuts_and_heals(rack):
    rack.pull_cable("node3")
    assert not reaches(rack, HEAD, "node3")
    assert not reaches(rack, "node3", "node4")
    assert reaches(rack, HEAD, "node4")
    rack.plug_cable("node3")
    wait_until(lambda: reaches(rack, HEAD, "node3"), 30)
    wait_until(lambda: reaches(rack, "node3", "node4"), 30)
    rack.await_idle("node3")


def test_a_link_rate_slows_both_directions(rack):
    rack.set_link_rate("node4", 100)
    try:
        copy = "head -c 1M /dev/zero | ssh node4 'cat >/dev/null; head -c 1M /dev/zero' | wc -c"
        assert rack.run(HEAD, ["bash", "-c", copy]).stdout == "1048576\n"
        # What the shaper counted, not how long it took: the machine may be slow by itself.
        for host, device in ((HEAD, "port4"), ("node4", "eth0")):
            [qdisc] = qdiscs(rack, host, device)
            assert qdisc["options"]["rate"] == 12_500_000
            assert qdisc["bytes"] > 1_000_000
            assert qdisc["overlimits"] > 0
    finally:
        rack.set_link_rate("node4", None)
    assert qdiscs(rack, HEAD, "port4") == []


def test_a_powered_off_host_goes_down_and_comes_back(needs_rack):
    with running_rack(RackPlan(nodes=["node1", "node2"], slurmd_timeout_s=3)) as rack:
        job = submit(rack, "sleep 1000", "-w", "node2", "--no-requeue")
        await_job(rack, job, "RUNNING")
        rack.power_off("node2")
        with pytest.raises(RackError, match="node2 is off"):
            rack.run("node2", ["true"])
        log = rack.dir / "log/slurmctld"
        wait_until(
            lambda: rack.node_state("node2") == "down*",
            60,
            what=lambda: f"{rack.node_state('node2')}\n{log.read_text()[-2000:]}",
        )
        assert job_state(rack, job) == "NODE_FAIL"
        rack.power_on("node2")
        rack.await_idle("node2")


def test_slurm_is_set_up_as_the_plan_says(needs_rack):
    plan = RackPlan(
        nodes=["rack1node1", "rack2node1"],
        gpus_per_host=0,
        job_requeue=False,
        kill_wait_s=7,
        min_job_age_s=9,
        slurmd_timeout_s=11,
        debian_hosts=False,
    )
    with running_rack(plan) as rack:
        lines = rack.run(HEAD, ["scontrol", "show", "config"]).stdout.splitlines()
        config = {line.split("=")[0].strip(): line.split("=")[1].strip() for line in lines if "=" in line}
        names = rack.run(HEAD, ["srun", "-N2", "hostname"]).stdout.split()
        assert rack.run("rack1node1", ["hostname", "-i"]).stdout == "10.77.0.11\n"
    assert sorted(names) == plan.nodes
    assert {key: config[key] for key in ("JobRequeue", "KillWait", "MinJobAge", "SlurmdTimeout")} == {
        "JobRequeue": "0",
        "KillWait": "7 sec",
        "MinJobAge": "9 sec",
        "SlurmdTimeout": "11 sec",
    }


def test_sacct_says_that_there_is_no_accounting(rack):
    done = rack.run(HEAD, ["sacct"], check=False)
    assert (done.returncode, done.stderr) == (1, "Slurm accounting storage is disabled\n")


def test_sacct_answers_with_accounting(needs_rack_accounting):
    with running_rack(RackPlan(nodes=["node1"], accounting=True)) as rack:
        job = submit(rack, "exit 3")
        query = ["sacct", "-n", "-X", "-P", "-j", job, "--format=State,ExitCode"]
        wait_until(lambda: rack.run(HEAD, query, user=USER).stdout == "FAILED|3:0\n", 30)


def test_two_racks_at_once_do_not_disturb_each_other(rack):
    before = own_interfaces()
    with running_rack(RackPlan(nodes=["node1", "node2"])) as other:
        assert own_interfaces() == before
        submit(other, "sleep 100", "-N2", "--exclusive")
        other.power_off("node1")
        assert sorted(rack.run(HEAD, ["srun", "-N4", "hostname"]).stdout.split()) == NODES
        assert other.run("node2", ["hostname"]).stdout == "node2\n"
    assert sorted(rack.run(HEAD, ["srun", "-N4", "hostname"]).stdout.split()) == NODES


def test_nothing_is_left_after_the_end(needs_rack):
    before = own_interfaces()
    with running_rack() as rack:
        # A job that defends itself, a detached one, and a command that the owner started.
        submit(rack, "trap '' TERM HUP; setsid sleep 1000 & sleep 1000", "-N2")
        suspended = submit(rack, "srun sleep 1000", "-N2")
        await_job(rack, suspended, "RUNNING")
        rack.run(HEAD, ["scontrol", "suspend", suspended])
        entered = subprocess.Popen(rack.argv("node1", ["sleep", "1000"]))
        find = find_traces(init_pids(rack.dir), rack.dir)
        assert find()
    assert find() == []
    assert entered.wait(timeout=10) != 0
    assert own_interfaces() == before


@pytest.mark.parametrize("moment", ["while it is up", "while it starts"])
def test_nothing_is_left_after_kill_9_of_the_owner(needs_rack, moment):
    up = "with running_rack() as rack: print(rack.dir, flush=True); input()"
    starting = "Rack.power_on = lambda rack, *nodes: [print(rack.dir, flush=True), input()]\n"
    program = f"from tests.testbed.rack import *\n{starting if moment == 'while it starts' else ''}{up}"
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    rack_dir = Path(owner.stdout.readline().strip())
    find = find_traces(init_pids(rack_dir), rack_dir)
    assert find()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: find() == [], 30)


def test_a_rack_that_cannot_start_leaves_nothing(needs_rack, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RackError, match="did not start"), running_rack(RackPlan(nodes=["name_of_no_host"])):
        pass
    assert list(tmp_path.iterdir()) == []

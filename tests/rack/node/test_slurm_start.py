"""How ranks start under Slurm: their variables, the interface by which they meet, and ports that others use."""

import json
import subprocess
import sys

import pytest

from clusterddp.network.port import walk_ports
from clusterddp.node.supervisor import LINK_PORTS
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_ranks
from clusterddp.run.seal import sealed
from clusterddp.system.files import read_json, write_json
from tests.support.port_thief import MEET, STEAL
from tests.support.slurm_runs import await_final_end, environment, make_slurm_run, start_run
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

DUMP = "import json, os\nprint(json.dumps(dict(os.environ)))\n"
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_PROCID")


def start_tasks(
    rack: Rack, run: RunDir, *options: str, more_env: dict[str, str] | None = None, run_dir: str = ""
) -> subprocess.CompletedProcess[str]:
    """Start a run's tasks with srun from the head, as the batch script does from its host."""
    srun = ["srun", "--distribution=block", "--kill-on-bad-exit=1", "--export=ALL", *options]
    task = [sys.executable, "-m", "clusterddp.places.slurm.task", run_dir or str(run.path), "0"]
    return rack.run(HEAD, [*srun, *task], env=environment() | (more_env or {}), check=False)


def dumps(run: RunDir, num_ranks: int) -> list[dict[str, str]]:
    return [json.loads(run.attempt(0).stdout(rank).read_text()) for rank in range(num_ranks)]


def plan_for(run: RunDir, world_size: int) -> None:
    """Make a plan fit a step that was asked for by hand."""
    plan = read_json(run.plan)
    node = plan["gang"]["nodes"][0]
    plan["gang"]["nodes"] = [node | {"node_rank": rank, "ranks": [rank]} for rank in range(world_size)]
    write_json(run.plan, sealed(plan))


def test_each_rank_learns_its_place_and_the_way_to_the_others(rack):
    run = make_slurm_run(rack, "place", DUMP, resources="{nodes: 2, procs_per_node: 2}")
    done = start_tasks(rack, run, "-N2", "-n4", "--ntasks-per-node=2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [[environ[name] for name in NAMES] for environ in dumps(run, 4)] == [
        ["0", "0", "0", "4", "2", "2", "0"],
        ["1", "1", "0", "4", "2", "2", "1"],
        ["2", "0", "1", "4", "2", "2", "2"],
        ["3", "1", "1", "4", "2", "2", "3"],
    ]
    start = read_json(run.attempt(0).start)
    assert {environ["MASTER_ADDR"] for environ in dumps(run, 4)} == {rack.plan.address("node1")}
    assert {environ["MASTER_PORT"] for environ in dumps(run, 4)} == {str(start["master_port"])}
    assert 10_000 <= start["master_port"] < 32_000
    assert read_end(run.attempt(0)).outcome == "COMPLETED"


def test_tasks_meet_at_a_port_that_another_user_wants(rack):
    run = make_slurm_run(rack, "theft", STEAL + MEET, resources="{nodes: 2, procs_per_node: 2}")
    done = start_tasks(rack, run, "-N2", "-n4", "--ntasks-per-node=2")
    assert (done.returncode, done.stderr) == (0, ""), run.attempt(0).stderr(0).read_text()
    assert (run.path / "stolen").read_text() == ""


def test_gangs_over_several_hosts_get_the_interface_that_reaches_the_master(rack):
    run = make_slurm_run(rack, "interface", DUMP)
    start_tasks(rack, run, "-N2", "-n2")
    assert [environ["GLOO_SOCKET_IFNAME"] for environ in dumps(run, 2)] == ["eth0", "eth0"]
    assert [environ["NCCL_SOCKET_IFNAME"] for environ in dumps(run, 2)] == ["=eth0", "=eth0"]
    assert [record.interface for record in read_ranks(run.attempt(0))] == ["eth0", "eth0"]
    assert [(node["host"], node["address"], node["why"]) for node in read_json(run.attempt(0).start)["nodes"]] == [
        ("node1", "10.77.0.11", "it has the master address"),
        ("node2", "10.77.0.12", "the route to 10.77.0.11 goes out there"),
    ]


def test_a_gang_on_one_host_gets_no_interface_and_meets_on_the_loopback(rack):
    run = make_slurm_run(rack, "alone", DUMP, resources="{nodes: 1, procs_per_node: 2}")
    start_tasks(rack, run, "-N1", "-n2")
    assert [environ["MASTER_ADDR"] for environ in dumps(run, 2)] == ["127.0.0.1"] * 2
    assert [environ.get("GLOO_SOCKET_IFNAME") for environ in dumps(run, 2)] == [None, None]
    assert [environ.get("NCCL_SOCKET_IFNAME") for environ in dumps(run, 2)] == [None, None]


def test_an_interface_that_the_user_has_set_stays(rack):
    run = make_slurm_run(rack, "users", DUMP)
    start_tasks(rack, run, "-N2", "-n2", more_env={"NCCL_SOCKET_IFNAME": "ib0"})
    assert [environ["NCCL_SOCKET_IFNAME"] for environ in dumps(run, 2)] == ["ib0", "ib0"]
    assert [environ["GLOO_SOCKET_IFNAME"] for environ in dumps(run, 2)] == ["eth0", "eth0"]


def test_an_interface_that_the_spec_names_is_taken_on_every_host(rack):
    run = make_slurm_run(rack, "named", DUMP, more="network: {interface: docker0}")
    start_tasks(rack, run, "-N2", "-n2")
    assert [environ["GLOO_SOCKET_IFNAME"] for environ in dumps(run, 2)] == ["docker0", "docker0"]
    assert [environ["MASTER_ADDR"] for environ in dumps(run, 2)] == ["172.17.0.1"] * 2


def test_a_named_interface_that_a_host_lacks_is_an_error_that_names_the_host(rack):
    run = make_slurm_run(rack, "lacking", DUMP, more="network: {interface: ib7}")
    assert start_tasks(rack, run, "-N2", "-n2").returncode != 0
    assert "node1 has no network interface 'ib7', it has docker0, eth0, lo" in read_end(run.attempt(0)).reason


def test_uneven_tasks_are_a_gang_like_any_other(rack):
    run = make_slurm_run(rack, "uneven", DUMP)
    plan_for(run, 7)
    done = start_tasks(rack, run, "-N4", "-n7", "--cpus-per-task=16")
    assert done.returncode == 0, done.stderr
    assert [f"{environ['GROUP_RANK']}.{environ['LOCAL_RANK']}" for environ in dumps(run, 7)] == [
        *("0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0")
    ]
    assert [environ["LOCAL_WORLD_SIZE"] for environ in dumps(run, 7)] == ["2"] * 6 + ["1"]


@pytest.mark.parametrize(
    ("option", "visible"), [("--gpus-per-node=2", "0,1"), ("--gpus-per-task=1", "0,1"), ("--gres=gpu:2", "0,1")]
)
def test_local_rank_counts_to_a_gpu_of_its_own_however_they_were_asked_for(rack, option, visible):
    name = option.strip("-").partition("=")[0]
    run = make_slurm_run(rack, name, DUMP, resources="{nodes: 1, procs_per_node: 2}")
    start_tasks(rack, run, "-N1", "-n2", option)
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in dumps(run, 2)] == [visible, visible]


def test_slurm_shows_every_task_all_gpus_though_each_task_asked_for_its_own(rack):
    code = "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    run = make_slurm_run(
        rack, "bound", code, more="slurm: {gpus_per_task: 1}", resources="{nodes: 1, procs_per_node: 2}"
    )
    start_run(rack, run)
    assert await_final_end(run).outcome == "COMPLETED"
    assert [run.attempt(0).stdout(rank).read_text() for rank in (0, 1)] == ["0,1\n"] * 2


def test_a_run_directory_that_a_host_does_not_see_is_named_with_the_host(rack):
    run = make_slurm_run(rack, "unseen", DUMP)
    done = start_tasks(rack, run, "-N1", "-n1", run_dir="/nowhere/run")
    assert done.returncode == 1
    assert "clusterddp: node1: /nowhere/run/plan.json cannot be read: " in done.stderr


def test_a_step_of_another_size_than_planned_is_refused(rack):
    run = make_slurm_run(rack, "size", DUMP)
    done = start_tasks(rack, run, "-N1", "-n1")
    assert "the plan has 2 ranks, srun has started 1 tasks" in done.stderr


OTHER_HEAD = """
import contextlib, socket, sys
servers = [socket.create_server(("", port)) for port in map(int, sys.argv[1:])]
print("up", flush=True)
while True:
    for server in servers:
        server.settimeout(0.02)
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.send(b'{"nonce": "%s"}\\n%s {"kind": "welcome"}\\n' % (b"0" * 32, b"0" * 64))
"""
"""Answers as the head of another run would."""


def test_ports_that_others_have_taken_are_walked_past(rack):
    run = make_slurm_run(rack, "ports", DUMP)
    job = int(rack.run(HEAD, ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "true"]).stdout) + 1
    first_master = walk_ports(f"slurm:{job}:0", 3)
    taken = [*walk_ports(f"link:{job}", LINK_PORTS)[:5], *first_master]
    argv = rack.argv("node1", [sys.executable, "-c", OTHER_HEAD, *map(str, taken)])
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"up\n"
            done = start_tasks(rack, run, "-N2", "-n2", "--nodelist=node1,node2")
        finally:
            other.kill()
    assert dumps(run, 1)[0]["SLURM_JOB_ID"] == str(job)
    assert done.returncode == 0, done.stderr
    assert read_json(run.attempt(0).start)["master_port"] not in taken


def test_two_gangs_on_the_same_hosts_do_not_meet(rack):
    code = "import os, time\nprint(os.environ['MASTER_PORT'], flush=True)\ntime.sleep(1)\n"
    runs = [make_slurm_run(rack, f"both-{number}", code) for number in range(2)]
    for run in runs:
        start_run(rack, run)
    assert [await_final_end(run).outcome for run in runs] == ["COMPLETED", "COMPLETED"]
    assert len({run.attempt(0).stdout(0).read_text() for run in runs}) == 2

"""`clusterddp worker`, typed on each of three machines with their own network and name; SSH is not there."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

import pytest

from clusterddp.places.state import read_state
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.record import read_run
from tests.support.paths import ROOT
from tests.support.waiting import wait_until
from tests.support.worker_machines import Machines, interrupt, machines_on, result
from tests.testbed.network import block_ports, open_ports
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = "name: lan\ndevice: cpu\nssh: {hosts: [node1, 10.77.0.12]}\n"
TELL = (
    "import json, os\n"
    "names = 'RANK LOCAL_RANK WORLD_SIZE NODE_RANK MASTER_ADDR GLOO_SOCKET_IFNAME SECRET'\n"
    "print(json.dumps({name: os.environ.get(name) for name in names.split()}))\n"
)
FALLS_ONCE = (
    "import os\nif os.environ['CLUSTERDDP_ATTEMPT'] == '0':\n    raise SystemExit(3)\n"
    "print(os.environ['CLUSTERDDP_RUN'], os.environ['CLUSTERDDP_ATTEMPT'])\n"
)
SLEEP = "import time\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def three(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2", "node3"], slurm=False)) as rack:
        yield rack


@pytest.fixture
def machines(three: Rack) -> Iterator[Machines]:
    with machines_on(three) as machines:
        machines.write("job.yaml", SPEC + "entry: {script: entry.py}\n")
        machines.write("entry.py", TELL)
        yield machines


def test_each_machine_finds_its_place_by_its_own_names_and_addresses(machines: Machines) -> None:
    later, first = machines.worker("node2"), machines.worker("node1")
    assert (result(later)[0], result(first)[0]) == (0, 0)
    printed = json.loads(machines.run("node2").attempt(0).stdout(1).read_text())
    assert printed == {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.77.0.11",
        "GLOO_SOCKET_IFNAME": "eth0",
        "SECRET": None,
    }


def test_the_trainer_learns_over_machines_that_have_nothing_in_common(machines: Machines) -> None:
    train = "train: {dataset: shapes, samples: 256, model: fastnet, width: 0.125, epochs: 1, batch_size: 32}\n"
    machines.write("job.yaml", SPEC + train)
    both = [machines.worker(node) for node in ("node1", "node2")]
    assert [result(process, 240)[0] for process in both] == [0, 0]
    assert json.loads(machines.run("node1").summary.read_text())["world_size"] == 2


def test_a_program_that_owns_its_ranks_is_started_once_on_each_machine(machines: Machines) -> None:
    machines.write("job.yaml", SPEC + "resources: {procs_per_node: 2}\nentry: {script: entry.py, owns_ranks: true}\n")
    both = [machines.worker(node) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [0, 0]
    printed = json.loads(machines.run("node2").attempt(0).stdout(1).read_text())
    assert [printed[name] for name in ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")] == [
        "1",
        "2",
        "1",
        "10.77.0.11",
    ]


def test_every_machine_has_a_record_of_the_run_and_of_its_end(machines: Machines) -> None:
    both = [machines.worker(node) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [0, 0]
    runs = [machines.run(node) for node in ("node1", "node2")]
    assert runs[0].name == runs[1].name
    assert [read_run(run).launcher for run in runs] == ["worker", "worker"]
    assert [read_state(run).state.value for run in runs] == ["COMPLETED", "COMPLETED"]


def test_machines_may_share_the_runs_directory(machines: Machines) -> None:
    shared = str(machines.path / "runs")
    both = [machines.worker(node, "--runs", shared) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [0, 0]
    assert len([path for path in (machines.path / "runs").iterdir() if not path.name.startswith(".")]) == 1


def test_a_rank_that_fails_ends_all_and_every_terminal_names_it(machines: Machines) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('the loss is nan')\ntime.sleep(600)\n"
    machines.write("entry.py", text)
    both = [machines.worker(node) for node in ("node1", "node2")]
    ended = [result(process) for process in both]
    assert [code for code, _ in ended] == [5, 5]
    assert all("the loss is nan" in said for _, said in ended)
    assert all("once fixed clusterddp worker SPEC, on each machine" in said for _, said in ended)


def test_ctrl_c_on_any_machine_cancels_the_run_on_all(machines: Machines) -> None:
    machines.write("entry.py", SLEEP)
    both = [machines.worker(node) for node in ("node1", "node2")]
    machines.await_ranks("node2")
    interrupt(both[1])
    assert [result(process)[0] for process in both] == [6, 130]
    wait_until(lambda: machines.processes() == [], 20)


def test_a_worker_that_is_killed_ends_the_run_on_all_machines(machines: Machines) -> None:
    machines.write("entry.py", SLEEP)
    both = [machines.worker(node) for node in ("node1", "node2")]
    machines.await_ranks("node2")
    interrupt(both[1], signal.SIGKILL)
    assert result(both[0])[0] == 5
    end = read_end(machines.run("node1").attempt(0))
    assert end is not None
    assert end.reason == "10.77.0.12 lost the command that carries the run; ranks 0-1 ended with it"
    wait_until(lambda: machines.processes() == [], 20)


def test_a_missing_machine_is_named_on_those_that_came(machines: Machines) -> None:
    machines.write("job.yaml", SPEC.replace("10.77.0.12", "node2, node3") + "entry: {script: entry.py}\n")
    both = [machines.worker(node, "network.start_timeout=0:08") for node in ("node1", "node2")]
    ended = [result(process, 20) for process in both]
    assert [code for code, _ in ended] == [3, 3]
    absent = "node 2 (node3) of 3 did not connect to node1, port "
    here = "within 8 s (here: node 0 on node1; node 1 on node2)"
    assert all(absent in said and here in said for _, said in ended)


def test_without_the_first_machine_the_others_say_where_they_looked(machines: Machines) -> None:
    timeout = "network: {start_timeout: '0:04'}\n"
    machines.write("job.yaml", f"{SPEC}entry: {{script: entry.py}}\n{timeout}")
    code, said = result(machines.worker("node2"), 20)
    assert code == 3
    assert "node 1 on node2 did not reach node 0 at node1 (from ssh.hosts), port " in said
    assert "within 4 s; 10.77.0.11:" in said
    assert "Connection refused" in said


def test_a_machine_that_is_none_of_the_hosts_says_what_it_is(machines: Machines) -> None:
    code, said = result(machines.worker("node3"), 20)
    assert code == 3
    assert "this machine, node3 (" in said
    assert "10.77.0.13 on eth0" in said
    assert "is none of the hosts of the spec: node1 (10.77.0.11), 10.77.0.12" in said


def test_a_spec_with_another_value_is_refused_on_all_machines_by_its_key(machines: Machines) -> None:
    machines.write("job.yaml", SPEC + "entry: {script: entry.py}\nrestarts: 2\n", "node2")
    both = [machines.worker(node) for node in ("node1", "node2")]
    for code, said in [result(process, 20) for process in both]:
        assert code == 3
        assert "node 1 on node2 reads another spec than node 0 on node1: other values of restarts" in said


def test_a_machine_that_takes_part_twice_is_named_on_all(machines: Machines) -> None:
    machines.write("job.yaml", SPEC.replace("10.77.0.12", "node2, node3") + "entry: {script: entry.py}\n")
    all_three = [machines.worker("node1"), machines.worker("node2"), machines.worker("node2")]
    for code, said in [result(process, 30) for process in all_three]:
        assert (code, "node 1 was started twice: on node2 (process " in said) == (3, True), said


def test_the_first_machine_that_takes_part_twice_is_named(machines: Machines) -> None:
    first = machines.worker("node1")
    assert first.stdout is not None
    assert "waits at port" in first.stdout.readline()
    for code, said in [result(machines.worker("node1")), result(first)]:
        assert (code, "node 0 was started twice: on node1 (process " in said) == (3, True), said


def test_ctrl_c_before_all_have_come_ends_the_others_by_name(machines: Machines) -> None:
    machines.write("job.yaml", SPEC.replace("10.77.0.12", "node2, node3") + "entry: {script: entry.py}\n")
    first, other = (machines.worker(node, "network.start_timeout=0:20") for node in ("node1", "node2"))
    assert first.stdout is not None
    while "node 1 on node2 has connected" not in first.stdout.readline():
        pass
    interrupt(first)
    assert result(first)[0] == 130
    code, said = result(other, 40)
    assert (code, "did not reach node 0 at node1" in said) == (3, True)


def test_a_closed_port_ends_within_the_time_out_and_is_named(machines: Machines) -> None:
    text = SPEC + "entry: {script: entry.py}\nnetwork: {master_port: 23456}\n"
    machines.write("job.yaml", text)
    block_ports(machines.rack, "node1", "23456")
    try:
        first, other = (
            machines.worker("node1", "network.start_timeout=0:08"),
            machines.worker("node2", "network.start_timeout=0:08"),
        )
        code, said = result(other, 30)
        assert (
            code,
            "did not reach node 0 at node1 (from ssh.hosts), port 23456 (from network.master_port)" in said,
        ) == (3, True)
        assert "node 1 (10.77.0.12) of 2 did not connect to node1, port 23456, within 8 s" in result(first, 30)[1]
    finally:
        open_ports(machines.rack, "node1")


def test_without_the_key_no_machine_takes_part(machines: Machines) -> None:
    first = machines.worker("node1", "network.start_timeout=0:05", environ={"CLUSTERDDP_JOIN_KEY": "mum"})
    code, said = result(machines.worker("node2", "network.start_timeout=0:05"), 20)
    assert (code, "does not know the same CLUSTERDDP_JOIN_KEY" in said) == (3, True)
    assert result(first, 20)[0] == 3


def test_with_the_same_key_and_a_port_of_the_spec_all_take_part(machines: Machines) -> None:
    machines.write("job.yaml", SPEC + "entry: {script: entry.py}\nnetwork: {master_port: 23456}\n")
    key = {"CLUSTERDDP_JOIN_KEY": "mum"}
    both = [machines.worker(node, environ=key) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [0, 0]


def test_an_unknown_client_at_the_port_disturbs_no_machine(machines: Machines) -> None:
    machines.write("job.yaml", SPEC + "entry: {script: entry.py}\nnetwork: {master_port: 23456}\n")
    first = machines.worker("node1")
    assert first.stdout is not None
    assert "waits at port 23456" in first.stdout.readline()
    words = "import socket\ns = socket.create_connection(('node1', 23456))\ns.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')\n"
    machines.rack.run("node3", ["python3", "-c", words + "s.sendall(b'[]\\n{}\\n')\n"], check=False)
    assert result(machines.worker("node2"))[0] == 0
    assert result(first)[0] == 0


def test_a_run_goes_on_with_its_next_attempt_on_all_machines_and_not_from_one(machines: Machines) -> None:
    machines.write("entry.py", FALLS_ONCE)
    both = [machines.worker(node) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [5, 5]
    run = machines.run("node1")
    _refuse_one(machines, run)
    both = [machines.worker("node2", "--resume", run.name), machines.worker("node1", "--resume", "@last")]
    assert [result(process)[0] for process in both] == [0, 0]
    runs = [machines.run(node) for node in ("node1", "node2")]
    assert [len(list_runs(each.path.parent)) for each in runs] == [1, 1]
    assert [each.attempt(1).stdout(rank).read_text() for rank, each in enumerate(runs)] == [f"{run.name} 1\n"] * 2
    assert [(read_state(each).state.value, read_state(each).attempt) for each in runs] == [("COMPLETED", 1)] * 2
    code, said = result(machines.worker("node1", "--resume", run.name))
    assert (code, "already completed" in said) == (2, True)


def test_machines_that_resume_different_runs_are_refused_by_name(machines: Machines) -> None:
    machines.write("entry.py", "raise SystemExit(3)\n")
    both = [machines.worker(node) for node in ("node1", "node2")]
    assert [result(process)[0] for process in both] == [5, 5]
    name = machines.run("node1").name
    both = [machines.worker("node1"), machines.worker("node2", "--resume", name)]
    ended = [result(each, 20) for each in both]
    assert [code for code, _ in ended] == [3, 3]
    assert f"node 1 on node2 has --resume {name}, node 0 on node1 has --resume (none)" in ended[1][1]


def _refuse_one(machines: Machines, run: RunDir) -> None:
    command = [sys.executable, "-m", "clusterddp", "resume", run.name]
    place, variables = machines.place("node1"), {"PYTHONPATH": str(ROOT)}
    done = machines.rack.run("node1", command, cwd=place, env=variables, check=False)
    assert (done.returncode, f"clusterddp worker SPEC --resume {run.name}, on each machine" in done.stderr) == (2, True)

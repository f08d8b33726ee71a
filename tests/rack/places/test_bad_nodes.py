"""Sick nodes of a real cluster and of hosts over SSH: found before the ranks start, left out, let in again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_events
from clusterddp.system.files import read_json
from tests.support.slurm_person import SlurmPerson
from tests.support.slurm_runs import await_final_end
from tests.support.ssh_place import ssh_place_on
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
CPU = Path("/sys/fs/cgroup/cpu")
SPEC = """
name: job
launcher: {launcher}
device: cpu
resources: {{nodes: {nodes}, time: 120}}
entry: {{script: entry.py}}
{more}
"""
HOSTS = "ssh: {hosts: [node1, node2, node3]}\n"
WAITS = "import os, time\nwhile os.environ['CLUSTERDDP_ATTEMPT'] == '0':\n    time.sleep(0.1)\n"


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2", "node3"], slurmd_timeout_s=5)) as rack:
        yield rack


@contextlib.contextmanager
def limited(rack: Rack, node: str, *, cores: float) -> Iterator[None]:
    """Give the processes of a node, and all that they start, so many cores' worth of time."""
    if not (CPU / "cpu.cfs_quota_us").parent.joinpath("cgroup.procs").exists():
        pytest.skip("a limit of CPU time needs the controller cpu of cgroup v1")
    group = CPU / f"{rack.dir.name}-{node}"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    move(rack.pids(node), group)
    try:
        yield
    finally:
        move(map(int, (group / "cgroup.procs").read_text().split()), CPU)
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), 10)
        group.rmdir()


def move(pids: Any, group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def submit(
    person: Any, *, launcher: str = "slurm", nodes: int = 2, more: str = "", code: str = "print('hello')\n"
) -> RunDir:
    (person.path / "entry.py").write_text(code)
    return person.submit(SPEC.format(launcher=launcher, nodes=nodes, more=more))


def hosts_of(run: RunDir, attempt: int = 0) -> list[str]:
    start = read_json(run.attempt(attempt).start)
    assert start is not None
    return sorted(node["host"] for node in start["nodes"])


def marks(person: Any) -> dict[str, str]:
    """Ask which nodes are left out: name -> why."""
    shown = json.loads(person.clusterddp("nodes", "-o", "json").stdout)
    return {each["node"]: each["why"] for each in shown["nodes"]}


def test_a_node_with_too_little_of_its_cores_is_named_left_out_and_let_in_again(cluster: Rack) -> None:
    person = SlurmPerson.at(cluster, "slow")
    with limited(cluster, "node1", cores=0.04):  # so little that it shows beside other tests
        first = submit(person)
        assert await_final_end(first, 120).outcome == "COMPLETED"
        assert hosts_of(first) == ["node1", "node2"]
        warning = person.status(first)["warning"]
        measured = [row["nodes"] for row in read_events(first) if row["event"] == "preflight"]
        assert "node1: core " in warning, measured
        assert "another process or a limit the rest" in warning
        assert list(marks(person)) == ["node1"]
        second = submit(person)
        assert await_final_end(second, 120).outcome == "COMPLETED"
        assert hosts_of(second) == ["node2", "node3"]
        (event,) = [row for row in read_events(second) if row["event"] == "left_out"]
        assert event["text"] in person.status(second)["warning"]
        assert event["text"].startswith("node1 left out until ")
    assert person.clusterddp("nodes", "--clear", "node1").stdout == "node1 is let in again\n"
    third = submit(person)
    assert await_final_end(third, 120).outcome == "COMPLETED"
    assert hosts_of(third) == ["node1", "node2"]
    assert marks(person) == {}


def test_a_node_whose_supervisor_was_killed_is_left_out_of_the_next_attempt(cluster: Rack) -> None:
    person = SlurmPerson.at(cluster, "killed")
    run = submit(person, more="restarts: 1\n", code=WAITS)
    wait_until(run.attempt(0).start.exists, 60)
    cluster.run("node2", ["pkill", "-KILL", "-f", "clusterddp.places.slurm.supervisor"])
    assert await_final_end(run, 120).outcome == "COMPLETED"
    assert (hosts_of(run), hosts_of(run, 1)) == (["node1", "node2"], ["node1", "node3"])
    assert "supervisor of node 1 on node2" in marks(person)["node2"]
    assert [row["attempt"] for row in read_events(run) if row["event"] == "left_out"] == [1]
    assert person.job(str(person.record(run).job_id))["ExcNodeList"] == "node2"
    person.clusterddp("nodes", "--clear")


def test_a_node_that_lost_power_is_marked_and_a_run_that_completes_there_clears_it(cluster: Rack) -> None:
    person = SlurmPerson.at(cluster, "power")
    run = submit(person, more="restarts: 1\n", code=WAITS)
    wait_until(run.attempt(0).start.exists, 60)
    cluster.power_off("node2")
    try:
        assert await_final_end(run, 150).outcome == "COMPLETED"
        assert "node2" in marks(person)["node2"]
        assert hosts_of(run, 1) == ["node1", "node3"]
    finally:
        cluster.power_on("node2")
        cluster.run(HEAD, ["scontrol", "update", "NodeName=node2", "State=RESUME"], check=False)
        cluster.await_idle()
    again = submit(person, more="slurm: {nodelist: 'node[1-2]'}\n")
    assert await_final_end(again, 120).outcome == "COMPLETED"
    assert marks(person) == {}


def test_nodes_that_are_drained_and_a_maintenance_are_said_at_the_submit(cluster: Rack) -> None:
    person = SlurmPerson.at(cluster, "notes")
    cluster.run(HEAD, ["scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=bad fan"])
    name = "ReservationName=upgrade"
    reservation = [name, "StartTime=now+1hour", "Duration=60", "Flags=MAINT,IGNORE_JOBS", "Nodes=ALL", "Users=root"]
    try:
        cluster.run(HEAD, ["scontrol", "create", "reservation", *reservation])
        more = "slurm: {nodelist: 'node[2-3]'}\n"
        (person.path / "entry.py").write_text("")
        (person.path / "job.yaml").write_text(SPEC.format(launcher="slurm", nodes=2, more=more))
        shown = person.clusterddp("submit", "job.yaml", "-n", "-v", check=False).stdout
        assert "slurm.nodelist: node3 is drain (bad fan): the job waits for it" in " ".join(shown.split())
        assert "maintenance of node[1-3] begins 2" in shown
    finally:
        cluster.run(HEAD, ["scontrol", "delete", name], check=False)
        cluster.run(HEAD, ["scontrol", "update", "NodeName=node3", "State=RESUME"])


@pytest.fixture(scope="module")
def lan3(needs_rack: None) -> Iterator[Rack]:
    plan = RackPlan(nodes=["node1", "node2", "node3"], private_hosts=True, slurm=False)
    with running_rack(plan) as rack:
        yield rack


def test_over_ssh_a_host_with_a_slow_link_is_named_and_taken_last(lan3: Rack) -> None:
    with ssh_place_on(lan3) as place:
        lan3.set_link_rate("node2", 20)
        try:
            run = submit(place, launcher="ssh", nodes=3, more=HOSTS, code="import time; time.sleep(6)")
            status = place.await_state("COMPLETED", "FAILED", run=run)
        finally:
            lan3.set_link_rate("node2", None)
        assert status["state"] == "COMPLETED"
        assert "node2: its link to node 0 carries " in status["warning"]
        assert list(marks(place)) == ["node2"]
        place.clusterddp("nodes", "--clear")


def test_over_ssh_a_host_whose_tmp_is_read_only_ends_the_start(lan3: Rack) -> None:
    with ssh_place_on(lan3) as place:
        lan3.run("node2", ["mount", "-t", "tmpfs", "-o", "ro", "none", "/tmp"])
        try:
            run = submit(place, launcher="ssh", more=HOSTS)
            status = place.await_state("FAILED", "COMPLETED", run=run)
        finally:
            lan3.run("node2", ["umount", "/tmp"])
        failed = "the preflight of node 1 on node2 failed: TMPDIR /tmp cannot be written: Read-only file system"
        assert (status["state"], status["root_cause"]["error"]) == ("FAILED", failed)
        assert status["root_cause"]["host"] == "node2"
        assert list(marks(place)) == ["node2"]
        again = submit(place, launcher="ssh", more=HOSTS)
        assert place.await_state("COMPLETED", "FAILED", run=again)["state"] == "COMPLETED"
        assert [rank["host"] for rank in place.status(again)["ranks"]] == ["node1", "node3"]
        place.clusterddp("nodes", "--clear")

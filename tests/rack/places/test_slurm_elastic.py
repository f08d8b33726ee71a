"""Nodes of a Slurm job are lost: the run goes on in the same job, on a spare or on fewer nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json
from tests.support.gang_runs import processes_with
from tests.support.slurm_person import SlurmPerson
from tests.support.slurm_runs import await_final_end, await_job_state, claims, job_fields
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

# Slurm finds a lost node down after 20 s (by default 300 s), so the supervisors are faster.
THREE = RackPlan(nodes=["node1", "node2", "node3"], slurmd_timeout_s=20)
SPEC = """
name: elastic
launcher: slurm
device: cpu
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:20:00"}
restarts: 4
elastic: ELASTIC
network: {host_silence: "0:03", heartbeat_timeout: "0:06"}
train:
  {dataset: shapes, samples: 512, model: fastnet, epochs: EPOCHS, width: 0.125, batch_size: 16, kernels: native}
"""
WITH_SPARE, TWO_OR_ONE = "{spares: 1}", "{min_nodes: 1}"


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(THREE) as rack:
        yield rack


@pytest.fixture
def rack(cluster: Rack) -> Iterator[Rack]:
    """A cluster whose nodes are all up and idle."""
    yield cluster
    cluster.run(HEAD, ["sh", "-c", "squeue -h -o %A | xargs -r scancel"])
    for node in THREE.nodes:
        power_on(cluster, node)
    cluster.await_idle(within_s=90)


def power_on(rack: Rack, node: str) -> None:
    if node not in rack.powered:
        rack.power_on(node)
        rack.run(HEAD, ["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)


def submit(person: SlurmPerson, *, elastic: str, epochs: int) -> RunDir:
    """Submit a run and wait for its first checkpoint."""
    run = person.submit(SPEC.replace("ELASTIC", elastic).replace("EPOCHS", str(epochs)))
    wait_until(lambda: list(run.checkpoints.glob("step-*.json")), 90, what=lambda: said_of(run))
    return run


def said_of(run: RunDir) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in run.launcher_dir.glob("*.log"))


def await_attempt(run: RunDir, number: int) -> list[str]:
    """Wait until the ranks of an attempt run; return its hosts."""
    wait_until(run.attempt(number).start.exists, 60, what=lambda: said_of(run))
    start = read_json(run.attempt(number).start)
    assert start is not None
    return [node["host"] for node in start["nodes"]]


def summary(run: RunDir) -> dict[str, Any]:
    assert await_final_end(run, 120, what=lambda: said_of(run)).outcome == "COMPLETED"
    found = read_json(run.summary)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def undisturbed(cluster: Rack) -> str:
    """The parameters that a run of this size and length ends with."""
    return str(summary(submit(SlurmPerson.at(cluster, "undisturbed"), elastic="null", epochs=60))["params_sha256"])


@pytest.mark.parametrize("what", ["power", "supervisor"])
def test_a_spare_of_the_job_takes_the_place_of_a_lost_node(rack: Rack, undisturbed: str, what: str) -> None:
    person = SlurmPerson.at(rack, what)
    run = submit(person, elastic=WITH_SPARE, epochs=60)
    job = str(person.record(run).job_id)
    assert (await_attempt(run, 0), job_fields(rack, job)["NumNodes"]) == (["node1", "node2"], "3")
    if what == "power":
        rack.power_off("node2")
    else:
        rack.run("node2", ["pkill", "-KILL", "-f", "clusterddp.places.slurm.supervisor"])
    assert await_attempt(run, 1) == ["node1", "node3"]
    said = person.status(run)["nodes_changed"]
    assert said.startswith("attempt 1: node 1 on node2 was lost (")
    assert said.endswith("); node3, a spare, took its place")
    assert said in " ".join(person.clusterddp("status", run.name).stdout.split())
    found = summary(run)
    assert (found["params_sha256"], found["world_size"]) == (undisturbed, 4)
    assert claims(run) == [(job, 0), (job, 0)]
    assert list(run.launcher_dir.glob("slurm_job_*")) == []


def test_a_step_whose_processes_were_all_killed_is_followed_by_another_one(rack: Rack, undisturbed: str) -> None:
    """As Slurm does that ends an earlier start of the job on a node that answers again."""
    person = SlurmPerson.at(rack, "killed")
    run = submit(person, elastic=WITH_SPARE, epochs=60)
    found = processes_with(person.record(run).token)
    pids = [pid for pid, command in found if "places.slurm.batch" not in command and "srun" not in command]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none of them records the end of another
        for pid in pids:
            os.kill(pid, number)
    await_attempt(run, 1)
    end = read_end(run.attempt(0))
    assert end is not None
    assert "were killed, and no process recorded how the ranks ended" in end.reason
    assert summary(run)["params_sha256"] == undisturbed


def test_without_a_spare_the_run_goes_on_with_one_node_in_the_same_job_and_a_cancel_leaves_nothing(rack: Rack) -> None:
    person = SlurmPerson.at(rack, "one")
    run = submit(person, elastic=TWO_OR_ONE, epochs=4000)
    job = str(person.record(run).job_id)
    rack.power_off("node2")
    assert await_attempt(run, 1) == ["node1"]
    assert person.status(run)["nodes_changed"].endswith("); the run goes on with 1 of 2 nodes")
    assert [each["host"] for each in person.status(run)["ranks"]] == ["node1", "node1"]
    assert claims(run) == [(job, 0), (job, 0)]
    person.clusterddp("cancel", run.name)
    assert await_final_end(run, 60).outcome == "CANCELLED"
    wait_until(lambda: not person.processes(run), 20, what=lambda: person.processes(run))
    wait_until(lambda: not rack.run(HEAD, ["squeue", "-h"]).stdout, 30)


def test_the_batch_host_s_loss_queues_the_job_again_after_it_has_lost_another_node(rack: Rack) -> None:
    person = SlurmPerson.at(rack, "batch-host")
    run = submit(person, elastic=WITH_SPARE, epochs=4000)
    job = str(person.record(run).job_id)
    rack.power_off("node2")
    assert await_attempt(run, 1) == ["node1", "node3"]
    rack.power_off("node1")
    await_job_state(rack, job, "PENDING", 90)
    power_on(rack, "node1")
    power_on(rack, "node2")
    assert await_attempt(run, 2) == ["node1", "node2"]
    second = read_end(run.attempt(1))
    assert second is not None
    assert second.root_cause is not None
    assert (second.root_cause.host, claims(run)) == ("node1", [(job, 0), (job, 0), (job, 1)])
    person.clusterddp("cancel", run.name)

"""Hosts of a run are lost and come back: the run goes on with a spare, or with fewer nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root]

LAN = RackPlan(nodes=("node1", "node2", "node3"), private_hosts=True, slurm=False)
SPEC = """
name: elastic
launcher: ssh
device: cpu
resources: {nodes: NODES, procs_per_node: 2}
ssh: {hosts: [HOSTS], fetch: none}
python: /opt/bare/bin/python
restarts: 4
elastic: ELASTIC
network: {host_silence: "0:05", heartbeat_timeout: "0:10"}
train:
  {dataset: shapes, samples: 512, model: fastnet, epochs: EPOCHS, width: 0.125, batch_size: 16, kernels: native}
"""
WITH_SPARE = {"NODES": "2", "HOSTS": "node1, node2, node3", "ELASTIC": "{spares: 1}"}
TWO_OR_ONE = {"NODES": "2", "HOSTS": "node1, node2", "ELASTIC": "{min_nodes: 1}"}


@pytest.fixture(scope="module")
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(LAN) as rack:
        yield rack


@pytest.fixture
def place(rack: Rack) -> Iterator[SshPlace]:
    with ssh_place_on(rack) as place:
        yield place
    for node in LAN.nodes:
        if node not in rack.powered:
            rack.power_on(node)
        rack.plug_cable(node)


def submit(place: SshPlace, *, epochs: int, **values: str) -> RunDir:
    text = SPEC.replace("EPOCHS", str(epochs))
    for name, value in values.items():
        text = text.replace(name, value)
    run = place.submit(text)
    wait_until(lambda: newest(place, run, "node1") > 0, 90, what=lambda: place.status(run))
    return run


def newest(place: SshPlace, run: RunDir, node: str) -> int:
    """Return the step of the newest checkpoint on a host."""
    names = [path.stem for path in place.host_run_dir(node, run).checkpoints.glob("step-*.json")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def summary(place: SshPlace, run: RunDir, node: str = "node1") -> dict[str, Any]:
    there = place.host_run_dir(node, run)
    wait_until(there.summary.exists, 120, what=lambda: place.status(run))
    found = read_json(there.summary)
    assert found is not None
    return found


def await_attempt(place: SshPlace, run: RunDir, number: int, head: str = "node1") -> None:
    start = place.host_run_dir(head, run).attempt(number).start
    wait_until(start.exists, 60, what=lambda: place.status(run))


def nodes_of(place: SshPlace, run: RunDir, number: int, head: str = "node1") -> list[str]:
    start = read_json(place.host_run_dir(head, run).attempt(number).start) or {}
    return [node["host"] for node in start["nodes"]]


@pytest.fixture(scope="module")
def undisturbed(rack: Rack) -> str:
    """The parameters that a run of this size and length ends with."""
    with ssh_place_on(rack) as place:
        run = submit(place, epochs=60, NODES="2", HOSTS="node1, node2", ELASTIC="null")
        return str(summary(place, run)["params_sha256"])


@pytest.mark.parametrize("what", ["rank", "supervisor", "power", "cable"])
def test_a_spare_takes_the_place_of_a_lost_host_and_the_parameters_are_those_of_an_undisturbed_run(
    place: SshPlace, undisturbed: str, what: str
) -> None:
    run = submit(place, epochs=60, **WITH_SPARE)
    if what == "rank":
        place.kill("node2", "n1")
    elif what == "supervisor":
        place.kill("node2", "s1")
    elif what == "power":
        place.rack.power_off("node2")
    else:
        place.rack.pull_cable("node2")
    await_attempt(place, run, 1)
    nodes = nodes_of(place, run, 1)
    has_come_back = what == "supervisor" and "node2" in nodes  # its guard has started another one in time
    assert nodes == ["node1", "node2" if what == "rank" or has_come_back else "node3"]
    status = place.status(run)
    if what == "rank":
        assert status["nodes_changed"] == ""
    elif has_come_back:
        said = "attempt 1: node 1 on node2 was lost (its process has ended) and has come back"
        assert status["nodes_changed"] == said
    else:
        why = "its process has ended" if what == "supervisor" else "its host does not answer"
        said = f"attempt 1: node 1 on node2 was lost ({why}); node 2 on node3, a spare, took its place"
        assert status["nodes_changed"] == said
        assert said in " ".join(place.clusterddp("status", run.name).stdout.split())
        assert {each["host"] for each in status["ranks"] if each["rank"] in (2, 3)} == {"node3"}
    found = summary(place, run)
    assert (found["params_sha256"], found["world_size"]) == (undisturbed, 4)
    place.await_state("COMPLETED", run=run)


def test_a_host_whose_cable_was_pulled_is_left_out_and_taken_in_again(place: SshPlace) -> None:
    run = submit(place, epochs=400, **TWO_OR_ONE)
    place.rack.pull_cable("node2")
    await_attempt(place, run, 1)
    assert nodes_of(place, run, 1) == ["node1"]
    assert place.status(run)["nodes_changed"].endswith("; the run goes on with 1 of 2 nodes")
    place.rack.plug_cable("node2")
    await_attempt(place, run, 2)
    assert nodes_of(place, run, 2) == ["node1", "node2"]
    first = read_end(place.host_run_dir("node1", run).attempt(1))
    assert first is not None
    assert first.outcome == "STOPPED"
    assert place.status(run)["nodes_changed"] == (
        "attempt 2: node 1 on node2 can take part again; the run goes on with 2 of 2 nodes"
    )
    place.clusterddp("cancel", run.name)
    place.await_gone(place.record(run).token)


def test_a_host_that_was_switched_off_and_on_is_taken_in_when_somebody_asks_for_the_run(place: SshPlace) -> None:
    run = submit(place, epochs=400, **TWO_OR_ONE)
    place.rack.power_off("node2")
    await_attempt(place, run, 1)
    place.rack.power_on("node2")
    wait_until(lambda: place.status(run)["attempt"] == 2, 60, what=lambda: place.status(run))
    assert nodes_of(place, run, 2) == ["node1", "node2"]
    place.clusterddp("cancel", run.name)
    place.await_gone(place.record(run).token)
    assert [*place.host_run_dir("node2", run).launcher_dir.glob("*guard-*")] == []


@pytest.mark.parametrize("what", ["power", "cable", "supervisor"])
def test_without_the_first_host_the_others_go_on_and_the_parameters_are_those_of_an_undisturbed_run(
    place: SshPlace, undisturbed: str, what: str
) -> None:
    run = submit(place, epochs=60, **WITH_SPARE)
    wait_until(lambda: newest(place, run, "node2") > 0, 30)
    if what == "power":
        place.rack.power_off("node1")
    elif what == "cable":
        place.rack.pull_cable("node1")
    else:
        place.kill("node1", "s0")
    await_attempt(place, run, 1, "node2")
    assert nodes_of(place, run, 1, "node2") == ["node2", "node3"]
    status = place.await_state("RUNNING", "COMPLETED", run=run)
    why = "its process has ended" if what == "supervisor" else "its host does not answer"
    assert status["nodes_changed"] == (
        f"attempt 1: node 0 on node1 was lost ({why}); node 2 on node3, a spare, took its place"
    )
    assert {each["rank"]: each["host"] for each in status["ranks"]} == {0: "node2", 1: "node2", 2: "node3", 3: "node3"}
    if what == "cable":
        place.rack.plug_cable("node1")
    found = summary(place, run, "node2")
    assert (found["params_sha256"], found["world_size"]) == (undisturbed, 4)
    assert min(steps_of(place.host_run_dir("node2", run))) > 1
    place.await_state("COMPLETED", run=run)
    place.await_gone(place.record(run).token)


def test_a_first_host_that_was_cut_off_follows_the_new_head_and_no_attempt_begins_twice(place: SshPlace) -> None:
    run = submit(place, epochs=400, **WITH_SPARE)
    wait_until(lambda: newest(place, run, "node2") > 0, 30)
    place.rack.pull_cable("node1")
    await_attempt(place, run, 1, "node2")
    place.rack.plug_cable("node1")
    log = place.host_run_dir("node1", run).launcher_dir / "supervisor-0.log"
    wait_until(lambda: "node 1's supervisor is at" in log.read_text(), 30, what=log.read_text)
    place.rack.power_off("node3")
    await_attempt(place, run, 2, "node2")
    assert nodes_of(place, run, 2, "node2") == ["node2", "node1"]
    begun = {host: [each.number for each in started(place, run, host)] for host in ("node1", "node2")}
    assert begun == {"node1": [0], "node2": [1, 2]}
    assert place.await_state("RUNNING", run=run)["attempt"] == 2
    place.clusterddp("cancel", run.name)
    assert place.await_state("CANCELLED", run=run)["attempt"] == 2
    place.await_gone(place.record(run).token)


def started(place: SshPlace, run: RunDir, host: str) -> list[AttemptDir]:
    return [each for each in place.host_run_dir(host, run).attempts() if each.start.exists()]


def test_one_host_of_three_does_not_go_on_alone(place: SshPlace) -> None:
    soon = {'"0:05"': '"0:05", start_timeout: "0:30"'}
    run = submit(place, epochs=400, **WITH_SPARE, **soon)
    place.rack.power_off("node1")
    place.rack.power_off("node2")
    status = place.await_state("FAILED", run=run)
    assert status["root_cause"]["error"] == (
        "node 0 on node1 and node 1 on node2 did not come back within 30 s; 1 node is there, and min_nodes is 2; "
        "of 3 nodes only more than half go on without the others"
    )


def test_with_too_few_hosts_the_run_ends_and_goes_on_elsewhere_from_the_copy_of_its_checkpoint(place: SshPlace) -> None:
    soon = {'"0:05"': '"0:05", start_timeout: "0:30"'}
    run = submit(place, epochs=400, **TWO_OR_ONE, **soon)
    wait_until(lambda: newest(place, run, "node2") > 0, 30)
    place.rack.power_off("node1")
    status = place.await_state("FAILED", run=run, within_s=90)
    assert status["root_cause"]["host"] == "node1"
    copied = newest(place, run, "node2")
    assert status["checkpoint"]["host"] in {"node1", "node2"}
    place.clusterddp("resume", run.name, "ssh.hosts=[node3,node2]", "elastic=null", "train.epochs=400")
    there = place.host_run_dir("node3", run)
    wait_until(lambda: there.metrics.exists() and newest(place, run, "node3") > copied, 90)
    events = there.events.read_text()
    assert f'"text": "step-{copied:08d}-a0' in events
    assert "from node2 to node3" in events
    assert min(steps_of(there)) > copied
    place.clusterddp("cancel", run.name, check=False)


def steps_of(there: RunDir) -> list[int]:
    return [row["step"] for row in read_jsonl(there.metrics) if isinstance(row.get("step"), int)]

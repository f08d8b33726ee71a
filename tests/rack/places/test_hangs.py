"""A rank that hangs is named on hosts that share nothing, over SSH, and on Slurm; by a command and by the watch."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from clusterddp.run.stacks import read_report
from tests.support.hang_kinds import hang_events, submit_hang
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

OVER_SSH = """launcher: ssh
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python"""
ON_SLURM = """launcher: slurm
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}
snapshot: false
hang: fail"""


@pytest.fixture
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"], gpus_per_host=0)) as rack:
        yield rack


def test_over_ssh_a_rank_that_sleeps_on_the_second_host_is_named_by_the_command_and_by_status(
    ssh_place: SshPlace,
) -> None:
    run = submit_hang(ssh_place, "sleeps", 3, head=OVER_SSH, hang_after="0:20")

    ssh_place.await_state("RUNNING", run=run)

    def asked() -> dict[str, object]:
        return dict(json.loads(ssh_place.clusterddp("stacks", run.name, "-o", "json").stdout))

    found = wait_until(lambda: (seen := asked())["suspects"] == [3] and seen, 120)
    first, second = found["groups"]
    assert (first["hosts"], second["ranks"]) == (["node2"], [0, 1, 2])
    assert first["place"].startswith("is in sleeps (hang.py:")
    assert "and has not entered all_reduce #" in first["place"]
    status = wait_until(lambda: (seen := ssh_place.status(run))["hang"] and seen, 60)
    assert (status["state"], status["hang"]["ranks"]) == ("RUNNING", [3])
    assert all(rank["usage"]["memory"] > 64 << 20 for rank in status["ranks"])
    ssh_place.clusterddp("cancel", run.name)
    ssh_place.await_gone(ssh_place.record(run).token)


def test_on_slurm_a_rank_that_is_stopped_ends_the_run_as_its_cause_and_the_stacks_are_kept(rack: Rack) -> None:
    person = SlurmPerson.at(rack, "hangs")
    run = submit_hang(person, "stops", 2, head=ON_SLURM, hang_after="0:20")
    status = person.await_status(run, lambda seen: seen["state"] == "FAILED", 180)
    cause = status["root_cause"]
    assert (cause["rank"], cause["host"]) == (2, "node2")
    assert cause["error"].startswith("hang: no progress for ")
    assert "rank 2 on node2 is stopped by a signal" in cause["error"]
    (event,) = hang_events(run)
    report = read_report(run.attempt(0), str(event["stacks"]))
    assert report is not None
    assert [each.state for each in report.ranks if each.rank == 2] == ["T"]
    assert "rank 2 on node2 is stopped by a signal" in person.clusterddp("stacks", run.name).stdout
    wait_until(lambda: person.processes(run) == [])

"""A training goes on with other numbers of hosts: over SSH while one is off, on Slurm in a job of another size."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

TRAIN = """
train: {dataset: shapes, samples: 256, model: fastnet, width: 0.125, epochs: 20000, batch_size: 4, accumulate: 2,
        precision: fp32, log_every: 1}
"""
OVER_SSH = f"""
name: lan
launcher: ssh
device: cpu
ssh: {{hosts: [node1, node2, node3]}}
python: /opt/bare/bin/python
{TRAIN}
"""
ON_SLURM = f"""
name: job
launcher: slurm
device: cpu
resources: {{nodes: 3}}
{TRAIN}
"""
KEPT = "2 ranks x batch_size 4 x accumulate 3: a step still has 24 images, so steps, learning rate and samples stay"


def await_steps(run: RunDir, attempt: int, steps: int = 3) -> None:
    def taken() -> bool:
        return sum(row["attempt"] == attempt for row in read_jsonl(run.metrics)) > steps

    wait_until(taken, 120)


def epochs_done(run: RunDir) -> int:
    return max(row["epoch"] for row in read_jsonl(run.metrics))


def demand_whole(run: RunDir, epochs: int, *, ranks: int) -> None:
    """Every epoch of 256 images has ten steps of 24, whatever the ranks were."""
    summary = read_json(run.summary)
    assert summary is not None
    counted = (summary["world_size"], summary["epochs"], summary["steps"], summary["samples"])
    assert counted == (ranks, epochs, 10 * epochs, 240 * epochs)
    steps = [row["step"] for row in read_jsonl(run.metrics) if row["kind"] == "train"]
    assert set(steps) == set(range(1, 10 * epochs + 1))


def test_a_run_over_ssh_goes_on_without_a_host_that_is_off_and_with_it_again(ssh_place: SshPlace) -> None:
    place, rack = ssh_place, ssh_place.rack
    run = place.submit(OVER_SSH)
    there = place.host_run_dir("node1", run)
    await_steps(there, 0)
    place.clusterddp("cancel", "--save", run.name)
    place.await_state("CANCELLED", run=run)
    rack.power_off("node3")
    try:
        refused = place.clusterddp("resume", run.name, check=False)
        assert refused.returncode != 0
        assert "node3" in refused.stderr
        resumed = place.clusterddp("resume", run.name, "ssh.hosts=[node1,node2]")
        assert f"note: {KEPT}" in resumed.stderr
        await_steps(there, 1)
        assert KEPT in there.attempt(1).stderr(0).read_text()
        place.clusterddp("cancel", "--save", run.name)
        place.await_state("CANCELLED", run=run)
    finally:
        rack.power_on("node3")
        rack.plug_cable("node3")
    epochs = epochs_done(there) + 2
    again = place.clusterddp("resume", run.name, "ssh.hosts=[node1,node2,node3]", f"train.epochs={epochs}")
    assert "3 ranks x batch_size 4 x accumulate 2: a step still has 24 images" in again.stderr
    place.await_state("COMPLETED", run=run)
    demand_whole(there, epochs, ranks=3)


def test_a_run_on_slurm_goes_on_in_a_job_of_another_size(rack: Rack) -> None:
    person = SlurmPerson(rack=rack, path=Path(tempfile.mkdtemp(dir=rack.dir / "shared")))
    (person.path / "job.yaml").write_text(ON_SLURM)
    try:
        person.clusterddp("submit", "job.yaml")
        run = person.run_dir()
        await_steps(run, 0)
        person.clusterddp("cancel", "--save", run.name)
        person.await_status(run, lambda status: status["state"] == "CANCELLED")
        epochs = epochs_done(run) + 2
        resumed = person.clusterddp("resume", run.name, "resources.nodes=2", f"train.epochs={epochs}")
        assert f"note: {KEPT}" in resumed.stderr
        assert person.job(str(person.record().job_id))["NumNodes"] in {"2", "2-2"}  # the latter while it waits
        person.await_status(run, lambda status: status["state"] == "COMPLETED")
        demand_whole(run, epochs, ranks=2)
    finally:
        rack.run(HEAD, ["scancel", "--user=root"], check=False)

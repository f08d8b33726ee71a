"""A job that its user has renamed is still the run's: it is found, not queued twice, and cancelled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.sweep import read_sweep
from tests.support.rack_slurm import await_state
from tests.support.slurm_person import SlurmPerson
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

CHANGES = (("JobName=other",), ("JobName=other", "Comment=mine"))


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    person = SlurmPerson(rack=rack, checks=False, path=Path(tempfile.mkdtemp(dir=rack.dir / "shared")))
    person.write_spec()
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


def rename(person: SlurmPerson, job_id: str, *changes: str) -> None:
    person.slurm("scontrol", "update", f"JobId={job_id}", *changes)
    assert person.job(job_id)["JobName"] == "other"


@pytest.mark.parametrize("changes", CHANGES, ids=["name", "name and comment"])
def test_a_job_that_waits_under_another_name_is_the_runs(person: SlurmPerson, changes: tuple[str, ...]) -> None:
    person.clusterddp("submit", "job.yaml", "restarts=1")
    job_id = str(person.record().job_id)
    rename(person, job_id, *changes)
    assert person.status()["state"] == "PENDING"
    assert person.clusterddp("resume", "@last").returncode == 2
    assert f"{job_id} PENDING" in person.queue()
    assert str(person.record().job_id) == job_id
    assert person.clusterddp("cancel", "@last").returncode == 0
    assert person.job(job_id)["JobState"] == "CANCELLED"


@pytest.mark.parametrize("changes", CHANGES, ids=["name", "name and comment"])
def test_a_job_that_runs_under_another_name_is_the_runs(person: SlurmPerson, changes: tuple[str, ...]) -> None:
    person.write_spec("", resources="{nodes: 1, procs_per_node: 1}")
    (person.path / "entry.py").write_text("import time\ntime.sleep(300)\n")
    person.clusterddp("submit", "job.yaml")
    job_id = str(person.record().job_id)
    person.await_status(person.run_dir(), lambda status: status["state"] == "RUNNING")
    rename(person, job_id, *changes)
    assert person.status()["state"] == "RUNNING"
    assert person.clusterddp("cancel", "@last").returncode == 0
    await_state(person.rack, job_id, "CANCELLED", "COMPLETED", "FAILED")
    assert person.status()["state"] == "CANCELLED"


def test_the_tasks_of_an_array_under_other_names_are_the_sweeps(person: SlurmPerson) -> None:
    sweep = person.submit_sweep("env.X=1,2,3")
    array = read_sweep(sweep).job_id
    rename(person, f"{array}_1", "JobName=other")
    assert [person.status(run)["state"] for run in sweep.runs()] == ["PENDING"] * 3
    assert person.clusterddp("cancel", sweep.name).returncode == 0
    assert [job for job in person.queue() if job.startswith(f"{array}_")] == []


def test_a_task_that_waits_is_cancelled_alone(person: SlurmPerson) -> None:
    sweep = person.submit_sweep("env.X=1,2,3")
    first, second, third = sweep.runs()
    assert person.clusterddp("cancel", second.name).returncode == 0
    assert [person.status(run)["state"] for run in (first, second, third)] == ["PENDING", "CANCELLED", "PENDING"]

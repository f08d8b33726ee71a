"""How often squeue and sacct are called, and how errors are handled; fakes on PATH count the calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.queue import Slurm, Wanted
from tests.support.fake_slurm import (
    CONTROLLER_DOWN,
    DATABASE_DOWN,
    DISABLED,
    Fakes,
    accounted,
    queued,
    sacct_row,
    squeue_row,
    tag,
)
from tests.support.handmade_slurm_runs import age, begin_attempt, end_attempt, make_slurm_run
from tests.support.paths import ROOT as REPOSITORY


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def ask_again_and_again(slurm: Slurm, unknown: Wanted) -> None:
    while True:
        slurm.find(unknown)


def wanted(number: int) -> Wanted:
    return Wanted(tag=tag(number), job_id=str(100 + number))


def test_all_jobs_cost_one_question(fakes: Fakes) -> None:
    fakes.answer("squeue", "".join(map(queued, range(1000))))
    slurm = fakes.slurm()
    assert {job.state for number in range(1000) if (job := slurm.find(wanted(number)))} == {"RUNNING"}
    assert len(fakes.calls("squeue")) == 1


def test_the_accounting_is_not_asked_for_jobs_in_the_queue(fakes: Fakes) -> None:
    fakes.answer("squeue", queued(1))
    fakes.slurm().find(wanted(1))
    assert fakes.calls("sacct") == []


def test_the_accounting_is_asked_once_for_all_that_were_announced(fakes: Fakes) -> None:
    fakes.answer("sacct", "".join(map(accounted, range(500))))
    slurm = fakes.slurm()
    slurm.expect(map(wanted, range(1000)))
    found = [slurm.find(wanted(number)) for number in range(1000)]
    assert (len(fakes.calls("sacct")), sum(job is not None for job in found)) == (1, 500)


def test_an_answer_is_good_for_a_while_only(fakes: Fakes) -> None:
    slurm = fakes.slurm(max_age_s=0)
    fakes.answer("squeue", queued(1))
    slurm.find(wanted(1))
    fakes.answer("squeue", queued(1, "COMPLETING"))
    while (job := slurm.find(wanted(1))) and job.state == "RUNNING":
        pass
    assert job
    assert job.state == "COMPLETING"


def test_an_error_is_not_asked_for_again_at_once(fakes: Fakes) -> None:
    fakes.do("squeue", CONTROLLER_DOWN)
    slurm = fakes.slurm()
    for number in range(10):
        with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
            slurm.find(wanted(number))
    assert len(fakes.calls("squeue")) == 1


def test_no_accounting_is_found_out_once(fakes: Fakes) -> None:
    fakes.do("sacct", DISABLED)
    slurm = fakes.slurm(max_age_s=0)
    assert [slurm.find(wanted(number)) for number in range(5)] == [None] * 5
    assert (len(fakes.calls("sacct")), slurm.has_accounting) == (1, False)


def test_a_cluster_without_sacct_has_no_accounting(fakes: Fakes) -> None:
    (fakes.directory / "sacct").unlink()
    slurm = Slurm({"PATH": str(fakes.directory)})
    fakes.do("squeue", "")
    assert slurm.find(wanted(1)) is None


def test_a_database_that_does_not_answer_is_an_error_and_no_absence(fakes: Fakes) -> None:
    fakes.do("sacct", DATABASE_DOWN)
    with pytest.raises(SlurmError, match="Connection refused"):
        fakes.slurm().find(wanted(1))


def test_a_job_that_ended_stays_ended_when_the_queue_forgets_it(fakes: Fakes) -> None:
    slurm = fakes.slurm(max_age_s=0)
    fakes.do("sacct", DISABLED)
    fakes.answer("squeue", queued(1, "FAILED"))
    slurm.find(wanted(1))
    fakes.answer("squeue", queued(2))
    while slurm.find(wanted(2)) is None:
        pass
    job = slurm.find(wanted(1))
    assert job
    assert job.state == "FAILED"


def test_a_job_that_ended_stays_ended_when_slurm_cannot_be_asked(fakes: Fakes) -> None:
    slurm = fakes.slurm(max_age_s=0)
    fakes.answer("squeue", queued(1, "FAILED"))
    slurm.find(wanted(1))
    fakes.do("squeue", CONTROLLER_DOWN)
    with pytest.raises(SlurmError):
        ask_again_and_again(slurm, wanted(2))
    job = slurm.find(wanted(1))
    assert job
    assert job.state == "FAILED"


def test_of_two_jobs_with_one_tag_the_newest_is_taken_and_names_the_other(fakes: Fakes) -> None:
    older, newer = queued(1, job_id=9, submitted="12:00:00"), queued(1, job_id=8, submitted="12:00:01")
    fakes.answer("squeue", newer + older)
    job = fakes.slurm().find(wanted(1))
    assert job
    assert (job.job_id, job.twins) == ("8", ("9",))


def test_the_starts_of_a_requeued_job_are_one_job(fakes: Fakes) -> None:
    fakes.answer("sacct", accounted(1, "REQUEUED") + accounted(1, "COMPLETED"))
    job = fakes.slurm().find(wanted(1))
    assert job
    assert (job.state, job.twins) == ("COMPLETED", ())


def test_an_id_that_slurm_gave_to_another_job_is_not_the_runs(fakes: Fakes) -> None:
    fakes.answer("squeue", queued(2, job_id=101))
    fakes.answer("sacct", accounted(2, job_id="101"))
    assert fakes.slurm().find(wanted(1)) is None


RENAMED = Wanted(tag=tag(1), job_id="101", directory="/runs/a/launcher")


def test_a_job_that_was_renamed_is_known_by_its_comment(fakes: Fakes) -> None:
    fakes.answer("squeue", squeue_row(id="8", name="other", comment=f"clusterddp a {tag(1)}"))
    job = fakes.slurm().find(Wanted(tag=tag(1)))
    assert job
    assert (job.job_id, job.name) == ("8", "other")


@pytest.mark.parametrize(("directory", "is_ours"), [("/runs/a/launcher", True), ("/runs/b/launcher", False)])
def test_a_job_without_a_tag_is_known_by_its_id_and_directory(fakes: Fakes, directory: str, is_ours: bool) -> None:
    fakes.answer("squeue", squeue_row(id="101", name="other", directory=directory))
    assert bool(fakes.slurm().find(RENAMED)) is is_ours
    fakes.answer("squeue", "")
    fakes.answer("sacct", sacct_row(job_id="101", name="other", directory=directory))
    assert bool(fakes.slurm().find(RENAMED)) is is_ours


def test_a_job_of_another_run_in_the_same_directory_is_not_this_one(fakes: Fakes) -> None:
    fakes.answer("squeue", squeue_row(id="101", name=f"x.{tag(2)}", directory="/runs/a/launcher"))
    assert fakes.slurm().find(RENAMED) is None


def test_the_last_start_of_a_job_counts_whatever_its_name_was_then(fakes: Fakes) -> None:
    first = sacct_row(job_id="101", state="REQUEUED", name=f"x.{tag(1)}", directory="/runs/a/launcher")
    moment = "2026-01-02T12:00:01"
    last = sacct_row(job_id="101", state="TIMEOUT", name="other", directory="/runs/a/launcher", submitted=moment)
    fakes.answer("sacct", first + last)
    job = fakes.slurm().find(RENAMED)
    assert job
    assert job.state == "TIMEOUT"


def test_a_task_of_an_array_that_was_renamed_is_known_by_its_id_and_directory(fakes: Fakes) -> None:
    rows = (
        squeue_row(id=str(101 + task), array_id="101", task=str(task), name="other", directory="/runs/s", state=state)
        for task, state in enumerate(("RUNNING", "PENDING"))
    )
    fakes.answer("squeue", "".join(rows))
    slurm = fakes.slurm()
    found = [
        slurm.find(Wanted(tag=tag(1), array_index=task, job_id=f"101_{task}", directory="/runs/s")) for task in (0, 1)
    ]
    assert [(job.job_id, job.state) for job in found if job] == [("101_0", "RUNNING"), ("101_1", "PENDING")]


def test_a_task_that_never_started_is_found_in_the_line_of_its_array(fakes: Fakes) -> None:
    fakes.answer("sacct", accounted(1, "CANCELLED by 0", job_id="101_[4-60%1]"))
    job = fakes.slurm().find(Wanted(tag=tag(1), array_index=7, job_id="101_7"))
    assert job
    assert job.state == "CANCELLED"


def test_the_accounting_is_asked_by_array_and_not_by_task(fakes: Fakes) -> None:
    slurm = fakes.slurm()
    slurm.expect(Wanted(tag=tag(1), array_index=index, job_id=f"101_{index}") for index in range(1000))
    slurm.find(Wanted(tag=tag(1), array_index=0, job_id="101_0"))
    assert [call.split()[-1] for call in fakes.calls("sacct")] == ["--jobs=101"]


def test_a_job_whose_id_is_not_known_is_looked_for_by_its_time(fakes: Fakes) -> None:
    fakes.answer("sacct", accounted(1))
    job = fakes.slurm().find(Wanted(tag=tag(1), since=1e9))
    assert job
    assert fakes.calls("sacct")[0].split()[-1].startswith("--starttime=2001-09-0")


def list_runs(fakes: Fakes, runs_dir: Path) -> list[dict[str, str]]:
    """Run `clusterddp list` where the fakes stand on PATH."""
    environment = os.environ | {"PATH": f"{fakes.directory}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "clusterddp", "list", "-o", "json", "--limit", "100", "--runs", str(runs_dir)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    listed: list[dict[str, str]] = json.loads(done.stdout)
    return listed


@pytest.fixture
def fifty_runs(tmp_path: Path) -> Path:
    """Runs on Slurm that were submitted long ago and whose jobs Slurm no longer has."""
    for number in range(50):
        age(make_slurm_run(tmp_path / "runs", f"run-{number}", job_id=str(number), job_tag=tag(number)))
    return tmp_path / "runs"


def test_list_asks_squeue_and_sacct_once_however_many_runs_there_are(fakes: Fakes, fifty_runs: Path) -> None:
    fakes.answer("squeue", queued(1) + queued(2))
    fakes.answer("sacct", accounted(3))
    list_runs(fakes, fifty_runs)
    assert (len(fakes.calls("squeue")), len(fakes.calls("sacct"))) == (1, 1)


def test_list_shows_what_each_command_knew(fakes: Fakes, fifty_runs: Path) -> None:
    fakes.answer("squeue", queued(1, "PENDING") + queued(2, "HIBERNATING"))
    fakes.answer("sacct", accounted(3))
    states = {run["run"]: run["state"] for run in list_runs(fakes, fifty_runs)}
    assert [states[f"run-{number}"] for number in range(5)] == ["LOST", "PENDING", "UNKNOWN", "FAILED", "LOST"]


def test_a_controller_that_does_not_answer_makes_every_run_unknown_with_one_question(
    fakes: Fakes, fifty_runs: Path
) -> None:
    fakes.do("squeue", CONTROLLER_DOWN)
    states = {run["state"] for run in list_runs(fakes, fifty_runs)}
    assert (states, len(fakes.calls("squeue"))) == ({"UNKNOWN"}, 1)


def test_runs_that_have_ended_start_no_command(fakes: Fakes, tmp_path: Path) -> None:
    end_attempt(begin_attempt(make_slurm_run(tmp_path / "runs")))
    list_runs(fakes, tmp_path / "runs")
    assert fakes.calls("squeue") == []


def test_a_job_of_a_named_cluster_is_asked_for_there(fakes: Fakes) -> None:
    fakes.answer("squeue", "CLUSTER: east\n" + queued(1))
    assert fakes.slurm().find(Wanted(tag=tag(1), cluster="east"))
    assert "--clusters=east" in fakes.calls("squeue")[0]

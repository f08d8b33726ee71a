"""A batch script before its start: the job is that of `sbatch`, is found whatever is renamed, and is cancelled."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.sweep import SweepDir
from tests.support.slurm_person import SlurmPerson
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SCRIPT = (
    b'#!/bin/bash -l\n#SBATCH --nodes=2 --ntasks-per-node=1 --hold\n#SBATCH --comment="my own"\n# caf\xe9\n'
    b"#SBATCH --output=out-%j.txt --mail-type=END --mail-user=ana --time=7 --no-requeue --nice=3\nsrun hostname\n"
)
DIFFERENT = {"JobId", "Command", "Comment", "SubmitTime", "EligibleTime", "AccrueTime", "LastSchedEval", "Priority"}
DIFFERENT |= {"AllocNode:Sid", "StdOut", "StdErr", "Scheduler"}


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    person = SlurmPerson(rack=rack, checks=False, path=Path(tempfile.mkdtemp(dir=rack.dir / "shared")))
    (person.path / "my train.slurm").write_bytes(SCRIPT)
    (person.path / "sub").mkdir()
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


def submit(person: SlurmPerson, *words: str) -> tuple[RunDir, str]:
    done = person.clusterddp("submit", "my train.slurm", "-o", "json", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return RunDir(person.runs_dir / str(answer.get("run") or answer["sweep"])), str(answer["job_id"])


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ([], []),
        (["--time=3", "--chdir=sub", "-J", "other"], ["slurm.time=3", "slurm.chdir=sub", "slurm.job_name=other"]),
        (["--dependency=singleton", "--export=NONE"], ["slurm.dependency=singleton", "slurm.export=NONE"]),
    ],
    ids=["script", "overrides", "dependency"],
)
def test_the_job_is_that_of_sbatch(person: SlurmPerson, options: list[str], overrides: list[str]) -> None:
    argv = ["sbatch", "--parsable", *options, "my train.slurm", "a b"]
    plain = person.rack.run(HEAD, argv, cwd=person.path, env=person.variables()).stdout.strip()
    _, ours = submit(person, *overrides, "--", "a b")
    jobs = [person.job(job_id) for job_id in (plain, ours)]
    differing = {name for name in {*jobs[0], *jobs[1]} if jobs[0].get(name) != jobs[1].get(name)}
    assert differing <= DIFFERENT, [(name, jobs[0].get(name), jobs[1].get(name)) for name in differing]
    stems = [job["StdOut"].removesuffix(f"-{job['JobId']}.txt") for job in jobs]
    assert stems[0] == stems[1]


@pytest.mark.parametrize("changes", [["JobName=other"], ["Comment=mine"], ["JobName=other", "Comment=mine"]])
def test_the_job_is_found_under_another_name_or_comment(person: SlurmPerson, changes: list[str]) -> None:
    run, job_id = submit(person, "slurm.chdir=sub")
    person.slurm("scontrol", "update", f"JobId={job_id}", *changes)
    assert person.status(run)["state"] == "PENDING"
    assert person.clusterddp("cancel", run.name).returncode == 0
    assert person.job(job_id)["JobState"] == "CANCELLED"
    assert person.status(run)["state"] == "CANCELLED"


def test_a_cancelled_script_is_submitted_again_as_the_next_attempt(person: SlurmPerson) -> None:
    run, first = submit(person)
    assert person.clusterddp("resume", run.name).returncode == 2
    assert person.clusterddp("cancel", run.name).returncode == 0
    done = person.clusterddp("resume", run.name, "slurm.time=9", "-o", "json")
    assert done.returncode == 0, done.stderr
    job = person.job(str(json.loads(done.stdout)["job_id"]))
    assert (job["JobId"] != first, job["TimeLimit"]) == (True, "00:09:00")
    assert person.status(run)["state"] == "PENDING"


def test_the_tasks_of_an_array_are_runs_that_are_cancelled_and_go_on_alone(person: SlurmPerson) -> None:
    place, array = submit(person, "slurm.array=1,5-9:2%2")
    sweep = SweepDir(place.path)
    runs = sweep.runs()
    assert [run.name.rpartition(".")[2] for run in runs] == ["1", "5", "7", "9"]
    assert [person.status(run)["state"] for run in runs] == ["PENDING"] * 4
    assert person.clusterddp("cancel", runs[1].name).returncode == 0
    states = [run["state"] for run in person.status(sweep)["runs"]]
    assert states == ["PENDING", "CANCELLED", "PENDING", "PENDING"]
    assert person.clusterddp("cancel", sweep.name).returncode == 0
    assert [job for job in person.queue() if job.startswith(array)] == []
    done = person.clusterddp("resume", runs[1].name, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert person.status(runs[1])["state"] == "PENDING"
    number, _, task = str(person.record(runs[1]).job_id).partition("_")
    assert (number != array, task) == (True, "5")
    assert len([job for job in person.queue() if job.startswith(number)]) == 1


def test_the_dry_run_has_slurms_answer(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "my train.slurm", "-n")
    assert "scheduler accepts it" in done.stdout
    done = person.clusterddp("submit", "my train.slurm", "-n", "slurm.partition=nowhere")
    assert "scheduler refuses it" in done.stdout
    assert done.returncode != 0


def test_an_array_runs_and_each_run_has_the_end_of_its_task(person: SlurmPerson) -> None:
    text = '#!/bin/bash\n#SBATCH --array=2-4:2 -o out-%a.txt\necho "$# $1"\nexit $((SLURM_ARRAY_TASK_ID / 4))\n'
    (person.path / "my train.slurm").write_text(text)
    done = person.clusterddp("submit", "my train.slurm", "--wait", "--", "a b")
    assert done.returncode == 5, done.stderr
    sweep = SweepDir(person.runs_dir / done.stdout.strip())
    assert [run["state"] for run in person.status(sweep)["runs"]] == ["COMPLETED", "FAILED"]
    assert [(person.path / f"out-{task}.txt").read_text() for task in (2, 4)] == ["1 a b\n", "1 a b\n"]
    failed = sweep.runs()[1]
    done = person.clusterddp("resume", failed.name, "--wait")
    assert done.returncode == 5, done.stderr
    assert [attempt.number for attempt in failed.attempts()] == [0, 1]

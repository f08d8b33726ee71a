"""Which attempt a start of a Slurm job carries, and how it ends the one before."""

import dataclasses
import json
import os

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.places.slurm.batch import Carried, JobStart, claim_attempt, find_run
from clusterddp.run.attempts import AttemptEnd, later_claimed, make_attempt, read_end, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_name, job_tag
from clusterddp.run.record import RunRecord, write_run

TOKEN = "6d1f" * 8


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "brisk-otter-3")
    run.path.mkdir()
    run.launcher_dir.mkdir()
    write_run(run, record())
    make_attempt(run, 0)
    return run


def record(**changes):
    base = RunRecord(run="brisk-otter-3", token=TOKEN, name="job", launcher="slurm", created_ns=1, job_id="7")
    return dataclasses.replace(base, job_tag=job_tag(TOKEN, 0), **changes)


def start_of(restart_count=0, *, name=None, host="node1"):
    name = job_name("job", job_tag(TOKEN, 0)) if name is None else name
    return JobStart(job_id="7", name=name, restart_count=restart_count, host=host)


def carried(run, *, restarts=1, restart_count=0, **changes):
    return Carried(
        run=run,
        record=record(**changes),
        start=start_of(restart_count, host=f"node{1 + restart_count}"),
        restarts=restarts,
        srun=("srun",),
        environment={"PATH": os.defpath},
    )


def stopped(attempt, **more):
    write_end(attempt, AttemptEnd(outcome="STOPPED", reason="time limit", will_restart=True, needs_job=True, **more))


def test_the_first_start_claims_the_attempt_that_was_submitted(run):
    attempt = claim_attempt(carried(run))
    claim = json.loads(attempt.claim.read_text())
    assert (attempt.number, claim["job_id"], claim["restart_count"], claim["host"]) == (0, "7", 0, "node1")


def test_the_next_start_begins_the_next_attempt(run):
    stopped(claim_attempt(carried(run)))
    attempt = claim_attempt(carried(run, restart_count=1))
    assert (attempt.number, attempt.claim.exists(), attempt.ranks.is_dir()) == (1, True, True)


def test_an_attempt_without_a_recorded_end_is_closed_as_failed_with_its_host(run):
    claim_attempt(carried(run))
    claim_attempt(carried(run, restart_count=1))
    end = read_end(run.attempt(0))
    assert (end.outcome, end.will_restart, end.needs_job, end.root_cause.host) == ("FAILED", True, True, "node1")


def test_an_attempt_that_was_restarted_in_place_is_never_claimed_twice(run):
    write_end(claim_attempt(carried(run)), AttemptEnd(outcome="FAILED", reason="rank 1", will_restart=True))
    make_attempt(run, 1)
    attempt = claim_attempt(carried(run, restarts=3, restart_count=1))
    assert (attempt.number, read_end(run.attempt(1)).root_cause.host) == (2, "node1")


def test_no_attempt_begins_beyond_the_restarts(run):
    claim_attempt(carried(run, restarts=0))
    assert claim_attempt(carried(run, restarts=0, restart_count=1)) is None
    assert [attempt.number for attempt in run.attempts()] == [0]
    assert read_end(run.attempt(0)).will_restart is False


def test_one_that_was_promised_beyond_the_restarts_ends_as_failed(run):
    stopped(claim_attempt(carried(run, restarts=0)))
    assert claim_attempt(carried(run, restarts=0, restart_count=1)) is None
    end = read_end(run.attempt(1))
    assert (end.outcome, end.will_restart) == ("FAILED", False)
    assert "no restarts" in end.reason


def test_restarts_count_from_the_attempt_of_the_last_resume(run):
    write_end(run.attempt(0), AttemptEnd(outcome="FAILED", reason="it was resumed since"))
    make_attempt(run, 1)
    stopped(claim_attempt(carried(run, job_attempt=1, base_attempt=1)))
    attempt = claim_attempt(carried(run, restart_count=1, job_attempt=1, base_attempt=1))
    assert attempt.number == 2


def test_a_run_that_has_ended_is_not_started_again(run):
    write_end(claim_attempt(carried(run)), AttemptEnd(outcome="COMPLETED", reason="all ranks are done"))
    assert claim_attempt(carried(run, restart_count=1)) is None


def test_a_run_that_was_cancelled_while_it_waited_is_not_started(run):
    run.cancel_file.touch()
    assert claim_attempt(carried(run)) is None
    assert read_end(run.attempt(0)).outcome == "CANCELLED"


def test_an_attempt_is_superseded_by_the_claim_of_a_later_one(run):
    first = claim_attempt(carried(run))
    before = later_claimed(run, first.number)
    claim_attempt(carried(run, restart_count=1))
    assert (before, later_claimed(run, first.number)) == (None, 1)


def test_a_job_that_was_given_up_does_not_carry_the_run():
    old = dataclasses.replace(start_of(name=job_name("job", job_tag(TOKEN, 0))), job_id="6")
    assert not old.carries(dataclasses.replace(record(), job_tag=job_tag(TOKEN, 2), job_id=None))


def test_a_job_whose_number_was_not_recorded_carries_the_run_by_its_tag():
    assert start_of().carries(dataclasses.replace(record(), job_id=None))


def test_the_task_of_an_array_is_named_by_array_and_index():
    environ = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
    assert JobStart.of_environment(environ).job_id == "9_3"


def test_a_batch_script_that_a_user_runs_is_refused():
    with pytest.raises(ClusterddpError, match="only Slurm runs this command"):
        JobStart.of_environment({})


def test_a_task_that_the_list_of_a_sweep_lacks_is_named(tmp_path):
    tasks = tmp_path / "tasks.txt"
    tasks.write_text("brisk-otter-3.0\nbrisk-otter-3.1\n")
    with pytest.raises(ClusterddpError) as error:
        find_run(str(tasks), {"SLURM_ARRAY_TASK_ID": "11"})
    assert error.value.message == f"{tasks}: found no run of task 11 of the job array"

"""The batch script of a Slurm job, on a real Slurm, around tasks that end in every way.

The tasks are stand-ins that record ends as the supervisors do: here it counts what becomes of the job.
"""

import dataclasses
from collections.abc import Iterator

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.job_tag import job_tag
from clusterddp.run.record import read_run, write_run
from clusterddp.run.sweep import read_sweep
from tests.support.slurm_runs import (
    COMPLETE_LATER,
    GO_ON,
    TASK,
    await_final_end,
    await_job_state,
    await_up,
    claims,
    job_fields,
    make_slurm_run,
    stand_in,
    start,
    start_run,
    stopped_batch_process,
)
from tests.support.sweep_runs import SweepPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
STOP_AT_TERM = COMPLETE_LATER + "wait(lambda: signalled)\n" + GO_ON
NEED_JOB = COMPLETE_LATER + GO_ON
HANG_THEN_COMPLETE = COMPLETE_LATER + "wait(lambda: False)\n"


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        yield rack


def preempt(rack: Rack, *options: str) -> str:
    sbatch = ["sbatch", "--parsable", "-N2", "--exclusive", "-p", "high", "-o", "/dev/null", "--wrap", "sleep 1"]
    return rack.run(HEAD, [*sbatch, *options]).stdout.strip()


def test_a_completed_run_leaves_a_completed_job(cluster):
    run, job = start(cluster, "completed", TASK + "end('COMPLETED')\n")
    assert await_job_state(cluster, job, "COMPLETED")["ExitCode"] == "0:0"
    assert claims(run) == [(job, 0)]


def test_a_requeue_by_hand_begins_the_next_attempt_in_the_same_job(cluster):
    run, job = start(cluster, "requeue", STOP_AT_TERM)
    await_up(run)
    cluster.run(HEAD, ["scontrol", "requeue", job])
    assert await_final_end(run).outcome == "COMPLETED"
    assert claims(run) == [(job, 0), (job, 1)]


def test_an_attempt_that_needs_another_start_of_the_job_gets_it(cluster):
    run, job = start(cluster, "needs", NEED_JOB)
    assert await_final_end(run).outcome == "COMPLETED"
    assert claims(run) == [(job, 0), (job, 1)]


def test_a_preempted_job_goes_on_when_the_other_one_is_done(cluster):
    run, job = start(cluster, "preempted", STOP_AT_TERM)
    await_up(run)
    preempt(cluster)
    assert await_final_end(run).outcome == "COMPLETED"
    assert claims(run) == [(job, 0), (job, 1)]


def test_where_no_job_may_be_requeued_a_follow_up_job_goes_on(cluster):
    run, job = start(cluster, "follow-up", NEED_JOB, more="restarts: 2\nslurm: {requeue: false, no_requeue: true}")
    assert await_final_end(run).outcome == "COMPLETED"
    follower = read_run(run).job_id
    assert follower != job
    assert claims(run) == [(job, 0), (follower, 0)]


def test_a_preempted_job_that_may_not_be_requeued_is_followed_up(cluster):
    run, job = start(cluster, "pre-follow", STOP_AT_TERM, more="restarts: 2\nslurm: {requeue: false, no_requeue: true}")
    await_up(run)
    preempt(cluster)
    assert await_final_end(run).outcome == "COMPLETED"
    assert claims(run) == [(job, 0), (read_run(run).job_id, 0)]


def test_a_requeue_that_leaves_no_time_for_an_end_is_closed_by_the_next_start(cluster):
    run, job = start(cluster, "no-end", HANG_THEN_COMPLETE)
    await_up(run)
    cluster.run(HEAD, ["scontrol", "requeue", job])
    assert await_final_end(run).outcome == "COMPLETED"
    first = read_end(run.attempt(0))
    assert (first.outcome, first.will_restart, first.root_cause.host) == ("FAILED", True, "node1")


def test_tasks_that_die_without_a_report_are_explained_by_their_last_line(cluster):
    run, _ = start(cluster, "dumb", TASK + "sys.exit('no such shared object')\n")
    end = await_final_end(run)
    assert (end.outcome, end.will_restart) == ("FAILED", False)
    assert "srun exited with code 1" in end.reason


def test_a_failed_run_gives_its_root_cause_s_exit_code_to_the_job(cluster):
    cause = "RankEnd(rank=1, host='h', exit_code=17, error='e', log=None)"
    _, job = start(cluster, "code", TASK + f"end('FAILED', root_cause={cause})\n")
    assert await_job_state(cluster, job, "FAILED")["ExitCode"] == "17:0"


def test_a_second_start_of_a_finished_job_starts_nothing(cluster):
    run, job = start(cluster, "finished", TASK + "end('COMPLETED')\n")
    await_job_state(cluster, job, "COMPLETED")
    cluster.run(HEAD, ["scontrol", "requeue", job])
    wait_until(lambda: job_fields(cluster, job)["Restarts"] == "1", 10)
    await_job_state(cluster, job, "COMPLETED")
    assert [attempt.number for attempt in run.attempts()] == [0]


def test_no_attempt_begins_beyond_the_restarts(cluster):
    run, _ = start(cluster, "budget", TASK + GO_ON, more="restarts: 1")
    end = await_final_end(run)
    assert (end.outcome, run.attempts()[-1].number) == ("FAILED", 2)
    assert "restarts are used up (1)" in end.reason


def test_usr2_to_the_batch_script_asks_the_ranks_to_stop(cluster):
    code = TASK + "wait(attempt.stop_file.exists)\nend('STOPPED')\n"
    run, job = start(cluster, "usr2", code)
    await_up(run)
    cluster.run(HEAD, ["scancel", "--batch", "--signal=USR2", job])
    assert await_final_end(run).outcome == "STOPPED"


def test_a_cancel_before_the_batch_process_handles_signals_is_recorded(cluster):
    run, job = start(cluster, "early", HANG_THEN_COMPLETE, more="restarts: 1\nslurm: {begin: now+3}")
    with stopped_batch_process(run):
        cluster.run(HEAD, ["scancel", job])
        wait_until(lambda: job_fields(cluster, job).get("JobState") != "RUNNING", 20)
    assert await_final_end(run).outcome == "CANCELLED"


def test_secrets_are_removed_when_the_run_has_ended(cluster):
    run = make_slurm_run(cluster, "secrets", "")
    stand_in(run, TASK + "end('COMPLETED')\n")
    run.job_secrets.write_text('{"WANDB_API_KEY": "k"}')
    job = start_run(cluster, run)
    await_job_state(cluster, job, "COMPLETED")
    assert not run.job_secrets.exists()


def test_a_job_that_was_given_up_meanwhile_starts_nothing(cluster):
    run, job = start(cluster, "stale", TASK + "end('COMPLETED')\n", more="slurm: {begin: now+2}")
    write_run(run, dataclasses.replace(read_run(run), job_id=None, job_tag=job_tag("of another job", 1)))
    assert await_job_state(cluster, job, "FAILED")["ExitCode"] == "1:0"
    assert (claims(run), read_end(run.attempt(0))) == ([], None)


def test_the_task_of_an_array_is_requeued_by_itself(cluster):
    place = SweepPerson.at(cluster, "array", "", more="restarts: 1\nslurm: {hold: true}")
    sweep = place.submit_sweep("env.SEED=0,1")
    job, runs = read_sweep(sweep).job_id, sweep.runs()
    for run, code in zip(runs, (NEED_JOB, TASK + "end('COMPLETED')\n"), strict=True):
        stand_in(run, code)
    cluster.run(HEAD, ["scontrol", "release", job])
    assert [await_final_end(run).outcome for run in runs] == ["COMPLETED"] * 2
    assert [claims(run) for run in runs] == [[(f"{job}_0", 0), (f"{job}_0", 1)], [(f"{job}_1", 0)]]

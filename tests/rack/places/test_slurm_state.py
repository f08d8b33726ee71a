"""States of runs on a real Slurm: run directories made by hand, real jobs that carry their tags."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterddp.places.slurm.queue import Slurm
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunState, RunView
from tests.support.handmade_slurm_runs import (
    age,
    begin_attempt,
    end_attempt,
    make_slurm_run,
    name_of_job,
    update_record,
)
from tests.support.paths import ROOT as REPOSITORY
from tests.support.rack_slurm import await_state, eventually, reach_slurm, submit_job
from tests.testbed.plan import USER, USER_ID
from tests.testbed.rack import Rack

pytestmark = pytest.mark.root


@pytest.fixture
def slurm(rack: Rack, tmp_path: Path) -> Slurm:
    return reach_slurm(rack, tmp_path / "bin")


@pytest.fixture
def runs_dir(rack: Rack) -> Iterator[Path]:
    """A place for runs; every job of root is gone at the end."""
    yield rack.dir / "shared" / "runs"
    rack.run("head", ["scancel", "--user=root"])
    eventually(lambda: rack.run("head", ["squeue", "-h"]).stdout == "")


@pytest.fixture
def make(runs_dir: Path, request: pytest.FixtureRequest) -> Callable[..., RunDir]:
    """Make a run, of a name of its own."""
    names = iter(range(100))

    def make_one(**changes: object) -> RunDir:
        return make_slurm_run(runs_dir, f"{request.node.name}-{next(names)}", **changes)  # type: ignore[arg-type]

    return make_one


def read_at_rest(run: RunDir, slurm: Slurm) -> RunView:
    """Read the state of a run when nothing can be on its way any more: its files are old, its job ended long ago."""

    def at_rest() -> bool:
        age(run)
        return "may be recorded soon" not in read_state(run, slurm).reason

    eventually(at_rest)
    return read_state(run, slurm)


def clusterddp(rack: Rack, *arguments: str) -> str:
    """Run the command on the head."""
    argv = [sys.executable, "-m", "clusterddp", *arguments]
    return rack.run("head", argv, env={"PYTHONPATH": str(REPOSITORY)}, check=False).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hold",), "because it is held; scontrol release {job} lets it go (JobHeldUser)"),
        (("--begin=now+2days",), "until its begin time (BeginTime); Slurm expects it to start on 20"),
        (("--nodelist=node1", "--exclusive", "--dependency=singleton"), "for nodes to become free (Resources)"),
    ],
)
def test_a_waiting_job_says_what_it_waits_for(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir], options: tuple[str, ...], words: str
) -> None:
    blocker = submit_job(rack, make(), "--nodelist=node1", "--exclusive")
    await_state(rack, blocker, "RUNNING")
    run = make()
    job = submit_job(rack, run, *options)
    eventually(lambda: words.format(job=job) in read_state(run, slurm).reason)
    assert read_state(run, slurm).state is RunState.PENDING


def test_a_job_that_can_never_run_says_so(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    failed = submit_job(rack, make(), script="false")
    run = make()
    submit_job(rack, run, f"--dependency=afterok:{failed}")
    eventually(lambda: "for ever: a job that it depends on" in read_state(run, slurm).reason)


def test_a_run_whose_job_runs_and_whose_ranks_have_started_is_running(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run)
    begin_attempt(run)
    await_state(rack, job, "RUNNING")
    view = read_state(run, slurm)
    assert (view.state, view.reason) == (RunState.RUNNING, f"job {job} on node1 runs")


def test_a_run_whose_job_runs_is_pending_until_its_ranks_start(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run)
    await_state(rack, job, "RUNNING")
    view = read_state(run, slurm)
    assert (view.state, view.reason) == (RunState.PENDING, f"job {job} on node1 is starting its ranks")


def test_a_run_that_its_job_has_claimed_is_pending_until_its_ranks_start(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run)
    begin_attempt(run).start.unlink()
    await_state(rack, job, "RUNNING")
    assert read_state(run, slurm).state is RunState.PENDING


def test_ranks_that_started_after_squeue_was_asked_are_running(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    submit_job(rack, run, "--hold")  # stands for what squeue said a moment before the start
    begin_attempt(run)
    assert read_state(run, slurm).state is RunState.RUNNING


def test_a_job_that_was_queued_after_squeue_was_asked_is_found(
    rack: Rack, make: Callable[..., RunDir], tmp_path: Path
) -> None:
    slurm = reach_slurm(rack, tmp_path / "bin", max_age_s=60)
    read_state(make(job_id="999999"), slurm)
    run = make()
    submit_job(rack, run, "--hold")
    assert read_state(run, slurm).state is RunState.PENDING


def test_an_attempt_whose_job_is_not_in_the_record_yet_is_pending(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    await_state(rack, submit_job(rack, run, script="false"), "FAILED")
    run.attempt(1).path.mkdir()
    assert read_state(run, slurm).state is RunState.PENDING


def test_a_suspended_job_is_running_and_says_why_nothing_happens(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run)
    begin_attempt(run)
    await_state(rack, job, "RUNNING")
    rack.run("head", ["scontrol", "suspend", job])
    view = read_state(run, slurm)
    rack.run("head", ["scontrol", "resume", job])
    assert (view.state, view.reason) == (
        RunState.RUNNING,
        f"job {job} on node1 is suspended: Slurm has stopped its processes",
    )


def test_a_recorded_end_is_the_truth_whatever_the_job_does(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    submit_job(rack, run)
    end_attempt(begin_attempt(run))
    assert read_state(run, slurm).state is RunState.COMPLETED


def test_a_job_that_failed_before_anything_started_has_failed_with_its_last_words(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, script="echo bash: python: not found; exit 3")
    await_state(rack, job, "FAILED")
    view = read_at_rest(run, slurm)
    assert (view.state, view.reason) == (
        RunState.FAILED,
        f'job {job} ended: FAILED; launcher/job.log ends with "bash: python: not found"',
    )


def test_a_job_that_a_node_could_not_start_says_what_that_usually_means(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, "--output=/proc/none/job.log")
    await_state(rack, job, "FAILED")
    view = read_at_rest(run, slurm)
    # Newer Slurms than 22.05 give another reason for it, and 20.11 gives no exit code.
    assert re.search(r"usually (it does|its nodes do) not (see|share) the run's directory", view.reason)


def test_a_script_that_failed_and_left_no_word_here_may_not_have_seen_the_run_s_directory(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    """As where slurmstepd (24.11) makes the directory of the output on the node's own disk."""
    run = make()
    job = submit_job(rack, run, "--output=/dev/null", script="exit 1")
    await_state(rack, job, "FAILED")
    view = read_at_rest(run, slurm)
    assert (view.state, "usually its nodes do not share the run's directory" in view.reason) == (RunState.FAILED, True)


def test_the_end_of_a_job_is_no_end_of_the_run_while_the_record_may_be_on_its_way(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, script="false")
    begin_attempt(run)
    await_state(rack, job, "FAILED")
    assert read_state(run, slurm).state is RunState.RUNNING


def test_a_job_that_completed_without_a_record_is_lost(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run, script="true")
    await_state(rack, job, "COMPLETED")
    view = read_at_rest(run, slurm)
    assert (view.state, f"job {job} ended: COMPLETED, and no rank was started" in view.reason) == (RunState.LOST, True)


def test_a_job_whose_time_was_up_has_failed_and_says_so(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run, "--time=10")
    begin_attempt(run)
    await_state(rack, job, "RUNNING")
    rack.run("head", ["scontrol", "update", f"jobid={job}", "EndTime=now+1"])
    await_state(rack, job, "TIMEOUT")
    view = read_at_rest(run, slurm)
    assert (view.state, "its time was up" in view.reason) == (RunState.FAILED, True)


def test_a_run_of_another_user_is_running_for_every_user_and_only_its_owner_ends_it(
    rack: Rack, make: Callable[..., RunDir]
) -> None:
    run, forgotten = make(), make(job_id="4711")
    job = submit_job(rack, run, script="sleep 300")
    await_state(rack, job, "RUNNING")
    for each in (run, forgotten):
        begin_attempt(each)
        age(each)
        rack.run("head", ["chmod", "-R", "a+rX", str(each.path)])
    assert seen_by_ana(rack, run, forgotten) == (
        f"RUNNING\n2 {run.name} belongs to another user, and only that user can start it, ask it or end it\n"
        f"UNKNOWN\n2 {forgotten.name} belongs to another user, and only that user can start it, ask it or end it\n"
    )


def seen_by_ana(rack: Rack, *runs: RunDir) -> str:
    """Read the state of runs as another user than their owner, and cancel them; she can import nothing."""
    program = """
import os, sys
from pathlib import Path
import clusterddp.places.slurm.launcher
from clusterddp.errors import ClusterddpError
from clusterddp.submission.cancel import cancel
from clusterddp.run.directory import RunDir
from clusterddp.places.state import read_state
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
for path in sys.argv[2:]:
    print(read_state(RunDir(Path(path))).state.value)
    try:
        print(cancel(RunDir(Path(path))))
    except ClusterddpError as error:
        print(error.exit_code, error.message)
"""
    argv = [sys.executable, "-c", program, str(USER_ID), *(str(run.path) for run in runs)]
    return rack.run("head", argv, env={"PYTHONPATH": str(REPOSITORY)}).stdout


@pytest.mark.parametrize("user", ["root", USER])
def test_a_job_that_was_cancelled_makes_its_run_cancelled(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir], user: str
) -> None:
    run = make()
    job = submit_job(rack, run, f"--uid={user}", "--output=/dev/null", "--chdir=/")
    if user != "root":  # root looks at the run of another user
        rack.run("head", ["chown", "-R", user, str(run.path)])
    await_state(rack, job, "RUNNING")
    rack.run("head", ["scancel", job], user=user)
    await_state(rack, job, "CANCELLED")
    assert read_at_rest(run, slurm).state is RunState.CANCELLED


def test_a_requeued_run_waits_to_start_again(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run)
    await_state(rack, job, "RUNNING")
    end_attempt(begin_attempt(run), "STOPPED", will_restart=True)
    rack.run("head", ["scontrol", "requeue", job])
    await_state(rack, job, "PENDING")
    view = read_state(run, slurm)
    assert (view.state, view.reason.partition("; ")[0]) == (RunState.REQUEUED, "restarts after: the reason")


def test_a_requeue_without_a_record_counts_as_one(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run)
    begin_attempt(run)
    await_state(rack, job, "RUNNING")
    rack.run("head", ["scontrol", "requeuehold", job])
    await_state(rack, job, "PENDING", "REQUEUE_HOLD")
    age(run)
    view = read_state(run, slurm)
    assert (view.state, f"scontrol release {job}" in view.reason) == (RunState.REQUEUED, True)


def test_a_run_that_was_to_start_again_and_whose_job_has_ended_is_lost(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, script="false")
    end_attempt(begin_attempt(run), "FAILED", will_restart=True)
    await_state(rack, job, "FAILED")
    view = read_at_rest(run, slurm)
    assert (view.state, "no job follows it" in view.reason) == (RunState.LOST, True)


def test_a_job_that_sbatch_queued_without_telling_us_is_found_by_its_tag(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, "--hold")
    update_record(run, job_id=None)
    view = read_state(run, slurm)
    assert view.job
    assert (view.state, view.job.job_id) == (RunState.PENDING, job)


def test_of_two_jobs_of_one_run_the_newest_counts_and_a_word_says_so(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    first, second = submit_job(rack, run, "--hold"), submit_job(rack, run, "--hold")
    assert read_state(run, slurm).reason.endswith(
        f"(JobHeldUser); job {first} has the tag of this run too: the newest job is shown"
    )
    assert int(second) > int(first)


def test_a_number_that_slurm_gave_to_another_job_is_not_read_as_ours(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    job = submit_job(rack, run, "--hold", name="somebody.elses")
    age(run)
    view = read_state(run, slurm)
    assert (view.state, f"no longer knows job {job}" in view.reason) == (RunState.LOST, True)


def test_jobs_with_any_text_in_their_names_confuse_nothing(
    rack: Rack, slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    for name in (f"x\n\x1f{name_of_job(run)}\x1f", "\x1f" * 30, "\n" * 5, "a" * 900):
        submit_job(rack, make(), "--hold", name=name)
    job = submit_job(rack, run, "--hold")
    view = read_state(run, slurm)
    assert view.job
    assert (view.job.job_id, view.job.twins) == (job, ())


def test_each_task_of_an_array_is_a_run(rack: Rack, slurm: Slurm, make: Callable[..., RunDir]) -> None:
    first = make(array_index=0)
    job = submit_job(rack, first, "--array=0-99%1", "--output=/dev/null")
    tag = json.loads(first.record.read_text())["job_tag"]
    late = make(array_index=98, job_tag=tag, job_id=f"{job}_98")
    begin_attempt(first)
    eventually(lambda: read_state(first, slurm).state is RunState.RUNNING)
    view = read_state(late, slurm)
    assert view.job
    assert (view.state, view.job.job_id) == (RunState.PENDING, f"{job}_98")


def test_a_run_without_a_job_is_lost_when_the_process_that_submitted_it_is_gone(
    slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make()
    age(run)
    assert read_state(run, slurm).reason == (
        "was never started: the process that submitted it is gone; Slurm knows no job of it; resume queues it"
    )


def test_a_run_that_is_being_queued_is_pending(slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make(job_tag=None)
    assert read_state(run, slurm).state is RunState.PENDING


def test_a_job_that_slurm_does_not_know_yet_is_unknown_and_not_lost(slurm: Slurm, make: Callable[..., RunDir]) -> None:
    run = make(job_id="999999")
    assert read_state(run, slurm).state is RunState.UNKNOWN


def test_a_job_that_slurm_never_knew_is_lost_when_nothing_was_heard_for_long(
    slurm: Slurm, make: Callable[..., RunDir]
) -> None:
    run = make(job_id="999999")
    age(run)
    view = read_state(run, slurm)
    assert (view.state, "resume queues it again" in view.reason) == (RunState.LOST, True)


def test_status_shows_the_job_and_why_it_waits(rack: Rack, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run, "--hold", "--nodes=2")
    text = clusterddp(rack, "status", str(run.path))
    assert f"PENDING  slurm job {job}, 2 nodes, partition low, 2 ranks" in text
    assert f"job {job} waits because it is held" in text


def test_status_as_json_has_the_reason_and_the_job(rack: Rack, make: Callable[..., RunDir]) -> None:
    run = make()
    job = submit_job(rack, run, "--hold")
    status = json.loads(clusterddp(rack, "status", str(run.path), "-o", "json"))
    assert "(JobHeldUser)" in status["reason"]
    assert (status["job"]["job_id"], status["job"]["partition"]) == (job, "low")


def test_status_names_the_hosts_once_the_ranks_have_started(rack: Rack, make: Callable[..., RunDir]) -> None:
    run = make()
    submit_job(rack, run)
    begin_attempt(run)
    status = json.loads(clusterddp(rack, "status", str(run.path), "-o", "json"))
    assert [(rank["host"], rank["interface"]) for rank in status["ranks"]] == [("node1", "eth0"), ("node2", "eth0")]


def test_status_points_to_the_jobs_log_when_no_rank_was_started(rack: Rack, make: Callable[..., RunDir]) -> None:
    run = make()
    await_state(rack, submit_job(rack, run, script="echo no python here; exit 3"), "FAILED")
    eventually(lambda: age(run) or "  FAILED  slurm" in clusterddp(rack, "status", str(run.path)))
    assert f"job's log  {run.launcher_dir}/job.log" in clusterddp(rack, "status", str(run.path))


def test_list_shows_what_every_run_waits_for(rack: Rack, make: Callable[..., RunDir], runs_dir: Path) -> None:
    runs = [make() for _ in range(3)]
    jobs = [submit_job(rack, run, "--hold") for run in runs]
    listed = json.loads(clusterddp(rack, "list", "--limit", "3", "-o", "json", "--runs", str(runs_dir)))
    assert {run["job_id"]: run["state"] for run in listed} == dict.fromkeys(jobs, "PENDING")

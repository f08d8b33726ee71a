"""What Slurm does to a run of a user's script: limits, preemption, lost hosts, cancels; real ranks throughout."""

import os
import signal
import time

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.processes import Process, read_command, read_environment
from tests.support.launch_runs import HELLO, IMPATIENT, wait_for_ranks
from tests.support.slurm_runs import await_final_end, await_job_state, claims, job_fields, make_slurm_run, start_run
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
UNTIL_STOP = """
import time, clusterddp
while os.environ["CLUSTERDDP_ATTEMPT"] == "0" and not clusterddp.should_stop():
    time.sleep(0.02)
"""
INTERRUPTIBLE = HELLO + UNTIL_STOP
FOREVER_AT_FIRST = HELLO + "import time\nwhile os.environ['CLUSTERDDP_ATTEMPT'] == '0':\n    time.sleep(0.02)\n"
TWO = ["node1", "node2"]
THREE = ["node1", "node2", "node3"]
PREEMPT = ["sbatch", "-N2", "--exclusive", "-p", "high", "-o", "/dev/null", "--wrap", "sleep 1"]


def start(rack: Rack, code: str, *, more: str = "restarts: 2", time_limit: str = "") -> tuple[RunDir, str]:
    resources = f"{{nodes: 2, procs_per_node: 1{time_limit}}}"
    run = make_slurm_run(rack, "run", code, more=more, resources=resources)
    job = start_run(rack, run)
    wait_for_ranks(run, 2)
    return run, job


def test_the_time_limit_stops_the_ranks_and_the_job_starts_again():
    with running_rack(RackPlan(nodes=TWO)) as rack:
        run, job = start(rack, INTERRUPTIBLE, time_limit=', time: "1:00"')
        assert await_final_end(run, 150).outcome == "COMPLETED"
        first = read_end(run.attempt(0))
        assert (first.outcome, claims(run)) == ("STOPPED", [(job, 0), (job, 1)])
        assert "time limit" in first.reason


def test_a_warned_job_stops_within_its_grace_and_goes_on_after_the_preemption():
    with running_rack(RackPlan(nodes=TWO, preempt_grace_s=30)) as rack:
        run, job = start(rack, INTERRUPTIBLE)
        rack.run(HEAD, PREEMPT)
        assert await_final_end(run, 120).outcome == "COMPLETED"
        first = read_end(run.attempt(0))
        assert (first.outcome, claims(run)) == ("STOPPED", [(job, 0), (job, 1)])
        assert "preempted" in first.reason


def test_a_host_s_loss_is_survived_on_another_host():
    with running_rack(RackPlan(nodes=THREE, slurmd_timeout_s=5)) as rack:
        run, _ = start(rack, FOREVER_AT_FIRST)
        rack.power_off("node2")
        assert await_final_end(run, 150).outcome == "COMPLETED"
        first = read_end(run.attempt(0))
        assert (first.outcome, first.root_cause.rank, first.root_cause.host) == ("FAILED", 1, "node2")


def test_a_host_s_loss_ends_a_run_that_has_no_restarts_left():
    with running_rack(RackPlan(nodes=THREE, slurmd_timeout_s=5)) as rack:
        run, job = start(rack, FOREVER_AT_FIRST, more="restarts: 0")
        rack.power_off("node2")
        end = await_final_end(run, 60)
        assert (end.outcome, end.root_cause.rank, len(run.attempts())) == ("FAILED", 1, 1)
        wait_until(lambda: job_fields(rack, job).get("JobState") in {"FAILED", "NODE_FAIL", "CANCELLED"}, 60)


def test_the_first_host_s_loss_is_survived_on_another_host():
    with running_rack(RackPlan(nodes=THREE, slurmd_timeout_s=20)) as rack:
        run, _ = start(rack, FOREVER_AT_FIRST, more=f"restarts: 2\n{IMPATIENT}")
        rack.power_off("node1")
        assert await_final_end(run, 170).outcome == "COMPLETED"
        first = read_end(run.attempt(0))
        assert (first.outcome, first.root_cause.rank, first.root_cause.host) == ("FAILED", 0, "node1")


def test_where_no_job_may_be_requeued_a_lost_host_makes_a_follow_up_job():
    with running_rack(RackPlan(nodes=THREE, slurmd_timeout_s=5)) as rack:
        more = "restarts: 1\nslurm: {requeue: false, no_requeue: true}"
        run, job = start(rack, FOREVER_AT_FIRST, more=more)
        rack.power_off("node2")
        assert await_final_end(run, 150).outcome == "COMPLETED"
        assert claims(run) == [(job, 0), (read_run(run).job_id, 0)]


@pytest.mark.parametrize(
    ("options", "follows"), [("slurm: {requeue: false}", True), ("", False)], ids=["as the cluster does", "requeue"]
)
def test_a_cluster_that_requeues_no_job_by_itself_is_no_obstacle(options, follows):
    with running_rack(RackPlan(nodes=TWO, job_requeue=False)) as rack:
        run, job = start(rack, FOREVER_AT_FIRST, more=f"restarts: 1\n{options}")
        task = next(task for task in find_processes(f"{read_run(run).token}.task") if "1" in rank_of(task))
        os.kill(task.pid, signal.SIGKILL)
        assert await_final_end(run, 120).outcome == "COMPLETED"
        assert claims(run) == [(job, 0), (read_run(run).job_id, 0) if follows else (job, 1)]


def rank_of(task: Process) -> str:
    """Return which rank's task a process is; srun and the batch script are none's."""
    return (
        read_environment(task.pid).get("SLURM_PROCID", "")
        if "clusterddp.places.slurm.task" in read_command(task.pid)[1:4]
        else ""
    )


@pytest.mark.parametrize("tracking", ["cgroup", "linuxproc"])  # SIGTERM reaches the tasks alone, or everybody
def test_scancel_ends_a_run_long_before_kill_wait(tracking):
    with running_rack(RackPlan(nodes=TWO, kill_wait_s=60, tracking=tracking)) as rack:
        run, job = start(rack, INTERRUPTIBLE)
        begun = time.monotonic()
        rack.run(HEAD, ["scancel", job])
        await_job_state(rack, job, "CANCELLED", 50)
        took_s = time.monotonic() - begun
        assert (read_end(run.attempts()[-1]).outcome, took_s < 30) == ("CANCELLED", True)


def test_a_job_that_is_cancelled_while_it_waits_to_start_again_starts_nothing():
    with running_rack(RackPlan(nodes=TWO)) as rack:
        run, job = start(rack, INTERRUPTIBLE)
        rack.run(HEAD, ["scontrol", "requeue", job])
        await_job_state(rack, job, "PENDING")
        run.cancel_file.touch()
        assert await_final_end(run).outcome == "CANCELLED"
        assert await_job_state(rack, job, "FAILED")["ExitCode"] == "6:0"

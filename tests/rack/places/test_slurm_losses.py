"""What becomes of a Slurm run when a host, a cable or the controller is lost under its batch script."""

import pytest

from clusterddp.run.attempts import read_end
from tests.support.slurm_runs import COMPLETE_LATER, GO_ON, await_final_end, await_up, claims, job_fields, start
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
THREE = RackPlan(nodes=["node1", "node2", "node3"], slurmd_timeout_s=5)
HANG_THEN_COMPLETE = COMPLETE_LATER + "wait(lambda: False)\n"
GO_ON_WHEN_TOLD = COMPLETE_LATER + "wait((run.path / 'go').exists)\n" + GO_ON


def test_the_batch_host_s_loss_begins_the_next_attempt_on_other_hosts():
    with running_rack(THREE) as rack:
        run, job = start(rack, "host-loss", HANG_THEN_COMPLETE)
        await_up(run)
        rack.power_off("node1")
        end = await_final_end(run, 90, what=(rack.dir / "log/slurmctld").read_text)
        assert end.outcome == "COMPLETED"
        assert claims(run) == [(job, 0), (job, 1)]
        assert read_end(run.attempt(0)).root_cause.host == "node1"


def test_a_batch_host_that_is_cut_off_leaves_the_record_to_its_successor():
    with running_rack(THREE) as rack:
        run, job = start(rack, "cut-off", HANG_THEN_COMPLETE)
        await_up(run)
        rack.pull_cable("node1")
        assert await_final_end(run, 90).outcome == "COMPLETED"
        before = [attempt.end.read_bytes() for attempt in run.attempts()]
        rack.plug_cable("node1")
        wait_until(lambda: rack.run("node1", ["pgrep", "-f", str(run.path)], check=False).returncode == 1, 60)
        assert [attempt.end.read_bytes() for attempt in run.attempts()] == before
        assert claims(run) == [(job, 0), (job, 1)]


def test_a_requeue_waits_for_a_controller_that_is_down():
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        run, job = start(rack, "controller", GO_ON_WHEN_TOLD)
        await_up(run)
        rack.run(HEAD, ["scontrol", "update", f"JobId={job}", "Priority=7"])
        rack.run(HEAD, ["sleep", "12"])  # by then the controller has written its state
        rack.run(HEAD, ["pkill", "-KILL", "-x", "slurmctld"])
        (run.path / "go").touch()
        wait_until(lambda: "retrying in" in (run.launcher_dir / "job.log").read_text(), 40)
        rack.run(HEAD, ["slurmctld"])
        assert await_final_end(run, 90).outcome == "COMPLETED"
        assert claims(run) == [(job, 0), (job, 1)]
        assert job_fields(rack, job)["Restarts"] == "1"


def test_a_buried_attempt_says_what_the_accounting_calls_it(needs_rack_accounting):
    with running_rack(RackPlan(nodes=["node1", "node2"], accounting=True)) as rack:
        run, job = start(rack, "accounted", HANG_THEN_COMPLETE)
        await_up(run)
        rack.run(HEAD, ["scontrol", "requeue", job])
        assert await_final_end(run, 90).outcome == "COMPLETED"
        assert "accounting reports REQUEUED" in read_end(run.attempt(0)).reason

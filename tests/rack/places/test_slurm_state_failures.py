"""States of runs when Slurm forgets, dies, loses a node, or has accounting; each on a rack of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.places.slurm.queue import Slurm
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunState, RunView
from tests.support.handmade_slurm_runs import age, begin_attempt, end_attempt, make_slurm_run, update_record
from tests.support.rack_slurm import await_state, eventually, reach_slurm, submit_job
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = pytest.mark.root
CONTROLLER = r"^(\S*/)?slurmctld( |$)"


@pytest.fixture(scope="module")
def forgetful(needs_rack: None) -> Iterator[Rack]:
    """A rack that soon forgets jobs, and soon misses a node."""
    with running_rack(RackPlan(nodes=["node1", "node2"], min_job_age_s=2, slurmd_timeout_s=3)) as rack:
        yield rack


@pytest.fixture(scope="module")
def accounting(needs_rack_accounting: None) -> Iterator[Rack]:
    """A rack with slurmdbd whose queue soon forgets jobs."""
    with running_rack(RackPlan(nodes=["node1"], min_job_age_s=2, accounting=True)) as rack:
        yield rack


@pytest.fixture
def slurm(forgetful: Rack, tmp_path: Path) -> Slurm:
    return reach_slurm(forgetful, tmp_path / "bin")


@pytest.fixture
def run(forgetful: Rack, request: pytest.FixtureRequest) -> RunDir:
    return make_slurm_run(forgetful.dir / "shared" / "runs", request.node.name)


@pytest.fixture
def accounted(accounting: Rack, request: pytest.FixtureRequest) -> RunDir:
    """A run on the rack with accounting."""
    return make_slurm_run(accounting.dir / "shared" / "runs", request.node.name)


def restart_slurmctld(rack: Rack) -> None:
    rack.run("head", ["slurmctld"])
    eventually(lambda: rack.run("head", ["squeue", "-h"], check=False).returncode == 0)


def kill_slurmctld(rack: Rack) -> None:
    # By its arguments: one that has started itself anew, as newer ones do on `reconfigure`, has another name.
    rack.run("head", ["pkill", "-KILL", "-f", CONTROLLER])
    eventually(lambda: rack.run("head", ["pgrep", "-f", CONTROLLER], check=False).returncode != 0)


def read_forgotten(rack: Rack, run: RunDir, job: str, slurm: Slurm) -> RunView:
    """Read the state of a run when squeue has forgotten its job and its files have not changed for long."""
    await_state(rack, job, "gone", within_s=120)
    age(run)
    return read_state(run, slurm)


def test_a_completed_run_stays_so_when_slurm_has_forgotten_its_job(forgetful: Rack, slurm: Slurm, run: RunDir) -> None:
    job = submit_job(forgetful, run, script="true")
    end_attempt(begin_attempt(run))
    assert read_forgotten(forgetful, run, job, slurm).state is RunState.COMPLETED


def test_a_run_without_an_end_is_lost_when_slurm_has_forgotten_its_job(
    forgetful: Rack, slurm: Slurm, run: RunDir
) -> None:
    job = submit_job(forgetful, run, script="echo Killed; exit 1")
    begin_attempt(run)
    view = read_forgotten(forgetful, run, job, slurm)
    assert (view.state, view.reason) == (
        RunState.LOST,
        f"Slurm no longer knows job {job}, and no process recorded how the run ended; "
        'launcher/job.log ends with "Killed"; resume queues it again',
    )


def test_a_cancelled_run_stays_so_when_slurm_has_forgotten_its_job(forgetful: Rack, slurm: Slurm, run: RunDir) -> None:
    job = submit_job(forgetful, run, "--hold")
    run.cancel_file.touch()
    forgetful.run("head", ["scancel", job])
    assert read_forgotten(forgetful, run, job, slurm).state is RunState.CANCELLED


def test_a_verdict_stands_when_slurm_forgets_the_job_while_we_look(forgetful: Rack, slurm: Slurm, run: RunDir) -> None:
    job = submit_job(forgetful, run, script="exit 3")
    age(run)
    eventually(lambda: "FAILED" in read_state(run, slurm).reason)
    assert read_forgotten(forgetful, run, job, slurm).state is RunState.FAILED


def test_a_run_whose_node_was_lost_has_failed_where_its_job_is_not_queued_again(
    forgetful: Rack, slurm: Slurm, run: RunDir
) -> None:
    job = submit_job(forgetful, run, "--no-requeue", "--nodelist=node2")
    begin_attempt(run)
    await_state(forgetful, job, "RUNNING")
    forgetful.power_off("node2")
    try:

        def failed() -> bool:
            age(run)
            return read_state(run, slurm).finished

        eventually(failed)
        view = read_state(run, slurm)
    finally:
        forgetful.power_on("node2")
        forgetful.await_idle("node2")
    assert (view.state, f"job {job} ended: NODE_FAIL, a node was lost" in view.reason) == (RunState.FAILED, True)


def test_a_run_whose_node_was_lost_is_requeued_where_slurm_queues_it_again(
    forgetful: Rack, slurm: Slurm, run: RunDir
) -> None:
    job = submit_job(forgetful, run, "--nodelist=node2")
    begin_attempt(run)
    await_state(forgetful, job, "RUNNING")
    forgetful.power_off("node2")
    try:
        eventually(lambda: read_state(run, slurm).state is RunState.REQUEUED)
    finally:
        forgetful.power_on("node2")
        forgetful.await_idle("node2")
        forgetful.run("head", ["scancel", job])


def test_without_a_controller_a_run_is_unknown_and_the_last_known_is_shown(
    forgetful: Rack, slurm: Slurm, run: RunDir
) -> None:
    job = submit_job(forgetful, run)
    begin_attempt(run)
    await_state(forgetful, job, "RUNNING")
    read_state(run, slurm)
    kill_slurmctld(forgetful)
    try:
        age(run)
        eventually(lambda: read_state(run, slurm).state is RunState.UNKNOWN)
        view = read_state(run, slurm)
    finally:
        restart_slurmctld(forgetful)
    assert view.reason.endswith(f"last known: job {job} was RUNNING on node1")


def test_a_run_goes_on_over_a_restart_of_the_controller(forgetful: Rack, slurm: Slurm, run: RunDir) -> None:
    job = submit_job(forgetful, run)
    begin_attempt(run)
    await_state(forgetful, job, "RUNNING")
    forgetful.run("head", ["scontrol", "reconfigure"])  # which also writes the state
    kill_slurmctld(forgetful)
    restart_slurmctld(forgetful)
    eventually(lambda: read_state(run, slurm).state is RunState.RUNNING)


def test_a_job_that_a_killed_controller_forgot_is_lost_and_its_number_anothers(
    forgetful: Rack, slurm: Slurm, run: RunDir
) -> None:
    state, saved = forgetful.dir / "state" / "slurmctld", forgetful.dir / "saved"
    kill_slurmctld(forgetful)
    shutil.copytree(state, saved)
    restart_slurmctld(forgetful)
    lost = submit_job(forgetful, run, "--hold")
    kill_slurmctld(forgetful)
    shutil.rmtree(state)
    saved.rename(state)
    restart_slurmctld(forgetful)
    other = make_slurm_run(run.path.parent, f"{run.name}-other")
    assert submit_job(forgetful, other, "--hold") == lost
    age(run)
    view = read_state(run, slurm)
    assert (view.state, f"Slurm no longer knows job {lost}, and no rank was started" in view.reason) == (
        RunState.LOST,
        True,
    )


def test_the_accounting_reports_how_a_forgotten_job_ended(accounting: Rack, accounted: RunDir, tmp_path: Path) -> None:
    job = submit_job(accounting, accounted, script="exit 3")
    begin_attempt(accounted)
    view = read_forgotten(accounting, accounted, job, reach_slurm(accounting, tmp_path / "bin"))
    assert (view.state, f"job {job} ended: FAILED, exit code 3 of the job's script" in view.reason) == (
        RunState.FAILED,
        True,
    )


def test_the_accounting_names_who_cancelled_a_forgotten_job(
    accounting: Rack, accounted: RunDir, tmp_path: Path
) -> None:
    job = submit_job(accounting, accounted)
    await_state(accounting, job, "RUNNING")
    accounting.run("head", ["scancel", job])
    view = read_forgotten(accounting, accounted, job, reach_slurm(accounting, tmp_path / "bin"))
    assert (view.state, view.reason) == (RunState.CANCELLED, f"job {job} was cancelled by root")


def test_the_last_start_of_a_requeued_job_decides(accounting: Rack, accounted: RunDir, tmp_path: Path) -> None:
    job = submit_job(accounting, accounted)
    await_state(accounting, job, "RUNNING")
    accounting.run("head", ["scontrol", "requeue", job])
    await_state(accounting, job, "PENDING")
    accounting.run("head", ["scancel", job])
    view = read_forgotten(accounting, accounted, job, reach_slurm(accounting, tmp_path / "bin"))
    assert (view.state, view.job.twins if view.job else None) == (RunState.CANCELLED, ())


def test_a_forgotten_job_whose_id_was_not_received_is_found_by_its_tag(
    accounting: Rack, accounted: RunDir, tmp_path: Path
) -> None:
    job = submit_job(accounting, accounted, script="exit 3")
    begin_attempt(accounted)
    update_record(accounted, job_id=None)
    view = read_forgotten(accounting, accounted, job, reach_slurm(accounting, tmp_path / "bin"))
    assert view.state is RunState.FAILED


def test_a_run_is_unknown_while_the_accounting_does_not_answer(
    accounting: Rack, accounted: RunDir, tmp_path: Path
) -> None:
    job = submit_job(accounting, accounted, script="true")
    slurm = reach_slurm(accounting, tmp_path / "bin")
    accounting.run("head", ["pkill", "-KILL", "-x", "slurmdbd"])
    try:
        view = read_forgotten(accounting, accounted, job, slurm)
    finally:
        accounting.run("head", ["slurmdbd"])
        eventually(lambda: accounting.run("head", ["sacct", "-n"], check=False).returncode == 0)
    assert (view.state, view.reason.startswith("Slurm could not be asked: sacct")) == (RunState.UNKNOWN, True)


def test_a_run_that_neither_queue_nor_accounting_knows_is_lost(accounting: Rack, tmp_path: Path) -> None:
    run = make_slurm_run(accounting.dir / "shared" / "runs", "never-there", job_id="999999")
    age(run)
    view = read_state(run, reach_slurm(accounting, tmp_path / "bin"))
    assert (view.state, "queue and accounting no longer know job 999999" in view.reason) == (RunState.LOST, True)

"""What the state of a run's job says of the run: jobs that a script on PATH prints, run directories made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunState, RunView
from clusterddp.system.files import write_json
from tests.support.fake_slurm import Fakes, squeue_row
from tests.support.handmade_slurm_runs import age, begin_attempt, make_slurm_run, name_of_job

NO_OUTPUT = "its output is not here: usually its nodes do not share the run's directory"


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose job was queued an hour ago."""
    run = make_slurm_run(tmp_path / "runs", job_id="17")
    age(run)
    return run


def claim(run: RunDir, *, is_old: bool = False) -> None:
    """Write what the batch script writes first."""
    write_json(run.attempt(0).claim, {"job_id": "17", "restart_count": 0, "host": "node1", "time": 1.0})
    if is_old:
        age(run)


def look(fakes: Fakes, run: RunDir, state: str, **facts: str) -> RunView:
    """Read the state of a run whose job has this state in the queue."""
    fakes.answer("squeue", squeue_row(state=state, name=name_of_job(run), **facts))
    return read_state(run, fakes.slurm())


def test_a_job_that_waits_says_for_what(fakes: Fakes, run: RunDir) -> None:
    view = look(fakes, run, "PENDING", reason="Resources")
    assert (view.state, view.reason) == (RunState.PENDING, "job 17 waits for nodes to become free (Resources)")


def test_a_job_that_has_claimed_its_run_since_the_queue_was_read_has_started(fakes: Fakes, run: RunDir) -> None:
    claim(run)
    assert look(fakes, run, "PENDING", reason="Resources").reason == "job 17 has started"


def test_a_job_that_claimed_its_run_long_ago_and_waits_is_to_start_again(fakes: Fakes, run: RunDir) -> None:
    claim(run, is_old=True)
    assert "Slurm's own pause before a job is started again" in look(fakes, run, "PENDING", reason="BeginTime").reason


def test_a_job_without_ranks_is_starting_them(fakes: Fakes, run: RunDir) -> None:
    view = look(fakes, run, "RUNNING", nodes="node[1-2]")
    assert (view.state, view.reason) == (RunState.PENDING, "job 17 on node[1-2] is starting its ranks")


def test_a_job_whose_ranks_were_started_runs(fakes: Fakes, run: RunDir) -> None:
    begin_attempt(run)
    assert look(fakes, run, "RUNNING").state is RunState.RUNNING


def test_a_script_that_failed_without_a_word_here_may_not_have_seen_the_directory(fakes: Fakes, run: RunDir) -> None:
    view = look(fakes, run, "FAILED", reason="NonZeroExitCode")
    assert (view.state, view.reason) == (RunState.FAILED, f"job 17 ended: FAILED; {NO_OUTPUT}")


def test_a_script_that_left_its_output_here_has_seen_the_directory(fakes: Fakes, run: RunDir) -> None:
    (run.launcher_dir / "job.log").write_text("")
    age(run)
    assert look(fakes, run, "FAILED").reason == "job 17 ended: FAILED"


def test_a_script_that_claimed_its_run_has_seen_the_directory(fakes: Fakes, run: RunDir) -> None:
    claim(run, is_old=True)
    assert NO_OUTPUT not in look(fakes, run, "FAILED").reason


def test_a_job_that_nobody_here_cancelled_before_it_began_is_explained(fakes: Fakes, run: RunDir) -> None:
    view = look(fakes, run, "CANCELLED")
    assert (view.state, "not by clusterddp: by scancel, or by Slurm itself" in view.reason) == (
        RunState.CANCELLED,
        True,
    )


def test_a_job_that_was_cancelled_after_it_began_is_a_plain_cancel(fakes: Fakes, run: RunDir) -> None:
    claim(run, is_old=True)
    assert look(fakes, run, "CANCELLED").reason == "job 17 was cancelled"


def test_a_first_node_that_was_lost_before_the_script_began_is_not_called_a_directory(
    fakes: Fakes, run: RunDir
) -> None:
    view = look(fakes, run, "NODE_FAIL")
    assert "its first node was lost before the job's script began" in view.reason
    assert NO_OUTPUT not in view.reason


def test_a_node_that_was_lost_after_the_script_began_is_a_lost_node(fakes: Fakes, run: RunDir) -> None:
    claim(run, is_old=True)
    assert look(fakes, run, "NODE_FAIL").reason == "job 17 ended: NODE_FAIL, a node was lost"

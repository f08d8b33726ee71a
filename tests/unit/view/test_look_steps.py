"""A batch script is looked at by its steps: each command of it that started ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest

from clusterddp.cli.text.status import status_lines
from clusterddp.run.attempts import AttemptEnd, failed_by, read_end, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event
from clusterddp.run.stacks import StackReport, newest_report, write_report
from clusterddp.run.state import RunState, RunView
from clusterddp.run.steps import shown_step
from clusterddp.view.status import read_status
from tests.support.handmade_runs import complete, fail, make_batch_run, start_step, train


def view_of(run: RunDir, state: RunState = RunState.RUNNING) -> RunView:
    """Say what Slurm would: a handmade run has no job."""
    return RunView(state=state, attempt=0, end=read_end(run.attempt(0)), reason="job 4711")


def text_of(run: RunDir, state: RunState = RunState.RUNNING) -> str:
    return click.unstyle("\n".join(status_lines(read_status(run, view_of(run, state)), run, address=run.name)))


def test_status_lists_the_steps_and_the_ranks_of_the_one_that_runs(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    done = start_step(run, "srun", "--ntasks=2", line=7)
    complete(done, done.attempt(0))
    start_step(run, "torchrun", "--nproc-per-node=4", line=9, ranks=4)
    status = read_status(run, view_of(run))
    assert [(each.step, each.state, each.ranks, each.line) for each in status.steps or ()] == [
        ("0", "COMPLETED", 2, 7),
        ("1", "RUNNING", 4, 9),
    ]
    assert (status.shown_step, status.world_size) == ("1", 4)
    assert [rank.state for rank in status.ranks] == ["RUNNING"] * 4
    text = text_of(run)
    assert "srun --ntasks=2 python train.py" in text
    assert "step 1:" in text
    found = json.loads(json.dumps(status.to_json()))
    assert [step["step"] for step in found["steps"]] == ["0", "1"]


def test_ranks_of_a_step_that_has_ended_while_the_script_goes_on_have_ended(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    step = start_step(run)
    complete(step, step.attempt(0))
    assert [rank.state for rank in read_status(run, view_of(run)).ranks] == ["COMPLETED"] * 2


def test_the_step_that_failed_first_is_shown_and_its_log_is_named(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    bad, later = start_step(run, "srun", line=34), start_step(run, "srun", line=36)
    fail(bad.attempt(0))
    complete(later, later.attempt(0))
    cause = (read_end(bad.attempt(0)) or AttemptEnd(outcome="FAILED", reason="")).root_cause
    assert cause is not None
    write_end(run.attempt(0), failed_by(dataclasses.replace(cause, error=f"step 0 (srun, line 34): {cause.error}")))
    assert shown_step(run, 0).step == "0"
    text = text_of(run, RunState.FAILED)
    assert "root cause: step 0 (srun, line 34): rank 1 on" in text
    assert f"clusterddp logs {run.name} --rank 1 --step 0" in text


def test_a_step_that_only_started_another_launcher_is_not_listed(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    start_step(run, "srun", has_ranks=False)
    start_step(run, "torchrun", inside="0")
    assert [each.command for each in read_status(run, view_of(run)).steps or ()] == ["torchrun"]


def test_a_script_that_ended_without_steps_says_so_and_no_more(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    assert "no ranks" not in text_of(run)
    write_end(run.attempt(0), AttemptEnd(outcome="COMPLETED", reason="train.slurm exited with code 0"))
    lines = text_of(run, RunState.COMPLETED).splitlines()
    assert "  no ranks were started by a command that clusterddp knows" in lines
    assert (read_status(run, view_of(run, RunState.COMPLETED)).steps, "RANK" in "".join(lines)) == ((), False)


def test_a_step_without_an_end_has_ended_with_the_job(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    start_step(run)
    write_end(run.attempt(0), AttemptEnd(outcome="CANCELLED", reason="the job was cancelled (scancel)"))
    status = read_status(run, view_of(run, RunState.CANCELLED))
    assert [each.state for each in status.steps or ()] == ["LOST"]
    assert "ended with the job" in text_of(run, RunState.CANCELLED)


def test_hangs_and_progress_are_those_of_the_step_that_is_shown(tmp_path: Path) -> None:
    run = make_batch_run(tmp_path)
    first = start_step(run)
    train(run, steps=5)  # at a time before the second step
    log_event(first, "hang", attempt=0, since=1.0, text="all wait", hint="", ranks=[0], stacks="x")
    assert read_status(run, view_of(run)).hang is not None
    complete(first, first.attempt(0))
    second = start_step(run)
    log_event(second, "step_not_watched", host="node02", error="no port")
    status = read_status(run, view_of(run))
    assert (status.hang, status.progress) == (None, None)
    assert "ranks of step 1 are not watched: no port" in status.warning


@pytest.mark.parametrize("as_step", [True, False])
def test_the_newest_stacks_of_a_run_may_be_those_of_a_step(tmp_path: Path, *, as_step: bool) -> None:
    run = make_batch_run(tmp_path)
    step = start_step(run)
    report = StackReport(id="1-a", attempt=0, time=1.0, world_size=2, ranks=())
    write_report((step if as_step else run).attempt(0), report)
    assert newest_report(run) == report

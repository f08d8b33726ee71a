"""Carry out a sweep: its runs, each an ordinary one, become the tasks of one Slurm job array, or wait in a queue."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launchers.slurm.jobs import cancel_job, settle
from clusterddp.launchers.slurm.launcher import SlurmLauncher, submit_job, variables_for
from clusterddp.planning.prerequisites import check_secrets, check_trainer
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.directory import RunDir
from clusterddp.run.record import JobAnswer, read_run
from clusterddp.run.sweep_dir import SweepDir, read_sweep, write_sweep
from clusterddp.submission.staging import refusal
from clusterddp.sweep.plan import SweepPlan, rename_sweep
from clusterddp.sweep.queue_control import SubmittedSweep, submit_to_queue
from clusterddp.sweep.staging import make_sweep, replace_files, take_back


def submit_sweep(plan: SweepPlan) -> SubmittedSweep:
    """Carry out the plan: make the directory of the sweep, then submit its job array, or start its queue.

    Raises: ClusterddpError: nothing is left behind; or a transient SlurmError: it cannot be told whether Slurm has the
    job, and the sweep is there.
    """
    environ = inherited_environment()
    check_secrets(plan.base.secrets, environ)
    check_trainer(plan.base.gang, elsewhere=plan.base.elsewhere)
    SlurmLauncher().check(plan.base)
    while True:
        try:
            make_sweep(plan, environ, variables_for(plan.base, environ) if plan.job else {})
            break
        except FileExistsError:
            plan = rename_sweep(plan)
    sweep = SweepDir(plan.path)
    if plan.job is None:
        return submit_to_queue(sweep, environ)
    job_id, cluster = _submit(sweep, plan, environ)
    try:
        _record_job(sweep, job_id, cluster)
    except (ClusterddpError, OSError) as error:  # the disk is full: nobody would learn of the job
        _withdraw(sweep, environ)
        raise refusal(plan.path.parent, error) if isinstance(error, OSError) else error from error
    names = tuple(run.run for run in plan.runs)
    return SubmittedSweep(sweep=plan.sweep, launcher=plan.base.launcher, job_id=job_id, path=plan.path, runs=names)


def _submit(sweep: SweepDir, plan: SweepPlan, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Ask sbatch once, as for one run, and settle doubts by the tag; return the array's number and its cluster."""
    array = dataclasses.replace(plan.base, slurm=plan.job)
    first = sweep.runs()[0]
    try:
        answer = submit_job(first, array, read_run(first), environ, sweep=sweep)[0]
    except KeyboardInterrupt:  # who interrupts a submit does not want the runs
        _withdraw(sweep, environ)
        raise
    except SlurmError as error:
        if not error.transient:
            take_back(sweep)
        raise
    number, _, cluster = answer.partition(";")
    return number.partition("_")[0], cluster or None


def _withdraw(sweep: SweepDir, environ: Mapping[str, str]) -> None:
    """Cancel the array, if Slurm has it, and remove the sweep; a job that is there all the same finds no runs."""
    first = sweep.runs()[0]
    record = read_run(first)
    with contextlib.suppress(SlurmError):
        job = settle(first, record, environ, num_looks=3)
        if job is not None:
            whole = dataclasses.replace(job, job_id=job.job_id.partition("_")[0])
            cancel_job(record.name, record, whole, environ)
    take_back(sweep)


def _record_job(sweep: SweepDir, job_id: str, cluster: str | None) -> None:
    """Write the number that Slurm gave into the record of the sweep, and beside those of its runs.

    A record without it is no harm: jobs are found by their tag.
    """
    record = read_sweep(sweep)
    write_sweep(sweep, dataclasses.replace(record, job_id=job_id, cluster=cluster))
    texts: dict[Path, str] = {}
    assert record.job_tag is not None
    for index, name in enumerate(sweep.run_names()):
        run = RunDir(sweep.path / name)
        if run.record.is_file():
            answer = JobAnswer(job_id=f"{job_id}_{index}", cluster=cluster)
            texts[run.job_answer(record.job_tag)] = json.dumps(dataclasses.asdict(answer)) + "\n"
    replace_files(texts)

"""The slurm launcher: submits a run as one job, and finds the job by its tag whenever sbatch's answer is in doubt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launch.environment import travelling_variables
from clusterddp.launch.plan import Plan, move_plan
from clusterddp.launch.slurm_jobs import settle
from clusterddp.run.directory import RunDir, read_json, write_json
from clusterddp.run.record import log_event, read_run, write_run
from clusterddp.slurm.identity import job_name, job_tag


def start(run: RunDir, attempt: int, environ: Mapping[str, str], *, keep_variables: bool = False) -> str:
    """Submit the job that begins with this attempt; return its number.

    The record names the job's tag before sbatch is asked, and its number afterwards; sbatch is asked once. With
    `keep_variables` the variables and secrets that an earlier submit wrote stay: a job submits its own successor.
    Raises: SlurmError: Slurm has refused the job; or `transient`: it cannot be told whether Slurm has it.
    """
    plan = _plan_from(run, attempt)
    if not keep_variables:
        write_variables(run, plan, environ)
    tag = job_tag(plan.token, attempt)
    record = dataclasses.replace(
        read_run(run), job_tag=tag, job_attempt=attempt, job_id=None, cluster=None, keeper=None
    )
    write_run(run, record)
    answer, said = _submit(run, plan, job_name(plan.name, tag), environ)
    job_id, _, cluster = answer.partition(";")
    write_run(run, dataclasses.replace(record, job_id=job_id, cluster=cluster or None))
    log_event(run, "submitted", attempt=attempt, job_id=job_id, **({"sbatch": said} if said else {}))
    return job_id


def write_variables(run: RunDir, plan: Plan, environ: Mapping[str, str]) -> None:
    """Write what goes along from this shell to the ranks; secrets lie apart, until the run has ended."""
    write_json(run.job_environment, travelling_variables(environ))
    if plan.secrets:
        write_json(run.job_secrets, {name: environ[name] for name in plan.secrets})


def _submit(run: RunDir, plan: Plan, name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Ask sbatch once; return the job's number and what sbatch said besides."""
    from clusterddp.launch.slurm_executor import JobExecutor

    assert plan.slurm is not None
    executor = JobExecutor(run.launcher_dir, plan.slurm, environ)
    try:
        return executor.submit_job(), executor.said
    except SlurmError as error:
        return _adopt(run, name, environ, error), error.message


def _adopt(run: RunDir, name: str, environ: Mapping[str, str], error: SlurmError) -> str:
    """Find the job although sbatch has failed.

    Raises: SlurmError: the one of sbatch, when the job is not there; a transient one, when that cannot be told.
    """
    job_id = None
    try:
        job_id = settle(name, environ, num_looks=4 if error.transient else 2)
    except SlurmError as silence:
        if error.transient or silence.transient:
            raise SlurmError(
                f"{run.name}: it is not known whether Slurm has taken the job: {error.message}; then {silence.message}",
                hint=f"clusterddp status {run.name} settles it as soon as Slurm answers",
                transient=True,
            ) from silence
    if job_id is None:
        raise SlurmError(f"{run.name} was not submitted: {error.message}", hint=error.hint, transient=False) from error
    log_event(run, "adopted", job_id=job_id, sbatch=error.message)
    return job_id


def _plan_from(run: RunDir, attempt: int) -> Plan:
    data = read_json(run.plan)
    if data is None:
        raise ClusterddpError(f"{run.plan}: is gone, without it the run cannot go on")
    return move_plan(Plan.from_json(data), run.path, attempt)

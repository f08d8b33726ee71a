"""Carry out a sweep: its runs, each an ordinary one, become the tasks of one Slurm job array."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.dist.environment import inherited_environment
from clusterddp.errors import ClusterddpError, SlurmError, UsageError
from clusterddp.launch.job_values import directories_used, filled_in, spec_text, with_absolute_paths
from clusterddp.launch.names import choose_run_name
from clusterddp.launch.plan import Plan, check_secrets, move_plan, plan_run
from clusterddp.launch.slurm import submit_job, variables_for
from clusterddp.launch.slurm_jobs import cancel_job, settle
from clusterddp.launch.slurm_plan import SCRIPT, SlurmPlan, sbatch_argv
from clusterddp.launch.staging import refusal
from clusterddp.launch.submit import check_trainer
from clusterddp.launch.sweep_staging import make_sweep, record_text, replace_files, take_back
from clusterddp.run.record import read_run
from clusterddp.run.sweep_dir import SweepDir, read_sweep, write_sweep
from clusterddp.slurm.arrays import check_array_size
from clusterddp.slurm.identity import job_name, job_tag

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.sweep import SweepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """A sweep, before it happens."""

    sweep: str
    token: str
    """From which the tag of the job follows."""
    path: Path
    """The directory of the sweep, in which its runs lie."""
    keys: tuple[str, ...]
    values: tuple[dict[str, Any], ...]
    """Of each run: swept key -> its value."""
    labels: tuple[str, ...]
    """Of each run: what tells it from the others."""
    throttle: int | None
    runs: tuple[Plan, ...]
    """The plan of each run; the index is the task's in the array."""
    job: SlurmPlan
    """The job array."""

    @property
    def base(self) -> Plan:
        """The first run's plan, which has everything that the runs share."""
        return self.runs[0]

    @property
    def tag(self) -> str:
        return job_tag(self.token, 0)

    @property
    def job_name(self) -> str:
        return job_name(self.base.name, self.tag)

    @property
    def command(self) -> tuple[str, ...]:
        """The argv that is submitted."""
        return (*self.job.sbatch, str(SweepDir(self.path).launcher_dir / SCRIPT), *self.job.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedSweep:
    """What a submit of a sweep gives back."""

    sweep: str
    launcher: str
    job_id: str
    path: Path
    runs: tuple[str, ...]


def plan_sweep(spec: SweepSpec, *, runs_dir: Path, working_dir: Path, environ: Mapping[str, str]) -> SweepPlan:
    """Compute everything that submitting this sweep from here would do; nothing is written or started.

    Raises: UsageError, PreflightError, ClusterddpError: it could not be carried out, with the reason.
    """
    first = spec.variants[0].resolved
    if first.job.launcher != "slurm":
        raise UsageError(
            f"a sweep is one Slurm job array, and this spec's launcher is {first.job.launcher}",
            hint="--launcher slurm; elsewhere submit the runs one by one, each with --wait",
        )
    check_array_size(len(spec.variants), environ)
    base = plan_run(first, runs_dir=runs_dir, working_dir=working_dir, environ=environ)
    return _lay_out(spec, base, sweep=base.run, runs_dir=base.runs_dir)


def submit_sweep(plan: SweepPlan) -> SubmittedSweep:
    """Carry out the plan: make the directory of the sweep, then submit its job array.

    Raises: ClusterddpError: nothing is left behind; or a transient SlurmError: it cannot be told whether Slurm has the
    job, and the sweep is there.
    """
    environ = inherited_environment()
    check_secrets(plan.base.secrets, environ)
    check_trainer(plan.base)
    while True:
        try:
            make_sweep(plan, environ, variables_for(plan.base, environ))
            break
        except FileExistsError:
            plan = _rename(plan)
    sweep = SweepDir(plan.path)
    job_id, cluster = _submit(sweep, plan, environ)
    try:
        _record_job(sweep, job_id, cluster)
    except (ClusterddpError, OSError) as error:  # the disk is full: nobody would learn of the job
        _withdraw(sweep, environ)
        raise refusal(plan.path.parent, error) if isinstance(error, OSError) else error from error
    names = tuple(run.run for run in plan.runs)
    return SubmittedSweep(sweep=plan.sweep, launcher=plan.base.launcher, job_id=job_id, path=plan.path, runs=names)


def _lay_out(spec: SweepSpec, base: Plan, *, sweep: str, runs_dir: Path) -> SweepPlan:
    """Make a plan for each variant, and one for the job array."""
    path = runs_dir / sweep
    base = move_plan(base, path / f"{sweep}.0")
    token = secrets.token_hex(16)
    runs = tuple(
        _with_values(base, variant.resolved, run=f"{sweep}.{index}", token=secrets.token_hex(16))
        for index, variant in enumerate(spec.variants)
    )
    return SweepPlan(
        sweep=sweep,
        token=token,
        path=path,
        keys=spec.keys,
        values=tuple(variant.values for variant in spec.variants),
        labels=tuple(variant.label for variant in spec.variants),
        throttle=spec.throttle,
        runs=runs,
        job=_plan_job(base, path, token=token, size=len(runs), throttle=spec.throttle),
    )


def _with_values(plan: Plan, resolved: ResolvedSpec, *, run: str, token: str) -> Plan:
    """Return the plan of another run of a sweep: the same job, with other values of train, env and entry.args."""
    job = with_absolute_paths(resolved.job, plan.working_dir)
    args = tuple(job.entry.args) if job.entry else plan.gang.entry.args
    entry = dataclasses.replace(plan.gang.entry, args=args)
    filled = filled_in(job)
    assert plan.slurm is not None
    other = dataclasses.replace(
        plan,
        token=token,
        spec=filled,
        spec_text=spec_text(job),
        gang=dataclasses.replace(plan.gang, token=token, entry=entry, env=dict(job.env)),
        changes=tuple(dataclasses.asdict(change) for change in resolved.changes()),
        slurm=dataclasses.replace(plan.slurm, mounts=directories_used(filled, plan.working_dir)),
    )
    return move_plan(other, plan.runs_dir / run)


def _plan_job(base: Plan, path: Path, *, token: str, size: int, throttle: int | None) -> SlurmPlan:
    assert base.slurm is not None
    tag = job_tag(token, 0)
    python, _, *paths = base.slurm.arguments
    indices = f"0-{size - 1}" + (f"%{throttle}" if throttle else "")
    return dataclasses.replace(
        base.slurm,
        arguments=(python, str(SweepDir(path).tasks), *paths),
        sbatch=sbatch_argv(
            {"array": indices, **base.slurm.sbatch_options},
            name=job_name(base.name, tag),
            comment=f"clusterddp {path.name} {tag}",
            directory=path,
            log=f"{path.name}.%a/launcher/job.log",
        ),
    )


def _rename(plan: SweepPlan) -> SweepPlan:
    """Return the same sweep under a fresh name, for the name of this one was taken meanwhile."""
    sweep = choose_run_name(plan.path.parent)
    path = plan.path.parent / sweep
    runs = tuple(move_plan(run, path / f"{sweep}.{index}") for index, run in enumerate(plan.runs))
    job = _plan_job(runs[0], path, token=plan.token, size=len(runs), throttle=plan.throttle)
    return dataclasses.replace(plan, sweep=sweep, path=path, runs=runs, job=job)


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
    """Write the number that Slurm gave into the records of the sweep and of its runs.

    A record without it is no harm: jobs are found by their tag.
    """
    record = read_sweep(sweep)
    write_sweep(sweep, dataclasses.replace(record, job_id=job_id, cluster=cluster))
    texts: dict[Path, str] = {}
    for run in sweep.runs():
        known = read_run(run)
        # A task that has started, failed and asked for a job of its own has the newer record.
        if known.job_tag == record.job_tag and known.job_id is None:
            task = f"{job_id}_{known.array_index}"
            texts[run.record] = record_text(dataclasses.replace(known, job_id=task, cluster=cluster))
    replace_files(texts)

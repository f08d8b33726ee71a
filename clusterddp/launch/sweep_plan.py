"""The plan of a sweep: a plan for each of its runs, and one for the job array that carries them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import UsageError
from clusterddp.launch.job_values import directories_used, filled_in, spec_text, with_absolute_paths
from clusterddp.launch.names import choose_run_name
from clusterddp.launch.plan import Plan, move_plan, plan_run
from clusterddp.launch.slurm_plan import SCRIPT, SlurmPlan, sbatch_argv
from clusterddp.run.sweep_dir import SweepDir
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


def rename_sweep(plan: SweepPlan) -> SweepPlan:
    """Return the same sweep under a fresh name, for the name of this one was taken meanwhile."""
    sweep = choose_run_name(plan.path.parent)
    path = plan.path.parent / sweep
    runs = tuple(move_plan(run, path / f"{sweep}.{index}") for index, run in enumerate(plan.runs))
    job = _plan_job(runs[0], path, token=plan.token, size=len(runs), throttle=plan.throttle)
    return dataclasses.replace(plan, sweep=sweep, path=path, runs=runs, job=job)


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
    entry = plan.gang.entry
    if job.entry:
        entry = dataclasses.replace(entry, args=tuple(job.entry.args), kwargs=dict(job.entry.kwargs))
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

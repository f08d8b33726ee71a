"""The plan of a sweep: a plan for each of its runs, and one for the job array; without Slurm a queue starts them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import UsageError
from clusterddp.planning.command_lines import queue_command
from clusterddp.planning.job_values import directories_used, filled_in, spec_text, with_absolute_paths
from clusterddp.planning.names import choose_run_name
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_run
from clusterddp.planning.slurm.job import SCRIPT, SlurmPlan, sbatch_argv
from clusterddp.run.code import is_too_much
from clusterddp.run.sweep import SweepDir
from clusterddp.slurm.cluster import check_array_size
from clusterddp.slurm.identity import job_name, job_tag

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.sweep import SweepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """Everything that the submit of a sweep will do."""

    sweep: str
    token: str
    """The job's tag is computed from it."""
    path: Path
    """The directory of the sweep, which contains its runs."""
    keys: tuple[str, ...]
    values: tuple[dict[str, Any], ...]
    """For each run: swept key -> its value."""
    labels: tuple[str, ...]
    """For each run: its values for people, `lr=0.1 seed=0`."""
    throttle: int | None
    runs: tuple[Plan, ...]
    """The plan of each run; its index is that of its task in the array."""
    job: SlurmPlan | None
    """The job array; None: a queue starts the runs."""

    @property
    def base(self) -> Plan:
        """The first run's plan, for everything that the runs share."""
        return self.runs[0]

    @property
    def shares_code(self) -> bool:
        """Whether the runs work in one copy of the code, since a copy for each would be too many files."""
        snapshot = self.base.snapshot if self.base.has_own_code else None
        return snapshot is not None and is_too_much(len(self.runs) * snapshot["files"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user before the submit."""
        many, notes = len(self.runs), list(self.base.notes)
        if self.shares_code:
            notes.append(f"the {many} runs share one copy of the code, and what they write beside their script")
        if (self.base.spec.get("entry") or {}).get("output_dir"):
            notes.append(f"entry.output_dir: the {many} runs share {{output_dir}}; without this key each has its own")
        return tuple(notes)

    @property
    def width(self) -> int | None:
        """How many runs may run at a time; None: as many as Slurm starts, or as there are GPUs for."""
        return self.throttle if self.job else queue_width(self.base, self.throttle)

    @property
    def tag(self) -> str | None:
        """The tag in the name of the job array."""
        return job_tag(self.token, 0) if self.job else None

    @property
    def command(self) -> tuple[str, ...]:
        """The argv of sbatch, or of the queue."""
        if self.job is None:
            return queue_command(self.path)
        return (*self.job.sbatch, str(SweepDir(self.path).launcher_dir / SCRIPT), *self.job.arguments)


def plan_sweep(
    spec: SweepSpec, *, runs_dir: Path, working_dir: Path, environ: Mapping[str, str], name: str | None = None
) -> SweepPlan:
    """Compute everything that a submit of this sweep from here would do; nothing is written or started.

    `name` None: a free name is chosen.
    Raises: UsageError, PreflightError, ClusterddpError: the submit would fail, with the reason.
    """
    if spec.variants[0].resolved.job.launcher == "slurm":
        check_array_size(len(spec.variants), environ)

    request = Request(runs_dir=runs_dir, working_dir=working_dir, environ=environ, queued=True, run=name)

    def plan_one(resolved: ResolvedSpec) -> Plan:
        return _beside_others(plan_run(resolved, request), spec.throttle)

    return _lay_out(spec, plan_one)


def queue_width(plan: Plan, throttle: int | None) -> int | None:
    """Return how many runs like this one a queue keeps running at a time; None: as many as there are GPUs for."""
    needs_gpus = any(node.gpus for node in (plan.ssh.hosts if plan.ssh else plan.gang.nodes))
    return throttle or (None if needs_gpus else 1)


def rename_sweep(plan: SweepPlan) -> SweepPlan:
    """Return the same sweep under a new name; another run or sweep has taken this one's."""
    sweep = choose_run_name(plan.path.parent)
    path = plan.path.parent / sweep
    runs = tuple(move_plan(run, path / f"{sweep}.{index}") for index, run in enumerate(plan.runs))
    job = plan.job and _plan_job(runs[0], path, token=plan.token, size=len(runs), throttle=plan.throttle)
    return dataclasses.replace(plan, sweep=sweep, path=path, runs=runs, job=job)


def _lay_out(spec: SweepSpec, plan_one: Callable[[ResolvedSpec], Plan]) -> SweepPlan:
    """Make a plan for each variant, and one for the job array.

    Variants with the same program and network share one planning, so a thousand values take little longer than one.
    """
    planned: dict[str, Plan] = {}
    runs: list[Plan] = []
    for index, variant in enumerate(spec.variants):
        kind = _kind(variant.resolved.job)
        if kind not in planned:
            planned[kind] = plan_one(variant.resolved)
            _check_code(planned[kind], next(iter(planned.values())), variant.label)
        base = next(iter(planned.values()))
        run_dir = base.runs_dir / base.run / f"{base.run}.{index}"
        runs.append(_with_values(planned[kind], variant.resolved, run_dir=run_dir, token=secrets.token_hex(16)))
    path, token = runs[0].runs_dir, secrets.token_hex(16)
    return SweepPlan(
        sweep=path.name,
        token=token,
        path=path,
        keys=spec.keys,
        values=tuple(variant.values for variant in spec.variants),
        labels=tuple(variant.label for variant in spec.variants),
        throttle=spec.throttle,
        runs=tuple(runs),
        job=_plan_job(runs[0], path, token=token, size=len(runs), throttle=spec.throttle) if runs[0].slurm else None,
    )


def _kind(job: JobSpec) -> str:
    """Return a text that is the same for variants that can share one planning."""
    entry = job.entry.model_copy(update={"args": ()}).model_dump_json() if job.entry else ""
    return f"{entry} {job.network.model_dump_json()}"


def _check_code(plan: Plan, first: Plan, label: str) -> None:
    """Check that one snapshot of the code contains all programs of a sweep.

    Raises: UsageError: it does not.
    """
    if plan.snapshot != first.snapshot:
        kept = first.snapshot["root"] if first.snapshot else "none"
        raise UsageError(
            f"{label}: its code is not in the snapshot that the runs of a sweep share (of {kept})",
            hint="keep the programs in one git repository, or set snapshot=false",
        )


def _beside_others(plan: Plan, throttle: int | None) -> Plan:
    """Share the cores of this machine among the runs that a queue runs at a time."""
    width = 1 if plan.launcher != "local" else queue_width(plan, throttle) or 1
    if width == 1 or plan.spec["resources"]["cpus_per_task"] is not None:
        return plan
    threads = max(1, plan.gang.threads_per_rank // width)
    return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, threads_per_rank=threads))


def _with_values(plan: Plan, resolved: ResolvedSpec, *, run_dir: Path, token: str) -> Plan:
    """Return the plan of another run of a sweep: the same job, with other values of train, env and entry.args."""
    job = with_absolute_paths(resolved.job, plan.working_dir)
    entry = plan.gang.entry
    if job.entry:
        entry = dataclasses.replace(entry, args=tuple(job.entry.args), kwargs=dict(job.entry.kwargs))
    filled = filled_in(job)
    gang = dataclasses.replace(plan.gang, token=token, entry=entry, env=dict(job.env))
    mounts = (*directories_used(filled, plan.working_dir), *plan.linked_places)
    slurm = plan.slurm and dataclasses.replace(plan.slurm, mounts=mounts)
    other = dataclasses.replace(
        plan,
        token=token,
        spec=filled,
        spec_text=spec_text(job),
        gang=gang,
        changes=tuple(dataclasses.asdict(change) for change in resolved.changes()),
        slurm=slurm,
    )
    return move_plan(other, run_dir)


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

"""The plan of a sweep and its directory: a plan for each of its runs, and one for the job array.

Up to a thousand runs are written in a staging directory, synced once and renamed once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.places.slurm.cluster import check_array_size
from clusterddp.places.staging import put_in_place, staged
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_json
from clusterddp.planning.processes import queue_command
from clusterddp.planning.program import choose_snapshot, directories_used, filled_in, with_absolute_paths
from clusterddp.planning.slurm import SlurmPlan, sbatch_argv, script_sbatch_argv
from clusterddp.run.code import CodeCopy, is_too_much, link_or_copy, plan_copy, replace_link, store_of, write_snapshot
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import is_call
from clusterddp.run.job_tag import job_comment, job_name, job_tag
from clusterddp.run.record import ProcessIdentity, RunRecord
from clusterddp.run.surroundings import capture_surroundings
from clusterddp.run.sweep import SweepDir, SweepRecord, task_of, write_sweep
from clusterddp.spec.batch_script import options_of, read_array
from clusterddp.submission.submit import plan_ahead
from clusterddp.system.files import write_bytes, write_json, write_text
from clusterddp.system.own_directory import demand_own
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.run.code import SnapshotPlan
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.sweep import SweepSpec, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """Everything that the submit of a sweep will do."""

    sweep: str
    token: str = dataclasses.field(repr=False)
    """The job's tag is computed from it."""
    path: Path
    """The directory of the sweep, which contains its runs."""
    keys: tuple[str, ...]
    variants: tuple[Variant, ...]
    """For each run: the values of the swept keys."""
    throttle: int | None
    runs: tuple[Plan, ...]
    """The plan of each run; its index is that of its task in the array."""
    job: SlurmPlan | None
    """The job array; None: a queue starts the runs."""

    def __repr__(self) -> str:
        return f"<SweepPlan of {self.base.name}: {format_count(len(self.runs), 'run')}, sweep {self.sweep}>"

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
        return (*self.job.sbatch, str(SweepDir(self.path).launcher_dir / self.job.file), *self.job.arguments)


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

    def plan_one(variant: Variant) -> Plan:
        its_own = dataclasses.replace(request, submission=variant.submission)
        return _beside_others(plan_ahead(variant.resolved, its_own), spec.throttle)

    return _lay_out(spec, plan_one)


def plan_array(plan: Plan, resolved: ResolvedSpec, environ: Mapping[str, str]) -> SweepPlan | None:
    """Return the runs of a batch script's job array, each with the number of its task; None: it is one job.

    Raises: UsageError: sbatch would refuse the array, or it has too many tasks.
    """
    from clusterddp.spec.sweep import Variant

    from_line = plan.spec["slurm"].get("array") or environ.get("SBATCH_ARRAY_INX")
    text = from_line or options_of(plan.submission or b"").value("array")
    if not text:
        return None
    tasks, throttle = read_array(str(text))
    path, token, job = plan.runs_dir / plan.run, secrets.token_hex(16), plan.slurm
    if job:  # its own line, or the command line, has the tasks
        argv = script_sbatch_argv(job.sbatch_options, job_comment(path.name, job_tag(token, 0)))
        job = dataclasses.replace(job, arguments=(str(SweepDir(path).tasks), *job.arguments[1:]), sbatch=argv)
    return SweepPlan(
        sweep=plan.run,
        token=token,
        path=path,
        keys=("task",),
        variants=tuple(Variant(values={"task": task}, resolved=resolved) for task in tasks),
        throttle=throttle,
        runs=tuple(_plan_task(plan, resolved, path, task) for task in tasks),
        job=job,
    )


def _plan_task(plan: Plan, resolved: ResolvedSpec, path: Path, task: int) -> Plan:
    """Return the plan of one task, which starts as an array of its own when it is resumed."""
    from clusterddp.spec.yamlfile import resolved_yaml

    job = with_absolute_paths(resolved.job, plan.working_dir)
    job = job.model_copy(update={"slurm": job.slurm | {"array": str(task)}})
    token = secrets.token_hex(16)
    slurm = plan.slurm and dataclasses.replace(
        plan.slurm, sbatch_options=plan.slurm.sbatch_options | {"array": str(task)}
    )
    gang = dataclasses.replace(plan.gang, token=token)
    own = dataclasses.replace(
        plan, token=token, gang=gang, slurm=slurm, spec=filled_in(job), spec_text=resolved_yaml(job)
    )
    return move_plan(own, path / f"{plan.run}.{task}")


def queue_width(plan: Plan, throttle: int | None) -> int | None:
    """Return how many runs like this one a queue keeps running at a time; None: as many as there are GPUs for."""
    needs_gpus = any(node.gpus for node in (plan.ssh.hosts if plan.ssh else plan.gang.nodes))
    return throttle or (None if needs_gpus else 1)


def _lay_out(spec: SweepSpec, plan_one: Callable[[Variant], Plan]) -> SweepPlan:
    """Make a plan for each variant, and one for the job array.

    Variants with the same program and network share one planning, so a thousand values take little longer than one.
    """
    planned: dict[str, Plan] = {}
    runs: list[Plan] = []
    for index, variant in enumerate(spec.variants):
        kind = _kind(variant.resolved.job)
        if kind not in planned:
            planned[kind] = plan_one(variant)
        base = next(iter(planned.values()))
        if planned[kind].snapshot != base.snapshot:
            kept = base.snapshot["root"] if base.snapshot else "none"
            raise UsageError(
                f"{variant.label}: its code is not in the snapshot that the runs of a sweep share (of {kept})",
                hint="keep the programs in one git repository, or set snapshot=false",
            )
        run_dir = base.runs_dir / base.run / f"{base.run}.{index}"
        runs.append(_with_values(planned[kind], variant, run_dir=run_dir, token=secrets.token_hex(16)))
    path, token = runs[0].runs_dir, secrets.token_hex(16)
    return SweepPlan(
        sweep=path.name,
        token=token,
        path=path,
        keys=spec.keys,
        variants=spec.variants,
        throttle=spec.throttle,
        runs=tuple(runs),
        job=_plan_job(runs[0], path, token=token, size=len(runs), throttle=spec.throttle) if runs[0].slurm else None,
    )


def _kind(job: JobSpec) -> str:
    """Return a text that is the same for variants that can share one planning."""
    function = (job.entry and job.entry.function) or ""
    called = {"function": function.partition("(")[0] if is_call(function) else function or None}
    entry = job.entry.model_copy(update={"args": (), **called}).model_dump_json() if job.entry else ""
    return f"{entry} {job.network.model_dump_json()}"


def _beside_others(plan: Plan, throttle: int | None) -> Plan:
    """Share the cores of this machine among the runs that a queue runs at a time."""
    width = 1 if plan.launcher != "local" else queue_width(plan, throttle) or 1
    if width == 1 or plan.spec["resources"]["cpus_per_task"] is not None:
        return plan
    threads = max(1, (plan.gang.threads_per_rank or 1) // width)
    return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, threads_per_rank=threads))


def _with_values(plan: Plan, variant: Variant, *, run_dir: Path, token: str) -> Plan:
    """Return the plan of another run of a sweep: the same job, with other values of train, env and entry.args.

    Of a function from Python: the same function with other arguments.
    """
    from clusterddp.spec.yamlfile import resolved_yaml

    resolved = variant.resolved
    job = with_absolute_paths(resolved.job, plan.working_dir)
    entry = plan.gang.entry
    if job.entry:
        entry = dataclasses.replace(entry, args=tuple(job.entry.args), kwargs=dict(job.entry.kwargs))
    if job.entry and job.entry.function and entry.is_call:  # the place of its file is that in the run's code
        call = plan.spec["entry"]["function"].partition(":")[2]
        target = entry.target.removesuffix(call) + job.entry.function.partition(":")[2]
        entry = dataclasses.replace(entry, target=target)
    filled = filled_in(job)
    gang = dataclasses.replace(plan.gang, token=token, entry=entry, env=dict(job.env))
    mounts = (*directories_used(filled, plan.working_dir), *plan.linked_places)
    slurm = plan.slurm and dataclasses.replace(plan.slurm, mounts=mounts)
    other = dataclasses.replace(
        plan,
        token=token,
        spec=filled,
        spec_text=resolved_yaml(job),
        gang=gang,
        changes=resolved.changes(),
        slurm=slurm,
        submission=variant.submission or plan.submission,
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
            {"array": indices, **base.slurm.submit_options},
            name=job_name(base.name, tag),
            comment=job_comment(path.name, tag),
            directory=path,
            log=f"{path.name}.%a/launcher/job.log",
        ),
    )


def make_sweep(plan: SweepPlan, environ: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Write the directory of a sweep with all its runs; `variables`: passed on to their ranks.

    Raises: FileExistsError: the name has been taken meanwhile. ClusterddpError: the directory cannot be made (full,
    read-only). In both cases nothing is left behind.
    """
    demand_own(plan.path.parent)
    with staged(plan.path.parent) as staging:
        _fill(SweepDir(staging), plan, environ, variables)
        sync_file_system(staging)
        is_placed = put_in_place(staging, plan.path)
    if not is_placed:
        raise FileExistsError(plan.path)


def sync_file_system(path: Path) -> None:
    """Make everything that was written to the file system of `path` survive a power loss, in one call.

    Raises: OSError: the file system could not write all of it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs"):
            os.sync()
        elif libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def _fill(sweep: SweepDir, plan: SweepPlan, environ: Mapping[str, str], variables: Mapping[str, str]) -> None:
    record = SweepRecord(
        sweep=plan.sweep,
        token=plan.token,
        name=plan.base.name,
        launcher=plan.base.launcher,
        created_ns=time.time_ns(),
        keys=plan.keys,
        size=len(plan.runs),
        throttle=plan.throttle,
        job_tag=plan.tag,
        submitter=dataclasses.asdict(ProcessIdentity.of()),
    )
    write_sweep(sweep, record)  # first: other submits read from it whether this process lives
    sweep.launcher_dir.mkdir(mode=0o700)
    surroundings = capture_surroundings(plan.base.working_dir, environ, plan.base.gang.python)
    copy = None
    if plan.base.snapshot is not None:
        chosen = choose_snapshot(plan.base.snapshot, runs_dir=plan.path.parent, environ=environ)
        digest = write_snapshot(chosen, store_of(plan.path.parent), sweep.code)
        copy = _plan_copies(sweep, plan, chosen)
        surroundings["code"] = {"sha256": digest, "files": len(chosen.files), "bytes": chosen.total_bytes}
    write_json(sweep.environment, surroundings)
    hidden: dict[str, str] = {}
    if plan.base.gang.entry.kind == "batch_script":
        write_bytes(RunDir(sweep.path).batch_script, plan.base.submission or b"")
    if plan.job and plan.job.directory is None:
        write_json(sweep.job_environment, dict(variables))
        hidden = {name: environ[name] for name in plan.base.secrets}
    for index, run in enumerate(plan.runs):
        of_run = RunRecord(
            run=run.run,
            token=run.token,
            name=record.name,
            launcher=record.launcher,
            # One nanosecond apart, so the runs are listed in the order of their tasks.
            created_ns=record.created_ns + index,
            submitter=record.submitter,
            job_tag=plan.tag,
            array_index=task_of(run.run) if plan.job else None,
            job_directory=plan.job.job_directory if plan.job else None,
            variant=plan.variants[index].label,
            queued=plan.job is None,
        )
        _fill_run(sweep, run, of_run, hidden, copy)
    write_text(sweep.tasks, "".join(f"{run.run}\n" for run in plan.runs))


def _plan_copies(sweep: SweepDir, plan: SweepPlan, snapshot: SnapshotPlan) -> CodeCopy | None:
    """Plan the copy of the code that each run gets; None: the runs share the sweep's code."""
    if not plan.base.has_own_code:
        return None
    if plan.shares_code:
        replace_link(sweep.code, snapshot)
        return None
    return plan_copy(sweep.code.resolve(), snapshot)


def _fill_run(sweep: SweepDir, plan: Plan, record: RunRecord, hidden: Mapping[str, str], copy: CodeCopy | None) -> None:
    """Write one run as `submission.staging.make_run` does, without syncs, and with hard links to the shared files."""
    run = RunDir(sweep.path / plan.run)
    attempt = run.attempt(0)
    for directory in (run.path, run.checkpoints, run.tensorboard, run.launcher_dir, attempt.path.parent, attempt.path):
        directory.mkdir(mode=0o700)
    for directory in (attempt.ranks, attempt.logs):
        directory.mkdir(mode=0o700)
    # On one line, which Python writes faster.
    texts = {run.record: json.dumps(dataclasses.asdict(record)), run.plan: json.dumps(plan_json(plan))}
    texts |= {run.spec: plan.spec_text} | ({run.job_secrets: json.dumps(hidden)} if hidden else {})
    for path, text in texts.items():
        write_bytes(path, text.encode(), durable=False)
    if plan.gang.entry.is_call:
        write_bytes(run.submission, plan.submission or b"", durable=False)
    link_or_copy(str(sweep.environment), str(run.environment))
    if plan.gang.entry.kind == "batch_script":
        link_or_copy(str(RunDir(sweep.path).batch_script), str(run.batch_script))
    elif plan.slurm:
        link_or_copy(str(sweep.job_environment), str(run.job_environment))
    if copy is not None:
        copy.write(run.code)
        run.snapshot.symlink_to(Path("..", sweep.code.readlink()))
    elif plan.has_own_code:
        run.code.symlink_to(Path("..", sweep.code.name))
        run.snapshot.symlink_to(Path("..", RunDir(sweep.path).snapshot.readlink()))
    elif plan.snapshot is not None:
        run.code.symlink_to(Path("..", sweep.code.readlink()))

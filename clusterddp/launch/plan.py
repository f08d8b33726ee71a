"""The plan: everything that a submit would do, as a value that is printed, carried out, and asserted by tests."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import UsageError
from clusterddp.launch.command_lines import launcher_command, rank_command, supervisor_command
from clusterddp.launch.entry import entry_of, plan_program
from clusterddp.launch.job_values import directories_used, filled_in, spec_text, with_absolute_paths
from clusterddp.launch.names import choose_run_name
from clusterddp.launch.placement import Placement, plan_placement, plan_slurm_placement, read_machine
from clusterddp.launch.slurm_after import find_dependency
from clusterddp.launch.slurm_options import choose_options
from clusterddp.launch.slurm_plan import SCRIPT, SlurmPlan, place_slurm, plan_slurm
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.storage import check_shared

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

MASTER_ADDR = "127.0.0.1"
_UNSUPPORTED_BY_SUBMITIT = ("%j", "%t", "%A", "%a")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One submit, before it happens."""

    run: str
    token: str
    name: str
    launcher: str
    runs_dir: Path
    working_dir: Path
    spec: dict[str, Any]
    """The spec as resolved, every default filled in."""
    spec_text: str
    """The spec as YAML; reading it gives the same spec again."""
    gang: Gang
    rank0: dict[str, dict[str, str]]
    """The variables of rank 0: name -> {value, origin}."""
    changes: tuple[dict[str, Any], ...]
    """What is no default: {key, value, default, origin}."""
    notes: tuple[str, ...]
    """What people should know before they submit this."""
    snapshot: dict[str, Any] | None
    """Which code is kept: {source, root, files, bytes}; `source` is `git`, or the path of a script outside of git."""
    secrets: tuple[str, ...]
    """Names of variables that must be set when the run starts; their values are nowhere in the run."""
    parent: str | None
    """The run that this one repeats."""
    files: tuple[str, ...]
    """What the submit writes."""
    commands: tuple[tuple[str, ...], ...]
    """What is started, in this order, as argv: the launcher, each node's supervisor, and what each rank runs."""
    slurm: SlurmPlan | None = None
    """The job, for the slurm launcher."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.run

    def to_json(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {
            "runs_dir": str(self.runs_dir),
            "working_dir": str(self.working_dir),
            "gang": self.gang.to_json(),
            "slurm": self.slurm.to_json() if self.slurm else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan from what `to_json` gave; keys that a newer version wrote are dropped."""
        known: dict[str, Any] = {field.name: data.get(field.name) for field in dataclasses.fields(cls)}
        return cls(
            **known
            | {
                "runs_dir": Path(data["runs_dir"]),
                "working_dir": Path(data["working_dir"]),
                "gang": Gang.from_json(data["gang"]),
                "changes": tuple(data["changes"]),
                "notes": tuple(data["notes"]),
                "secrets": tuple(data["secrets"]),
                "files": tuple(data["files"]),
                "commands": tuple(tuple(command) for command in data["commands"]),
                "slurm": SlurmPlan.from_json(data["slurm"]) if data.get("slurm") else None,
            }
        )


def plan_run(
    resolved: ResolvedSpec, *, runs_dir: Path, working_dir: Path, environ: Mapping[str, str], parent: str | None = None
) -> Plan:
    """Compute everything that submitting this spec from here would do; nothing is written or started.

    Raises: UsageError, PreflightError, ClusterddpError: it could not be carried out, with the reason.
    """
    runs_dir, working_dir = runs_dir.absolute(), working_dir.absolute()
    job = with_absolute_paths(resolved.job, working_dir)
    _refuse_what_cannot_be(job, runs_dir, environ)
    placement, slurm = _place(job, runs_dir=runs_dir, working_dir=working_dir, environ=environ)
    program = plan_program(job, working_dir=working_dir, runs_dir=runs_dir, environ=environ)
    run, token = choose_run_name(runs_dir), secrets.token_hex(16)
    time_limit_s = float(job.resources.time.seconds) if job.resources.time else None
    gang = Gang(
        run=run,
        token=token,
        nodes=placement.nodes,
        entry=entry_of(program, run_dir=runs_dir / run, working_dir=working_dir),
        threads_per_rank=placement.threads_per_rank,
        backend=placement.backend,
        # On Slurm the nodes find both when they start; the allocation's end is the limit then.
        master_addr="" if slurm else MASTER_ADDR,
        master_port=None if job.network.master_port == "auto" else job.network.master_port,
        interface=placement.interface,
        env=dict(job.env),
        restarts=job.restarts,
        time_limit_s=None if slurm else time_limit_s,
        stop_lead_s=min(120.0, time_limit_s / 3) if time_limit_s else 60.0,
    )
    return move_plan(
        Plan(
            run=run,
            token=token,
            name=job.name,
            launcher=job.launcher,
            runs_dir=runs_dir,
            working_dir=working_dir,
            spec=filled_in(job),
            spec_text=spec_text(job),
            gang=gang,
            rank0={},
            changes=tuple(dataclasses.asdict(change) for change in resolved.changes()),
            notes=(*placement.notes, *program.notes),
            snapshot=program.snapshot_summary,
            secrets=tuple(job.secrets),
            parent=parent,
            files=(),
            commands=(),
            slurm=slurm,
        ),
        runs_dir / run,
    )


def rename_plan(plan: Plan) -> Plan:
    """Return the same plan under a fresh name, for the name of this one was taken meanwhile."""
    return move_plan(plan, plan.runs_dir / choose_run_name(plan.runs_dir))


def move_plan(plan: Plan, run_dir: Path, attempt: int = 0) -> Plan:
    """Return the same plan for another run directory: fill in everything that follows from where it is.

    `attempt` is the one that a job on Slurm begins with.
    """

    def moved(path: str) -> str:
        inside = Path(path).is_relative_to(plan.run_dir)
        return str(run_dir / Path(path).relative_to(plan.run_dir)) if inside else path

    old = plan.gang.entry
    entry = dataclasses.replace(
        old,
        target=moved(old.target),
        working_dir=moved(old.working_dir),
        import_paths=tuple(moved(path) for path in old.import_paths),
    )
    gang = dataclasses.replace(plan.gang, run=run_dir.name, entry=entry)
    slurm = plan.slurm and place_slurm(plan.slurm, name=plan.name, token=plan.token, run_dir=run_dir, attempt=attempt)
    return dataclasses.replace(
        plan,
        run=run_dir.name,
        runs_dir=run_dir.parent,
        gang=gang,
        slurm=slurm,
        rank0=_rank0_variables(gang, run_dir, slurm),
        files=_files(RunDir(run_dir), with_code=plan.snapshot is not None, with_job=slurm is not None),
        commands=_commands(gang, run_dir, slurm),
    )


def check_secrets(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raise a UsageError unless every secret is set where the run is started from."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"secrets: {', '.join(missing)} not set in this environment",
            hint=f"export {missing[0]}=..., then submit; only the name is stored in the run",
        )


def _place(
    job: JobSpec, *, runs_dir: Path, working_dir: Path, environ: Mapping[str, str]
) -> tuple[Placement, SlurmPlan | None]:
    """Lay the ranks out where the launcher will start them."""
    if job.launcher != "slurm":
        placement = plan_placement(job, read_machine(environ))
        if job.resources.memory_gb:
            note = "resources.memory_gb is not enforced on this machine"
            placement = dataclasses.replace(placement, notes=(*placement.notes, note))
        return placement, None
    dependency, waiting = find_dependency(job.after, runs_dir)
    options = choose_options(job, environ, dependency)
    placement = plan_slurm_placement(job, gpus=options.gpus)
    shared = check_shared(runs_dir, "runs", "--runs DIR or CLUSTERDDP_RUNS names a directory that all nodes share")
    if job.entry:
        check_shared(working_dir, "what ranks work in", "submit from a directory that all nodes share")
    notes = (*placement.notes, *options.notes, *waiting, *shared)
    slurm = plan_slurm(
        options,
        container=job.container.model_dump(mode="json") | {"gpus": options.gpus} if job.container else None,
        mounts=directories_used(filled_in(job), working_dir),
        environ=environ,
    )
    return dataclasses.replace(placement, notes=notes), slurm


def _rank0_variables(gang: Gang, run_dir: Path, slurm: SlurmPlan | None) -> dict[str, dict[str, str]]:
    port = gang.master_port or "a free port, chosen at the start"
    if slurm:
        gang = dataclasses.replace(gang, master_addr="the first node's address, found at the start")
    variables = gang.variables_of(0, run_dir=str(run_dir), attempt=0, master_port=port)
    shown = {name: {"value": variable.value, "origin": variable.origin} for name, variable in variables.items()}
    if slurm and gang.backend == "nccl" and "CUDA_VISIBLE_DEVICES" not in gang.env:
        shown["CUDA_VISIBLE_DEVICES"] = {"value": "the GPUs that Slurm gives", "origin": "Slurm"}
    return shown


def _files(run: RunDir, *, with_code: bool, with_job: bool) -> tuple[str, ...]:
    attempt = run.attempt(0)
    paths = [run.spec, run.plan, run.record, run.environment, *([run.code] if with_code else [])]
    paths += [attempt.path, run.checkpoints, run.tensorboard, run.launcher_dir]
    if with_job:
        paths += [run.launcher_dir / SCRIPT, run.job_environment, run.job_secrets]
    return tuple(str(path) for path in paths)


def _commands(gang: Gang, run_dir: Path, slurm: SlurmPlan | None) -> tuple[tuple[str, ...], ...]:
    supervisors = [supervisor_command() for _ in gang.nodes]
    rank = rank_command(run_dir)
    if slurm:
        script = str(RunDir(run_dir).launcher_dir / SCRIPT)
        return ((*slurm.sbatch, script, *slurm.arguments), (*slurm.srun, "0"), *supervisors, rank)
    return (launcher_command(run_dir, 0), *supervisors, rank)


def _refuse_what_cannot_be(job: JobSpec, runs_dir: Path, environ: Mapping[str, str]) -> None:
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; this is about one", hint="~sweep drops the section")
    if job.launcher == "ssh":
        raise UsageError("launcher ssh: not built yet", hint="--launcher local runs it on this machine")
    check_secrets(tuple(job.secrets), environ)
    if job.launcher == "slurm":
        _refuse_odd_path(runs_dir)
    tags = [tag for tag in _UNSUPPORTED_BY_SUBMITIT if tag in str(runs_dir)]
    if tags:
        raise UsageError(f"{runs_dir}: submitit, which starts the run, takes {tags[0]} in a path for a job's number")


def _refuse_odd_path(runs_dir: Path) -> None:
    """Refuse a path that Slurm would not take as it is written."""
    reasons = {
        "%": "Slurm puts a job's numbers in place of % in the path of its log",
        "\\": "Slurm drops it from paths",
    }
    for char in str(runs_dir):
        reason = reasons.get(char) or ("" if char.isprintable() else "Slurm's records have one line for a path")
        if reason:
            raise UsageError(
                f"{str(runs_dir)!r}: has {char!r}; {reason}",
                hint="--runs DIR or CLUSTERDDP_RUNS takes another directory",
            )

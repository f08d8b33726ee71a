"""The plan: everything that a submit would do, as a value that is printed, executed, and asserted by tests."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.planning import local
from clusterddp.planning.details import commands_started, files_written, rank0_variables
from clusterddp.planning.entry import move_entry, plan_entry, plan_trial_entry
from clusterddp.planning.job_values import (
    changes_of,
    filled_in,
    notify_of,
    spec_text,
    timeouts_of,
    with_absolute_paths,
)
from clusterddp.planning.names import choose_run_name
from clusterddp.planning.outputs import notes_on_outputs
from clusterddp.planning.placement import Placed, Placement, Request, with_one_process_each
from clusterddp.planning.prerequisites import refuse_unplannable, secret_notes
from clusterddp.planning.program import Program, plan_program
from clusterddp.planning.seal import hint, is_granted, sealed
from clusterddp.planning.slurm import place as slurm_place
from clusterddp.planning.slurm.job import SlurmPlan, place_slurm
from clusterddp.planning.ssh import plan as ssh_plan
from clusterddp.planning.ssh.plan import SshPlan, at_home, directory_name, place_ssh, spec_at_home
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang
from clusterddp.system.files import read_json
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

MASTER_ADDR = "127.0.0.1"
_PLACE = {"local": local.place, "slurm": slurm_place.place, "ssh": ssh_plan.place}
"""The functions that place the ranks, by launcher."""


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
    """The resolved spec with every default filled in."""
    spec_text: str
    """The spec as YAML; reading it gives the same spec again."""
    gang: Gang
    rank0: dict[str, dict[str, str]]
    """The variables of rank 0: name -> {value, origin}."""
    changes: tuple[dict[str, Any], ...]
    """The values that differ from their defaults: {key, value, default, origin}."""
    notes: tuple[str, ...]
    """Notes for the user before the submit."""
    snapshot: dict[str, Any] | None
    """The copied code: {source, root, files, bytes, ignored, left_out}; `source` is `git`, or the path of a script.

    `ignored`: what git ignores, to which the run gets links. `left_out`: files beside a script that are too many."""
    secrets: tuple[str, ...]
    """Names of variables that must be set when the run starts; the plan holds no values of them."""
    parent: str | None
    """The run that this one repeats."""
    files: tuple[str, ...]
    """Paths that the submit writes."""
    commands: tuple[tuple[str, ...], ...]
    """The argv of all processes, in the order of their start: the launcher, each node's supervisor, each rank."""
    slurm: SlurmPlan | None = None
    """The job, for the slurm launcher."""
    ssh: SshPlan | None = None
    """The hosts, for the ssh launcher."""

    @property
    def run_dir(self) -> Path:
        on_host = self.ssh is not None and self.ssh.home is not None
        return self.runs_dir / (directory_name(self.run, self.token) if on_host else self.run)

    @property
    def dir_on_hosts(self) -> str:
        """The run's directory where its ranks are: from / or ~/, the same on every host."""
        if self.ssh is None or self.ssh.home is not None:
            return str(self.run_dir)
        return f"{self.ssh.root}/runs/{directory_name(self.run, self.token)}"

    @property
    def elsewhere(self) -> bool:
        """Whether this machine cannot check the ranks' environment: they run on hosts over SSH or in a container."""
        return self.ssh is not None or (self.slurm is not None and self.slurm.container is not None)

    @property
    def has_own_code(self) -> bool:
        """Whether the run's directory has a copy of the code, in which ranks that see this file system execute it."""
        return self.snapshot is not None and self.ssh is None and bool(self.spec.get("entry"))

    @property
    def linked_places(self) -> tuple[str, ...]:
        """The directories that links in the run's copy of the code lead to, which a container has to mount."""
        snapshot = self.snapshot if self.has_own_code else None
        return (snapshot["root"],) if snapshot and snapshot["ignored"] else ()

    def to_json(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {
            "runs_dir": str(self.runs_dir),
            "working_dir": str(self.working_dir),
            "gang": self.gang.to_json(),
            "slurm": self.slurm.to_json() if self.slurm else None,
            "ssh": self.ssh.to_json() if self.ssh else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan from the output of `to_json`.

        Raises: ValueError: the data is no plan; see `build`.
        """
        return build(cls, data, "plan")


def plan_run(resolved: ResolvedSpec, request: Request) -> Plan:
    """Compute everything that submitting this spec would do; nothing is written or started.

    Raises: UsageError, PreflightError, ClusterddpError: the run could not start, with the reason.
    """
    request = request.with_absolute_paths()
    job = with_absolute_paths(resolved.job, request.working_dir)
    refuse_unplannable(job, request)
    placed = request.placed or _PLACE[job.launcher](job, request)
    program = plan_program(job, working_dir=request.working_dir, runs_dir=request.runs_dir, environ=request.environ)
    run = request.run or choose_run_name(request.runs_dir)
    gang, spec, notes = _plan_ranks(job, request, placed, program, run)
    in_copies = placed.ssh is not None and job.snapshot
    overwritten = notes_on_outputs(gang.entry, request.working_dir, request.runs_dir, in_copies=in_copies)
    plan = Plan(
        run=run,
        token=gang.token,
        name=job.name,
        launcher=job.launcher,
        runs_dir=request.runs_dir,
        working_dir=request.working_dir,
        spec=spec,
        spec_text=spec_text(job),
        gang=gang,
        rank0={},
        changes=changes_of(resolved),
        notes=(*notes, *program.notes, *overwritten, *secret_notes(resolved)),
        snapshot=program.snapshot_summary,
        secrets=job.all_secrets,
        parent=request.parent,
        files=(),
        commands=(),
        slurm=placed.slurm,
        ssh=placed.ssh,
    )
    if plan.slurm:
        slurm = dataclasses.replace(plan.slurm, mounts=(*plan.slurm.mounts, *plan.linked_places))
        plan = dataclasses.replace(plan, slurm=slurm)
    return move_plan(plan, request.runs_dir / run)


def _plan_ranks(
    job: JobSpec, request: Request, placed: Placed, program: Program, run: str
) -> tuple[Gang, dict[str, Any], tuple[str, ...]]:
    """Plan the gang; return it, the spec as its ranks get it, and notes on where they run."""
    placement, spawns = with_one_process_each(job, placed.placement)
    entry = plan_entry(program, job, run_dir=request.runs_dir / run, working_dir=request.working_dir, spawns=spawns)
    spec = filled_in(job)
    if request.trial:
        entry, spec = plan_trial_entry(request.trial, entry, spec, on_cpu=placement.on_cpu)
    gang = plan_gang(job, placement, entry, run=run, token=secrets.token_hex(16))
    if placed.slurm:  # the allocation's end is the limit
        gang = dataclasses.replace(gang, time_limit_s=None)
    elif not placed.ssh:
        gang = dataclasses.replace(gang, master_addr=MASTER_ADDR)
    return gang, spec, placement.notes


def plan_gang(job: JobSpec, placement: Placement, entry: Entry, *, run: str, token: str) -> Gang:
    """Plan the gang of a run; its launcher finds the address of the head at the start."""
    time_limit_s = float(job.resources.time.seconds) if job.resources.time else None
    return Gang(
        run=run,
        token=token,
        nodes=placement.nodes,
        entry=entry,
        threads_per_rank=placement.threads_per_rank,
        backend=placement.backend,
        on_cpu=placement.on_cpu,
        master_addr="",
        master_port=None if job.network.master_port == "auto" else job.network.master_port,
        interface=placement.interface,
        env=dict(job.env),
        restarts=job.restarts,
        hang=job.hang,
        hang_after_s=float(job.hang_after.seconds) if job.hang_after else None,
        notify=notify_of(job),
        time_limit_s=time_limit_s,
        **timeouts_of(job, len(placement.nodes)),
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the content of a run's plan.json, with the user's seals of the hosts and the messages that it names.

    Raises: ClusterddpError: the key of the seal cannot be read or written.
    """
    return sealed(plan.to_json())


def read_plan(run: RunDir) -> Plan:
    """Read the plan of a run.

    Raises: ClusterddpError: as `read_plan_json`.
    """
    return Plan.from_json(read_plan_json(run))


def read_plan_json(run: RunDir) -> dict[str, Any]:
    """Read the plan.json of a run.

    Raises: ClusterddpError: the file is missing or is no plan; or it names hosts and another user wrote it.
    """
    data = read_json(run.plan)
    if data is None:
        raise ClusterddpError(f"{run.plan}: is missing, and the run cannot continue without it")
    if not isinstance(data, dict) or not isinstance(data.get("gang"), dict) or "token" not in data["gang"]:
        raise ClusterddpError(f"{run.plan}: found no plan in it")
    if data.get("ssh") and not is_granted(data, "ssh"):
        raise ClusterddpError(
            f"{run.plan}: names hosts, and does not come from you: no connection is made", hint=hint()
        )
    return data


def rename_plan(plan: Plan) -> Plan:
    """Return the same plan under a new name, after another run took its name."""
    return move_plan(plan, plan.runs_dir / choose_run_name(plan.runs_dir))


def move_plan(plan: Plan, run_dir: Path, attempt: int = 0, *, home: str | None = None) -> Plan:
    """Return the same plan for another run directory, with all paths and commands that depend on the directory.

    `attempt`: the first attempt of a job on Slurm. `home`: the directory is on a host with this home directory; there
    `directory_name` names the directory, and the run keeps its name.
    """

    def moved(path: str) -> str:
        inside = Path(path).is_relative_to(plan.run_dir)
        path = str(run_dir / Path(path).relative_to(plan.run_dir)) if inside else path
        return at_home(path, home) if home is not None else path

    entry = move_entry(plan.gang.entry, moved)
    run = run_dir.name if home is None else plan.run
    gang = dataclasses.replace(plan.gang, run=run, entry=entry)
    slurm = plan.slurm and place_slurm(plan.slurm, name=plan.name, token=plan.token, run_dir=run_dir, attempt=attempt)
    ssh = plan.ssh and place_ssh(plan.ssh, home)
    spec = plan.spec if home is None else spec_at_home(plan.spec, home)
    there = dataclasses.replace(plan, run=run, runs_dir=run_dir.parent, spec=spec, gang=gang, slurm=slurm, ssh=ssh)
    return dataclasses.replace(
        there,
        rank0=rank0_variables(gang, there.dir_on_hosts, slurm, ssh),
        files=files_written(RunDir(run_dir), with_code=plan.snapshot is not None, with_job=slurm is not None),
        commands=commands_started(gang, run_dir, slurm, ssh, there.dir_on_hosts),
    )


def plan_on_hosts(plan: Plan) -> Plan:
    """Return the plan of a run over SSH with its paths on the hosts, to be shown to the user."""
    gang = move_plan(plan, Path(plan.dir_on_hosts), home="~").gang
    return dataclasses.replace(plan, gang=gang)

"""The plan: everything that a submit would do, as a value that is printed, executed, and asserted by tests."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.planning import slurm as slurm_place
from clusterddp.planning import ssh as ssh_plan
from clusterddp.planning.placement import Request, place_local, with_one_process_each
from clusterddp.planning.prerequisites import refuse_unplannable, secret_notes, setting_notes, storage_notes
from clusterddp.planning.processes import launcher_command, rank_command
from clusterddp.planning.program import (
    filled_in,
    move_entry,
    notes_on_outputs,
    notes_on_words,
    plan_entry,
    plan_program,
    plan_trial_entry,
    read_batch_script,
    refuse_by_files,
    with_absolute_paths,
)
from clusterddp.planning.python import choose_python
from clusterddp.planning.slurm import SLURM_SUPERVISOR, SlurmPlan, place_slurm
from clusterddp.planning.ssh import SshPlan, at_home, constant_command, directory_name, place_ssh, spec_at_home
from clusterddp.run.call import PYTHON
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Notify
from clusterddp.run.record import BY_HAND
from clusterddp.run.seal import demand_sealed, refuse_changed, sealed
from clusterddp.run.supervisors import SUPERVISOR_COMMAND
from clusterddp.spec.slurm_options import read_gpu_request
from clusterddp.spec.train import DEFINING, TrainSpec
from clusterddp.system.python import module_command
from clusterddp.system.storage import HEARTBEAT_TIMEOUT_S, HOST_SILENCE_S
from clusterddp.system.units import format_count
from clusterddp.wire import UNWRITTEN, Written

if TYPE_CHECKING:
    from clusterddp.spec.fields import Duration
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec


MASTER_ADDR = "127.0.0.1"
_START_S = 60.0
_START_LONG_S = 600.0
"""On Slurm nodes may boot and pull container images; setup lines may copy data."""
_START_S_PER_NODE = 1.0
"""Supervisors start some tens at a time, and many share a network or, as virtual machines, a processor."""
_STOP_S = 120.0
_STOP_LEAD_S = 60.0
"""The default of stop.lead for a spec without a time limit."""
_PLACE = {"local": place_local, "slurm": slurm_place.place, "ssh": ssh_plan.place}
"""The functions that place the ranks, by launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Written):
    """One submit, before it happens."""

    run: str
    token: str = dataclasses.field(repr=False)
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
    hold: str | None = None
    """The hold in which the run is started, the name of a run beside it; its own name: it is a hold."""
    global_batch: int | None = None
    """Images of a step of the built-in trainer as it was first planned, which other numbers of ranks keep."""
    submission: bytes | None = dataclasses.field(default=None, repr=False, compare=False, metadata=UNWRITTEN)
    """A function from Python with its arguments, pickled, whose name is the entry's target; or the text of a batch
    script. It is not in plan.json."""

    def __repr__(self) -> str:
        nodes, ranks = format_count(len(self.gang.members), "node"), format_count(self.gang.num_ranks, "rank")
        return f"<Plan of {self.name}: {ranks} on {nodes}, launcher {self.launcher}, run {self.run}>"

    @property
    def run_dir(self) -> Path:
        on_host = self.ssh is not None and self.ssh.home is not None
        return self.runs_dir / (directory_name(self.run, self.token) if on_host else self.run)

    @property
    def in_hold(self) -> str | None:
        """The hold that it is started in."""
        return self.hold if self.hold != self.run else None

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
    def num_gpus(self) -> int:
        """How many GPUs the run asks for, on all nodes; 0: for none, or it is not known."""
        if self.ssh:
            return sum(host.gpus for host in self.ssh.hosts)
        if self.slurm is None or self.gang.on_cpu or self.gang.entry.kind == "batch_script":
            return sum(len(node.gpus) for node in self.gang.nodes)
        request, nodes = read_gpu_request(self.slurm.sbatch_options), len(self.gang.nodes)
        tasks = self.gang.num_ranks // len(self.gang.members)
        gpus = request.on_node(nodes=nodes, tasks=tasks) if request else None
        return int(gpus * nodes) if gpus else 0

    @property
    def has_own_code(self) -> bool:
        """Whether the run's directory has a copy of the code, in which ranks that see this file system execute it."""
        return self.snapshot is not None and self.ssh is None and bool(self.spec.get("entry"))

    @property
    def linked_places(self) -> tuple[str, ...]:
        """The directories that links in the run's copy of the code lead to, which a container has to mount."""
        snapshot = self.snapshot if self.has_own_code else None
        return (snapshot["root"],) if snapshot and snapshot["ignored"] else ()


def plan_run(resolved: ResolvedSpec, request: Request) -> Plan:
    """Compute everything that submitting this spec would do; nothing is written or started.

    Raises: UsageError, PreflightError, ClusterddpError: the run could not start, with the reason.
    """
    from clusterddp.spec.yamlfile import resolved_yaml

    runs_dir, working_dir = request.runs_dir.absolute(), request.working_dir.absolute()
    request = dataclasses.replace(request, runs_dir=runs_dir, working_dir=working_dir)
    job = with_absolute_paths(resolved.job, working_dir)
    refuse_unplannable(job, request)
    refuse_by_files(resolved, working_dir=working_dir, environ=request.environ)
    if job.entry and job.entry.batch_script and request.submission is None:
        request = dataclasses.replace(request, submission=read_batch_script(Path(job.entry.batch_script)))
    placed = request.placed or _PLACE[job.launcher](job, request)
    python = choose_python(job, request)
    program = plan_program(
        job, working_dir=working_dir, runs_dir=runs_dir, environ=request.environ, packages=python.packages
    )
    run = request.run or choose_run_name(runs_dir)
    placement, spawns = with_one_process_each(job, placed)
    entry = plan_entry(program, job, run_dir=runs_dir / run, working_dir=working_dir, spawns=spawns)
    spec = filled_in(job)
    if request.trial:
        entry, spec = plan_trial_entry(request.trial, entry, spec, on_cpu=placement.on_cpu)
    in_copies = placed.ssh is not None and job.snapshot
    overwritten = notes_on_outputs(entry, working_dir, in_copies=in_copies)
    gang = Gang(
        run=run,
        token=secrets.token_hex(16),
        nodes=placement.nodes,
        entry=entry,
        threads_per_rank=placement.threads_per_rank,
        backend=placement.backend,
        on_cpu=placement.on_cpu,
        # Over SSH and on Slurm the launcher finds it at the start.
        master_addr="" if placed.slurm or placed.ssh else MASTER_ADDR,
        master_port=None if job.network.master_port == "auto" else job.network.master_port,
        interface=placement.interface,
        env=dict(job.env),
        restarts=job.restarts,
        min_nodes=(job.elastic.min_nodes or job.resources.nodes) if job.elastic else None,
        hang=job.hang,
        hang_after_s=_seconds(job.hang_after),
        notify=_notify_of(job),
        python=python,
        setup=tuple(job.setup) if placed is not request.placed else (),
        # On Slurm the end of the allocation is the limit.
        time_limit_s=None if placed.slurm else _seconds(job.resources.time),
        **_timeouts_of(job, len(placement.nodes)),
    )
    called = f"the image needs Python {PYTHON} with cloudpickle and submitit, to load the function and write its result"
    plan = Plan(
        run=run,
        token=gang.token,
        name=job.name,
        launcher=job.launcher,
        runs_dir=runs_dir,
        working_dir=working_dir,
        spec=spec,
        spec_text=resolved_yaml(job),
        gang=gang,
        rank0={},
        changes=resolved.changes(),
        notes=(
            *(*placement.notes, *program.notes, *notes_on_words(entry), *overwritten, *secret_notes(resolved)),
            *(setting_notes(job, request.environ) if not (job.entry and job.entry.batch_script) else ()),
            *((called,) if entry.is_call and job.container else ()),
            *_notes_on_started_by_others(job, request),
            *(storage_notes(python.prefix) if placed.slurm and python.prefix else ()),
        ),
        snapshot=program.snapshot_summary,
        secrets=job.all_secrets,
        parent=request.parent,
        files=(),
        commands=(),
        slurm=placed.slurm,
        ssh=placed.ssh,
        global_batch=TrainSpec.from_json(spec["train"]).global_batch(gang.num_ranks) if spec.get("train") else None,
        submission=request.submission,
    )
    if plan.slurm:
        slurm = dataclasses.replace(plan.slurm, mounts=(*plan.slurm.mounts, *plan.linked_places))
        plan = dataclasses.replace(plan, slurm=slurm)
    plan = dataclasses.replace(plan, notes=(*_idle_gpus(plan), *plan.notes))
    return move_plan(plan, runs_dir / run)


def _idle_gpus(plan: Plan) -> Iterator[str]:
    """Say that ranks are fewer than GPUs, and what starts one for each."""
    gpus, ranks = plan.num_gpus, plan.gang.num_ranks
    if gpus > ranks and plan.gang.min_nodes is None:
        each = f"resources.gpus_per_node={gpus // len(plan.gang.nodes)} without procs_per_node starts one for each"
        yield f"{gpus - ranks} of {gpus} GPUs have no rank of their own: {each}"


def _notes_on_started_by_others(job: JobSpec, request: Request) -> Iterator[str]:
    """Note the keys that choose no Python, because another launcher starts this one."""
    named = [name for name in ("python", "venv", "conda", "setup") if getattr(job, name)]
    if named and request.placed is not None:
        yield f"{', '.join(named)}: no effect here, the ranks run in the Python that starts clusterddp worker"


def _seconds(duration: Duration | None) -> float | None:
    return float(duration.seconds) if duration else None


def _timeouts_of(job: JobSpec, num_nodes: int) -> dict[str, float]:
    """Return the timeouts of a gang, by the names of its fields."""
    network, stop = job.network, job.stop
    limit_s = _seconds(job.resources.time)
    lead_s = min(_STOP_S, limit_s / 3) if limit_s else _STOP_LEAD_S
    takes_long = job.launcher == "slurm" or job.setup
    start_s = (_START_LONG_S if takes_long else _START_S) + _START_S_PER_NODE * num_nodes
    host_silence_s = _seconds(network.host_silence) or HOST_SILENCE_S
    return {
        "start_timeout_s": _seconds(network.start_timeout) or start_s,
        "host_silence_s": host_silence_s,
        "heartbeat_timeout_s": max(_seconds(network.heartbeat_timeout) or HEARTBEAT_TIMEOUT_S, host_silence_s),
        "stop_lead_s": _seconds(stop.lead) or lead_s,
        "stop_grace_s": _seconds(stop.grace) or _STOP_S,
    }


def _notify_of(job: JobSpec) -> Notify | None:
    """Return the messages that clusterddp sends."""
    spec = job.notify
    if spec is None:
        return None
    # The path of the command is absolute already.
    notify = Notify(on=tuple(dict.fromkeys(spec.on)), command=spec.argv(Path("/")), webhook=spec.webhook)
    return notify if notify.channels else None


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the content of a run's plan.json, with the user's seal."""
    try:
        return sealed(plan.to_json())
    except ClusterddpError:
        if plan.launcher not in BY_HAND:
            raise
        return plan.to_json()  # in a container without a home, where another program starts the ranks


def read_plan(run: RunDir, *, in_job: bool = False) -> Plan:
    """Read the plan of a run, to act on it; `in_job`: on a machine of its job, which may not have the user's key.

    Raises: ClusterddpError: the file is missing or is no plan. UsageError: the run is not this user's own.
    """
    return Plan.from_json(refuse_changed(run) if in_job else demand_sealed(run))


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
    names = {"name": plan.name, "token": plan.token}
    slurm = plan.slurm and place_slurm(plan.slurm, **names, run_dir=run_dir, attempt=attempt, in_hold=plan.in_hold)
    ssh = plan.ssh and place_ssh(plan.ssh, home)
    spec = plan.spec if home is None else spec_at_home(plan.spec, home)
    there = dataclasses.replace(
        plan,
        run=run,
        runs_dir=run_dir.parent,
        spec=spec,
        gang=gang,
        slurm=slurm,
        ssh=ssh,
        hold=run if plan.hold == plan.run else plan.hold,
    )
    return dataclasses.replace(
        there, rank0=_rank0_variables(there), files=_files_written(there), commands=_commands_started(there)
    )


def plan_on_hosts(plan: Plan) -> Plan:
    """Return the plan with its paths on the hosts, to be shown to the user; without SSH the plan as it is."""
    if not plan.ssh:
        return plan
    gang = move_plan(plan, Path(plan.dir_on_hosts), home="~").gang
    return dataclasses.replace(plan, gang=gang)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# 64 words each: short, plain, distinct in their first letters.
ADJECTIVES = _words(
    "agile amber ample ashen balmy blithe bold brave brisk bright calm candid clever cosmic crisp curly "
    "dapper daring deft dewy eager early fabled fair fancy fleet fond frank gentle giddy glad golden "
    "hardy hazel honest humble jolly keen kind lively lucid lunar mellow merry mild misty nimble noble "
    "plucky polar proud quick quiet rapid rosy rustic silver snug solar spry steady sunny swift tidy"
)
ANIMALS = _words(
    "adder badger bear beaver bison bobcat camel caribou civet condor coyote crane curlew dingo dolphin eagle "
    "egret falcon ferret finch fox gazelle gecko gibbon goose grouse hare heron hornet ibex ibis iguana "
    "jackal jaguar kestrel koala lark lemur llama lynx magpie marmot marten mink moose newt ocelot orca "
    "osprey otter owl panda pelican puffin quail raven robin salmon seal stoat swan tapir walrus wombat"
)


def choose_run_name(
    runs_dir: Path, *, adjectives: tuple[str, ...] = ADJECTIVES, animals: tuple[str, ...] = ANIMALS
) -> str:
    """Choose a name that is free in `runs_dir`; another submit may still take it before it is used."""
    try:
        taken = set(os.listdir(runs_dir))
    except OSError:
        taken = set()
    while True:
        name = f"{secrets.choice(adjectives)}-{secrets.choice(animals)}-{secrets.randbelow(99) + 1}"
        if name not in taken:
            return name


_OF_THE_ENTRY = "the entry: how it is started"
"""The origin of variables that the start-up of a rank sets for its entry."""
_PORT = "a free port, chosen at the start"


def _rank0_variables(plan: Plan) -> dict[str, dict[str, str]]:
    """Compute the variables of rank 0, each with its origin."""
    gang, slurm, ssh = plan.gang, plan.slurm, plan.ssh
    if gang.entry.kind == "batch_script":
        return {}  # its ranks are those of its steps
    if not gang.master_addr:
        head = ssh.hosts[0].host if ssh else "the first node"
        gang = dataclasses.replace(gang, master_addr=f"{head}'s address, found at the start")
    variables = gang.variables_of(0, run_dir=plan.dir_on_hosts, attempt=0, master_port=gang.master_port or _PORT)
    shown = {name: {"value": variable.value, "origin": variable.origin} for name, variable in variables.items()}
    changes = gang.entry.environment({name: variable.value for name, variable in variables.items()})
    for name, value in changes.items():
        if value is None:
            shown.pop(name, None)
        elif name not in shown or shown[name]["value"] != value:
            shown[name] = {"value": value, "origin": _OF_THE_ENTRY}
    if gang.threads_per_rank is None and "OMP_NUM_THREADS" not in gang.env:
        value = "its share of the job's cores on its node"
        shown["OMP_NUM_THREADS"] = {"value": value, "origin": "resources.cpus_per_task"}
    if "CUDA_VISIBLE_DEVICES" in gang.env:
        return shown
    if slurm and not gang.on_cpu:
        shown["CUDA_VISIBLE_DEVICES"] = {"value": "the GPUs that Slurm gives", "origin": "Slurm"}
    if ssh and ssh.hosts[0].gpus and not gang.nodes[0].gpus:
        value = f"{ssh.hosts[0].gpus} of {ssh.hosts[0].host}'s, leased at the start"
        shown["CUDA_VISIBLE_DEVICES"] = {"value": value, "origin": "the GPUs of the node"}
    return shown


def _files_written(plan: Plan) -> tuple[str, ...]:
    """List the paths that the submit writes on this machine."""
    run = RunDir(plan.run_dir)
    paths = [run.spec, run.plan, run.record, run.environment, *([run.code] if plan.snapshot else [])]
    paths += [run.attempt(0).path, run.checkpoints, run.tensorboard, run.launcher_dir]
    if plan.gang.entry.is_call:
        paths.append(run.submission)
    if plan.gang.entry.kind == "batch_script":
        return tuple(map(str, (*paths, run.batch_script, *([plan.slurm.file_of(run)] if plan.slurm else []))))
    if plan.slurm:
        paths += [plan.slurm.file_of(run), run.job_environment, run.job_secrets]
    return tuple(str(path) for path in paths)


def files_on_hosts(ssh: SshPlan, run_dir: str, *, with_code: bool) -> tuple[str, ...]:
    """List the paths that the submit writes on every host, besides the files of `ssh.send`."""
    kept = [f"{ssh.root}/packages/<sha256 of this package>", run_dir]
    code = [f"{ssh.root}/code/<sha256 of the code>"] if with_code else []
    return (*kept, *code)


def _commands_started(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """List the argv of all processes, in the order of their start: the launcher, supervisors, a rank."""
    if plan.ssh:
        pythons = [node.python_words for node in plan.ssh.hosts]
        supervisors = [(python, *SUPERVISOR_COMMAND[1:]) for python in pythons]
        return ((constant_command(),), *supervisors, (pythons[0], *rank_command(Path(plan.dir_on_hosts))[1:]))
    if plan.slurm and plan.gang.entry.kind == "batch_script":
        return ((*plan.slurm.sbatch, str(plan.slurm.file_of(RunDir(plan.run_dir))), *plan.slurm.arguments),)
    rank = rank_command(plan.run_dir)
    if plan.slurm and plan.in_hold:
        return ((*plan.slurm.srun, "0"), *[module_command(SLURM_SUPERVISOR) for _ in plan.gang.nodes], rank)
    if plan.slurm:
        supervisors = [module_command(SLURM_SUPERVISOR) for _ in plan.gang.members]
        script = str(plan.slurm.file_of(RunDir(plan.run_dir)))
        return ((*plan.slurm.sbatch, script, *plan.slurm.arguments), (*plan.slurm.srun, "0"), *supervisors, rank)
    return (launcher_command(plan.run_dir, 0), *[SUPERVISOR_COMMAND for _ in plan.gang.nodes], rank)


_FIXED = (
    *("launcher", "name", "snapshot", "entry.script", "entry.module", "entry.function", "entry.command"),
    "entry.batch_script",
    *(f"train.{key}" for key in DEFINING),
)
"""Keys that make it this run; with another value of one it would be another run."""
_PYTHON = ("python", "venv", "conda", "setup", "container.image")
"""Keys with which the choice of the ranks' Python is made again."""


def plan_changed(plan: Plan, spec: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Return the plan of the same run with other values; its code stays the snapshot of the first submit.

    `spec`: the run's own, as it was resolved. GPUs that are in use count as free: those of the run may be.
    Raises: SpecError: an override is wrong. UsageError: the run cannot go on with it. PreflightError: the machines do
    not fit.
    """
    from clusterddp.spec.load import flatten, load_spec

    sizes = [word.lstrip("~").partition("=")[0] for word in overrides]
    if plan.ssh and "ssh.hosts" in sizes and "resources.nodes" not in sizes:
        overrides = (*overrides, "~resources.nodes")  # one for each of these hosts
    resolved = load_spec(spec, overrides, environ=environ, whole=True)
    now, then = flatten(filled_in(resolved.job)), flatten(plan.spec)
    same_python = all(now.get(key) == then.get(key) for key in _PYTHON)
    own = RunDir(plan.run_dir).batch_script
    submission = read_batch_script(own) if plan.gang.entry.kind == "batch_script" else b""
    request = Request(
        runs_dir=plan.runs_dir,
        working_dir=plan.working_dir,
        environ=environ,
        parent=plan.parent,
        queued=True,
        submission=submission,
        keeps_hosts=True,
        python=plan.gang.python if same_python else None,
    )
    other = plan_run(resolved, request)
    now = flatten(other.spec)
    fixed = [key for key in _FIXED if now.get(key) != then.get(key)]
    if fixed:
        raise UsageError(
            f"{plan.run}: resume goes on with the same {fixed[0]}, {then.get(fixed[0])}, not {now.get(fixed[0])}",
            hint=f"clusterddp submit {plan.run} {' '.join(overrides)} starts another run",
        )
    # The place of the code stays, even where today a submit would run it in its own place.
    first = plan.gang.entry
    entry = dataclasses.replace(
        other.gang.entry,
        target=first.target,
        working_dir=first.working_dir,
        import_paths=first.import_paths,
        code_dir=first.code_dir,
    )
    gang = dataclasses.replace(other.gang, token=plan.token, entry=entry)
    other = dataclasses.replace(other, token=plan.token, gang=gang, snapshot=plan.snapshot)
    return move_plan(with_batch_of(plan, other), plan.run_dir)


def with_batch_of(plan: Plan, other: Plan) -> Plan:
    """Return the next plan of the same run with the global batch of `plan`, and a note on what another size changes.

    A spec with another batch_size or accumulate asks for another global batch.
    """
    before, ranks = plan.gang.num_ranks, other.gang.num_ranks
    if not (plan.spec.get("train") and other.spec.get("train")):
        told = ranks == before or other.gang.entry.kind == "batch_script"
        world = (
            f"WORLD_SIZE is {ranks} instead of {before}: the program decides what its batch and learning rate become"
        )
        return other if told else dataclasses.replace(other, notes=(world, *other.notes))
    then, now = TrainSpec.from_json(plan.spec["train"]), TrainSpec.from_json(other.spec["train"])
    planned = plan.global_batch or then.global_batch(before)
    kept = (then.batch_size, then.accumulate) == (now.batch_size, now.accumulate)
    now = now.fitted(ranks, planned) if kept else now
    changed = (now.describe_batch(ranks, planned),) if ranks != before or not kept else ()
    return dataclasses.replace(
        other, global_batch=planned if kept else now.global_batch(ranks), notes=(*changed, *other.notes)
    )

"""The Slurm part of a plan: the placement on nodes, for which Slurm chooses hosts, and the job as a value.

The value has the argv of sbatch and srun, the batch script, the words of a container, and the runs that the job waits
for.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clusterddp
from clusterddp.errors import UsageError
from clusterddp.planning.placement import Placement, Request
from clusterddp.planning.prerequisites import data_notes, storage_notes
from clusterddp.planning.processes import process_environment, travelling_variables
from clusterddp.planning.program import directories_used, filled_in
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.gang import Node
from clusterddp.run.job_tag import job_comment, job_name, job_tag
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, find_sweep
from clusterddp.spec.batch_script import head_of, options_of
from clusterddp.spec.slurm_options import (
    BIND_OPTIONS,
    FLAGS,
    GPU_OPTIONS,
    MEMORY_OPTIONS,
    OWNED,
    REQUEUE_OPTIONS,
    SRUN_OPTIONS,
    asks_for_gpus,
    option_problem,
)
from clusterddp.system.python import isolated_command, module_command
from clusterddp.system.storage import check_shared
from clusterddp.system.templates import read_template
from clusterddp.system.units import format_count
from clusterddp.wire import Written

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


Options = dict[str, "str | bool"]
_PREFIX = "SBATCH_"
_ODD_NAMES = {
    "ARRAY_INX": "array",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
    "DEBUG": "verbose",
    "WAIT4SWITCH": None,
    "NO_WAIT": None,
}
"""Variables of sbatch whose names differ from the option's; None: part of another option."""
_SWITCHES = FLAGS | {"exclusive", "no_kill", "wait_all_nodes"}

_BOUND = (
    "a rank sees only the GPUs that are bound to it. If Slurm confines tasks to their devices, NCCL copies from GPU to "
    "GPU through the host's memory, and a script that uses LOCAL_RANK as its device fails with invalid device "
    "ordinal; CLUSTERDDP_GPU names the device"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """The options of sbatch and srun for one job that do not depend on its name and directory."""

    sbatch: Options
    srun: Options
    notes: tuple[str, ...]

    @property
    def gpus(self) -> bool:
        return asks_for_gpus(self.sbatch)


def choose_options(job: JobSpec, environ: Mapping[str, str], dependency: str | None = None) -> JobOptions:
    """Choose the options: those of the spec replace our defaults; both replace the user's SBATCH_* variables."""
    wanted = dict(job.slurm)
    options = _required(job) | {
        name: value for name, value in _defaults(job, dependency).items() if not _replaced(name, wanted)
    }
    own = {name: value for name, value in wanted.items() if value is not False}
    options |= {name: value for name, value in own.items() if name not in SRUN_OPTIONS}
    exported, notes = _exported(environ, {**wanted, **options})
    sbatch = options | exported
    if "gpus" in own and job.resources.nodes > 1 and "gpus_per_node" not in wanted:
        # Of eight GPUs for two nodes Slurm gives the first one seven.
        kind, colon, _ = str(own["gpus"]).rpartition(":") if "," not in str(own["gpus"]) else ("", "", "")
        sbatch["gpus_per_node"] = f"{kind}{colon}{job.resources.gpus_per_node}"
    srun = {name: value for name, value in _of_the_step(job).items() if name not in wanted}
    srun |= {name: value for name, value in own.items() if name in SRUN_OPTIONS}
    bound = [name for name in sbatch if name in BIND_OPTIONS and not str(sbatch[name]).endswith("none")]
    notes += tuple(f"slurm.{name}: {_BOUND}" for name in bound if asks_for_gpus(sbatch))
    return JobOptions(sbatch=sbatch, srun=srun, notes=notes)


def option_argv(options: Mapping[str, str | bool]) -> tuple[str, ...]:
    """Return each option as one argument, `--name=value`; no shell reads it."""
    return tuple(_argument(name, value) for name, value in options.items() if value is not False)


def without_waiting(options: Options) -> Options:
    """Return the options of a follow-up job: without start times and dependencies that are over."""
    past = {"begin", "hold", "kill_on_invalid_dep"} | (
        {"dependency"} if options.get("dependency") != "singleton" else set()
    )
    return {name: value for name, value in options.items() if name not in past}


def memory_text(gigabytes: float) -> str:
    """Format gigabytes for Slurm (1G is 1024M), in megabytes if they are no whole gigabytes."""
    return f"{int(gigabytes)}G" if float(gigabytes).is_integer() else f"{math.ceil(gigabytes * 1024)}M"


def _required(job: JobSpec) -> Options:
    resources = job.resources
    nodes = resources.nodes + job.num_spares
    options: Options = {
        "nodes": str(nodes),
        "ntasks": str(nodes * resources.ranks_per_node),
        "ntasks_per_node": str(resources.ranks_per_node),
    }
    if resources.cpus_per_task:
        options["cpus_per_task"] = str(resources.cpus_per_task)
    return options | ({"time": str(resources.time)} if resources.time else {})


def _of_the_step(job: JobSpec) -> Options:
    """Return the options of srun that the job does not have.

    The job is the same with `owns_ranks`: then the step's tasks are fewer, with the cores of all ranks of their nodes.
    Spares are nodes of the job, and not of the step.
    """
    resources, options = job.resources, Options()
    if job.num_spares:
        options |= {"nodes": str(resources.nodes), "ntasks": str(resources.world_size)}
    if job.entry and job.entry.owns_ranks:
        options |= {"ntasks": str(resources.nodes), "ntasks_per_node": "1"}
        if resources.cpus_per_task:
            options["cpus_per_task"] = str(resources.cpus_per_task * resources.ranks_per_node)
    if not resources.cpus_per_task:
        # Where a node has as many cores as ranks, Slurm would bind each rank to one, and a site may bind them always.
        options["cpu_bind"] = "none"
    return options


def _defaults(job: JobSpec, dependency: str | None) -> Options:
    """Return the options that a spec may remove or replace."""
    resources = job.resources
    options: Options = {}
    if resources.memory_gb is not None:
        options["mem"] = memory_text(resources.memory_gb)
    gpus = resources.gpus_per_node or (resources.ranks_per_node if job.device == "cuda" else 0)
    if gpus and job.device != "cpu":
        options["gpus_per_node"] = str(gpus)
    # Slurm may requeue a job only if the spec allows restarts.
    options["requeue" if job.restarts else "no_requeue"] = True
    if dependency:
        options["dependency"] = dependency
    if dependency or job.slurm.get("dependency"):
        options["kill_on_invalid_dep"] = "yes"
    return options


def _replaced(name: str, wanted: Mapping[str, str | bool]) -> bool:
    """Say whether the spec's own options replace or remove this default."""
    if name in wanted:
        return True
    if name in GPU_OPTIONS:
        return any(other in GPU_OPTIONS for other in wanted) or asks_for_gpus(wanted)
    return any(name in group and not group.isdisjoint(wanted) for group in (MEMORY_OPTIONS, REQUEUE_OPTIONS))


def _exported(environ: Mapping[str, str], options: Mapping[str, str | bool]) -> tuple[Options, tuple[str, ...]]:
    """Return the user's SBATCH_* variables that count, as options, and a note on each variable."""
    honoured: Options = {}
    notes = []
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX):
            continue
        name = _ODD_NAMES.get(variable.removeprefix(_PREFIX), variable.removeprefix(_PREFIX).lower())
        if name is None:
            notes.append(f"{variable} in your environment is left out: slurm.switches takes both values")
        elif name in OWNED and name not in {"time"}:
            notes.append(f"{variable} in your environment is overridden: {OWNED[name]}")
        elif name == "distribution" and (problem := option_problem(name, environ[variable])):
            notes.append(f"{variable} in your environment is overridden: {problem[0]}")
        elif _is_taken(name, options):
            notes.append(f"{variable} in your environment is overridden by the spec")
        else:
            text = environ[variable]
            is_switched = name in _SWITCHES and text.lower() not in {"user", "mcs", "topo", "off"}
            honoured[name] = True if is_switched else text
            notes.append(f"{_argument(name, honoured[name])} comes from {variable} in your environment")
    return honoured, tuple(notes)


def _is_taken(name: str, options: Iterable[str]) -> bool:
    groups = (MEMORY_OPTIONS, REQUEUE_OPTIONS, GPU_OPTIONS | {"gres", "tres_per_task"})
    return name in options or any(name in group and not group.isdisjoint(options) for group in groups)


def _argument(name: str, value: str | bool) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return "--kill-on-invalid-dep=yes" if name == "kill_on_invalid_dep" else option
    return f"{option}={value}"


IMPORT_PATH = "/opt/clusterddp"
"""Where the container has this package, and only it: no package of the host may hide one of the image."""
_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')
"""Finds Python inside the container: srun may look for the first word of a command on the host."""
_TASK = """\
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
import os, runpy
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Finds this package inside the container: a PYTHONPATH of the image wins over the one of the job.

Nothing is imported from the working directory, as in system/python.py.
"""


def container_words(
    container: dict[str, Any] | None, *, mounts: tuple[str, ...], run_dir: Path, module: str
) -> tuple[str, ...]:
    """Return the argv of a task, which is `module`, up to its arguments.

    Source: https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
    """
    if container is None:
        return module_command(module)
    python = (container["python"], "-c", _TASK, IMPORT_PATH, module)
    if container["runtime"] == "pyxis":
        return (*_SHELL, *python)
    binds = tuple(f"--bind={mount}" for mount in _mounts(container, mounts, run_dir))
    gpus = ("--nv",) if container["gpus"] else ()
    workdir = (f"--pwd={container['workdir']}",) if container["workdir"] else ()
    return ("apptainer", "exec", *gpus, *binds, *workdir, container["image"], *python)


def container_flags(container: dict[str, Any] | None, *, mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """Return srun's options for a container.

    Source: https://github.com/NVIDIA/pyxis#usage
    """
    if container is None or container["runtime"] != "pyxis":
        return ()
    flags = [
        f"--container-image={container['image']}",
        f"--container-mounts={','.join(_mounts(container, mounts, run_dir))}",
        "--no-container-mount-home",
    ]
    if container["workdir"]:
        flags.append(f"--container-workdir={container['workdir']}")
    return tuple(flags)


def _mounts(container: dict[str, Any], mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """List the mounts as HOST_PATH:PATH[:FLAGS]: of the run, of the directories that it needs, and the user's own."""
    package = f"{Path(clusterddp.__file__).absolute().parent}:{IMPORT_PATH}/clusterddp:ro"
    users = [mount if ":" in mount else f"{mount}:{mount}" for mount in container["mounts"]]
    targets = [Path(mount.split(":")[1]) for mount in users]
    # A path inside a user's mount need not exist on the nodes.
    brought = {path for path in mounts if any(Path(path).is_relative_to(target) for target in targets)}
    ours = dict.fromkeys(path for path in (str(run_dir.parent), *mounts) if path not in brought)
    return (*(f"{path}:{path}" for path in ours), package, *users)


SCRIPT = "slurm_job.sh"
SCRIPT_FOLDER = "sbatch"
"""The folder, in the launcher's directory, of what sbatch gets for a user's batch script."""
TASK_MODULE = "clusterddp.places.slurm.task"
NODE_TASK_MODULE = "clusterddp.places.slurm.node_task"
"""In a hold: one task for each node, whose supervisor forks the ranks."""
SLURM_SUPERVISOR = "clusterddp.places.slurm.supervisor"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmPlan(Written):
    """One job before its submit; sbatch gets exactly these values."""

    sbatch_options: dict[str, str | bool]
    """sbatch's options that follow from the spec and the user's environment, by their long names."""
    srun_options: dict[str, str | bool]
    container: dict[str, Any] | None
    mounts: tuple[str, ...]
    """Directories that the container needs in addition to the run's and the user's own mounts."""
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Nodes that earlier runs have marked, with a sentence on each; sbatch gets them beside those of `exclude`."""
    variables: tuple[str, ...]
    """Names of the submitting shell's variables that the ranks get, from launcher/environment.json."""
    script: str
    """Text of the batch script, the same for every run; of a user's script: its #SBATCH lines, and what runs it."""
    file: str = SCRIPT
    """Where it is below the launcher's directory; sbatch names the job of a user's script by the last part."""
    directory: str | None = None
    """Of a user's batch script: where sbatch runs, with the whole environment of the user."""
    job_directory: str | None = None
    """Of a user's batch script: where the job starts."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    sbatch: tuple[str, ...] = ()
    """argv before the script and its arguments."""
    srun: tuple[str, ...] = ()
    """argv up to and including RUN_DIR; the attempt follows."""

    @property
    def submit_options(self) -> dict[str, str | bool]:
        """The options of sbatch, with the nodes that are left out."""
        excluded = [*filter(None, [self.option("exclude")]), *self.left_out]
        return self.sbatch_options | ({"exclude": ",".join(excluded)} if self.left_out else {})

    def option(self, name: str) -> str:
        """Return the value of an option of sbatch, also one of the #SBATCH lines of a user's script; empty: none."""
        return options_of(self.script.encode(errors="surrogateescape"), self.sbatch_options).value(name)

    def file_of(self, run: RunDir) -> Path:
        """Return the file that sbatch gets."""
        return run.launcher_dir / self.file


def place_slurm(
    plan: SlurmPlan, *, name: str, token: str, run_dir: Path, attempt: int, in_hold: str | None
) -> SlurmPlan:
    """Fill in what depends on the run's directory, on the first attempt of the job, and on whose job it is."""
    tag = job_tag(token, attempt)
    if plan.directory is not None:
        return dataclasses.replace(
            plan,
            arguments=(str(run_dir), *plan.arguments[1:]),
            sbatch=script_sbatch_argv(plan.submit_options, job_comment(run_dir.name, tag)),
        )
    python, _, *paths = plan.arguments
    return dataclasses.replace(
        plan,
        arguments=(python, str(run_dir), *paths),
        sbatch=sbatch_argv(
            plan.submit_options,
            name=job_name(name, tag),
            comment=job_comment(run_dir.name, tag),
            directory=RunDir(run_dir).launcher_dir,
        ),
        srun=_srun_argv(plan, run_dir, in_hold=in_hold is not None),
    )


def sbatch_argv(
    options: Mapping[str, str | bool], *, name: str, comment: str, directory: Path, log: str = "job.log"
) -> tuple[str, ...]:
    """Return sbatch's argv before the script; the comment of the spec comes before ours."""
    ours: Options = {
        "parsable": True,
        "job_name": name,
        "comment": _with_comment(options, comment),
        "export": "ALL",  # of sbatch's minimal environment
        "chdir": str(directory),
        "output": str(directory / log),
        "open_mode": "append",
    }
    rest = {option: value for option, value in options.items() if option != "comment"}
    return ("sbatch", *option_argv(ours), *option_argv(rest))


def script_sbatch_argv(options: Mapping[str, str | bool], comment: str) -> tuple[str, ...]:
    """Return sbatch's argv before a user's script: its answer and the comment are ours, the rest is the user's."""
    ours: Options = {"parsable": True, "comment": _with_comment(options, comment)}
    return ("sbatch", *option_argv({**options, **ours}))


def _with_comment(options: Mapping[str, str | bool], comment: str) -> str:
    users = options.get("comment")
    return f"{users}; {comment}" if isinstance(users, str) and users else comment


def _srun_argv(plan: SlurmPlan, run_dir: Path, *, in_hold: bool) -> tuple[str, ...]:
    options = plan.sbatch_options
    ours: Options = {
        "kill_on_bad_exit": "1",
        "nodes": options["nodes"],
        "ntasks": options["ntasks"],
        "ntasks_per_node": options["ntasks_per_node"],
        # srun of 22.05 to 23.02 does not inherit it from the job. Without a number the step has all cores of the job.
        "cpus_per_task": options.get("cpus_per_task", False),
        # Ranks with neighbouring numbers then share a socket, and usually their GPUs; Slurm's default is cyclic.
        "distribution": options.get("distribution") or "block:block",
        "unbuffered": True,
        "label": True,
        "open_mode": "append",
        "export": "ALL",
        "output": str(RunDir(run_dir).launcher_dir / "tasks.log"),
    }
    module = NODE_TASK_MODULE if in_hold else TASK_MODULE
    if in_hold:  # one task has the cores of all ranks of its node
        ours |= {"ntasks": options["nodes"], "ntasks_per_node": "1"}
        if cores := options.get("cpus_per_task"):
            ours["cpus_per_task"] = str(int(cores) * int(options["ntasks_per_node"]))
    inside = container_words(plan.container, mounts=plan.mounts, run_dir=run_dir, module=module)
    flags = container_flags(plan.container, mounts=plan.mounts, run_dir=run_dir)
    task = (*inside, str(run_dir))
    return (*_without_binding(options, in_hold=in_hold), "srun", *option_argv(ours | plan.srun_options), *flags, *task)


def _without_binding(options: Mapping[str, str | bool], *, in_hold: bool) -> tuple[str, ...]:
    """Return the words before srun with which every rank sees all GPUs of its node, unless the user binds them.

    sbatch sets variables for GPUs per task, from which srun gives each task only its own GPUs. `--gpu-bind=none` does
    not help: srun 20.11 refuses it, and with 22.05 no task sees any GPU.
    """
    by_task = {"gpus_per_task": "SLURM_GPUS_PER_TASK", "tres_per_task": "SLURM_TRES_PER_TASK"}
    if in_hold:  # the variables are those of the hold's job
        return ("env", *(f"--unset={variable}" for variable in (*by_task.values(), "SLURM_CPUS_PER_TASK")))
    if by_task.keys().isdisjoint(options) or not BIND_OPTIONS.isdisjoint(options):
        return ()
    return ("env", *(f"--unset={variable}" for variable in by_task.values()))


def _start_paths(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return PYTHONPATH and LD_LIBRARY_PATH for a job's empty environment, without empty values at the end."""
    environment = process_environment(environ)
    paths = [environment.get("PYTHONPATH", ""), environment.get("LD_LIBRARY_PATH", "")]
    while paths and not paths[-1]:
        paths.pop()
    return tuple(paths)


_UNMET = {"afterok": ("FAILED", "CANCELLED", "STOPPED"), "afternotok": ("COMPLETED",), "afterany": ()}


def find_dependency(after: Sequence[str], runs_dir: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the value of --dependency and notes on runs that have ended; None: no dependency is left.

    Raises: RunNotFoundError, UsageError: Slurm cannot wait for a run, or a run has ended with the wrong outcome.
    """
    dependencies: list[str] = []
    notes: list[str] = []
    for text in after:
        kind, _, name = text.rpartition(":")
        kind = kind or "afterok"
        if re.fullmatch(r"[0-9]+(_[0-9]+)?", name):
            dependencies.append(f"{kind}:{name}")
            continue
        sweep = find_sweep(runs_dir, name)
        if sweep:
            dependencies += _dependencies_on_sweep(text, kind, sweep)
            continue
        run = find_run(runs_dir, name)
        end = final_end(run)
        if end is None:
            dependencies.append(f"{kind}:{_job_of(run)}")
        elif end.outcome in _UNMET[kind]:
            raise UsageError(f"after: {text}: {run.name} has ended: {end.outcome} ({end.reason})")
        else:
            notes.append(f"after: {run.name} has ended already ({end.outcome}), so the job does not wait for it")
    return ",".join(dependencies) or None, tuple(notes)


def _dependencies_on_sweep(text: str, kind: str, sweep: SweepDir) -> list[str]:
    """Return the dependencies on all runs of a sweep: its job array, and follow-up jobs of single runs."""
    if kind == "afternotok":
        raise UsageError(f"after: {text}: {sweep.name} is a sweep; afternotok takes one run", hint=f"{sweep.name}.0")
    jobs: dict[str, None] = {}
    for run in sweep.runs():
        end = final_end(run)
        if end is None:
            jobs[_job_of(run).partition("_")[0]] = None
        elif end.outcome in _UNMET[kind]:
            raise UsageError(f"after: {text}: {run.name} has ended: {end.outcome} ({end.reason})")
    return [f"{kind}:{job}" for job in jobs]


def _job_of(run: RunDir) -> str:
    record = read_run(run)
    if record.launcher != "slurm":
        raise UsageError(
            f"after: {run.name} is a {record.launcher} run, for which Slurm cannot wait",
            hint=f"clusterddp wait {run.name} waits for it",
        )
    if record.job_id is None:
        raise UsageError(
            f"after: the job id of {run.name} is not known", hint=f"clusterddp status {run.name} asks Slurm for it"
        )
    return record.job_id


def place(job: JobSpec, request: Request) -> Placement:
    """Place the ranks on nodes and plan the job.

    Raises: UsageError, PreflightError: Slurm could not run the job, or not from this directory.
    """
    refuse_odd_path(request.runs_dir)
    shared = check_shared(
        request.runs_dir, "runs", "--runs DIR or CLUSTERDDP_RUNS names a directory that all nodes share"
    )
    if job.entry and job.entry.batch_script:
        return _place_batch_script(job, Path(job.entry.batch_script), request, shared)
    dependency, waiting = find_dependency(job.after, request.runs_dir)
    options = choose_options(job, request.environ, dependency)
    placement = plan_slurm_placement(job, gpus=options.gpus, whole_nodes=options.sbatch.get("exclusive") is True)
    placement = dataclasses.replace(placement, threads_per_rank=job.resources.cpus_per_task)
    if job.entry:
        check_shared(request.working_dir, "what ranks work in", "submit from a directory that all nodes share")
    data = data_notes(filled_in(job)["train"])
    notes = (*placement.notes, *options.notes, *waiting, *shared, *storage_notes(), *data)
    container = None
    if job.container:
        container = job.container.model_dump(mode="json") | {"gpus": options.gpus, "python": job.python or "python3"}
    slurm = SlurmPlan(  # place_slurm adds what depends on the run's directory
        sbatch_options=options.sbatch,
        srun_options=options.srun,
        container=container,
        mounts=directories_used(filled_in(job), request.working_dir),
        variables=tuple(sorted(travelling_variables(request.environ))),
        script=read_template(SCRIPT),
        arguments=(sys.executable, "", *_start_paths(request.environ)),
    )
    return dataclasses.replace(placement, notes=notes, slurm=slurm)


_WAIT_HINT = "clusterddp submit --wait waits; leave out #SBATCH --wait, and unset SBATCH_WAIT"


def _place_batch_script(job: JobSpec, path: Path, request: Request, shared: Sequence[str]) -> Placement:
    """Plan the job of a user's batch script: sbatch reads its options, and ranks are those of its steps."""
    assert job.entry is not None
    assert request.submission is not None
    given = options_of(request.submission, job.slurm)
    options: Options = {name: value for name, value in job.slurm.items() if value is not False}
    if "wait" in given or "SBATCH_WAIT" in request.environ:
        raise UsageError(f"{path.name}: --wait of sbatch holds the submit until the job has ended", hint=_WAIT_HINT)
    comment = options.get("comment") or request.environ.get("SBATCH_COMMENT") or given.value("comment")
    if comment:
        options["comment"] = comment  # ours follows it on the command line, which overrides the script's
    placement = plan_slurm_placement(job, gpus=job.device != "cpu", whole_nodes=False)
    command = shlex.join(isolated_command("clusterddp.places.slurm.batch"))
    head = head_of(request.submission).decode(errors="surrogateescape")
    slurm = SlurmPlan(
        sbatch_options=options,
        srun_options={},
        container=None,
        mounts=(),
        variables=(),
        script=f"#!/bin/bash -p\n{head}{'' if head.endswith(chr(10)) or not head else chr(10)}"
        f"trap '' TERM  # until Python handles it\nexec {command} \"$@\"\n",
        file=f"{SCRIPT_FOLDER}/{path.name}",
        directory=str(request.working_dir),
        job_directory=str(request.working_dir / given.value("chdir")),
        arguments=("", *map(str, job.entry.args)),
    )
    return dataclasses.replace(placement, notes=(*shared, *storage_notes()), slurm=slurm)


def plan_slurm_placement(job: JobSpec, *, gpus: bool, whole_nodes: bool) -> Placement:
    """Place the ranks on the nodes of a job; Slurm chooses hosts and GPUs at its start.

    `gpus`: the job asks for GPUs. `whole_nodes`: it has all cores of its nodes.
    Raises: PreflightError: the spec asks for nccl and for no GPUs.
    """
    per_node, num_nodes = job.resources.ranks_per_node, job.resources.nodes
    gpus = gpus and job.device != "cpu"
    nodes = tuple(
        Node(
            node_rank=node_rank,
            host=f"(node {node_rank} of the job)",
            ranks=tuple(range(node_rank * per_node, (node_rank + 1) * per_node)) if node_rank < num_nodes else (),
            spare=0 if node_rank < num_nodes else per_node,
        )
        for node_rank in range(num_nodes + job.num_spares)
    )
    notes = []
    if job.elastic:
        least = job.elastic.min_nodes or num_nodes
        asks, left = format_count(num_nodes + job.num_spares, "node"), "1 is" if least == 1 else f"{least} are"
        after = f"when one is lost, but not the first, the next attempt begins in the same job if {left} left"
        notes.append(f"elastic: the job asks for {asks}; {after}")
    if job.device == "auto" and not gpus and job.resources.gpus_per_node is None:
        notes.append("resources.gpus_per_node is not set: the job asks for no GPU, its ranks compute on the CPU")
    if job.resources.cpus_per_task is None:
        few = "those that Slurm gives the job, often one for each rank; workers that load data need more"
        cores = "all of its cores" if whole_nodes else few
        notes.append(f"resources.cpus_per_task is not set: the ranks of a node share {cores}")
    return Placement.elsewhere(job, nodes, gpus=gpus, notes=tuple(notes))


def refuse_odd_path(runs_dir: Path) -> None:
    """Refuse a path that Slurm would change."""
    reasons = {
        "%": "Slurm replaces % in the path of a log by the job's ids",
        "\\": "Slurm removes it from paths",
    }
    for char in str(runs_dir):
        reason = reasons.get(char) or ("" if char.isprintable() else "Slurm stores a path on one line")
        if reason:
            raise UsageError(
                f"{str(runs_dir)!r}: has {char!r}; {reason}",
                hint="use another directory with --runs DIR or CLUSTERDDP_RUNS",
            )

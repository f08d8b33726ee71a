"""sbatch's options for one run: from the spec, our defaults and the user's SBATCH_* variables, in this order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    srun: Options = {name: value for name, value in own.items() if name in SRUN_OPTIONS}
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
    options: Options = {
        "nodes": str(resources.nodes),
        "ntasks": str(resources.nodes * _tasks_per_node(job)),
        "ntasks_per_node": str(_tasks_per_node(job)),
        "cpus_per_task": str(_cores_per_task(job)),
    }
    if job.notify and job.notify.mail:
        options |= {"mail_user": job.notify.mail, "mail_type": job.notify.mail_types}
    return options | ({"time": str(resources.time)} if resources.time else {})


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
            honoured[name] = _switch_value(environ[variable]) if name in _SWITCHES else environ[variable]
            notes.append(f"{_argument(name, honoured[name])} comes from {variable} in your environment")
    return honoured, tuple(notes)


def _is_taken(name: str, options: Iterable[str]) -> bool:
    groups = (MEMORY_OPTIONS, REQUEUE_OPTIONS, GPU_OPTIONS | {"gres", "tres_per_task"})
    return name in options or any(name in group and not group.isdisjoint(options) for group in groups)


def _switch_value(text: str) -> str | bool:
    return text if text.lower() in {"user", "mcs", "topo", "off"} else True


def _argument(name: str, value: str | bool) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return "--kill-on-invalid-dep=yes" if name == "kill_on_invalid_dep" else option
    return f"{option}={value}"


def _tasks_per_node(job: JobSpec) -> int:
    """Return how many processes clusterddp or Slurm starts on each node."""
    once = job.entry is not None and job.entry.owns_ranks
    return 1 if once else job.resources.ranks_per_node


def _cores_per_task(job: JobSpec) -> int:
    """Return how many cores each started process needs: a program that starts ranks needs those of all."""
    return (job.resources.cpus_per_task or 1) * (job.resources.ranks_per_node // _tasks_per_node(job))

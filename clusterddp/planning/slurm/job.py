"""A submit to Slurm as a value: the argv of sbatch and srun, the script, the variables of the ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.planning.processes import process_environment, travelling_variables
from clusterddp.planning.slurm.container import container_flags, container_words
from clusterddp.planning.slurm.options import JobOptions, Options, option_argv
from clusterddp.run.directory import RunDir
from clusterddp.slurm.identity import job_name, job_tag
from clusterddp.spec.slurm_options import BIND_OPTIONS
from clusterddp.system.templates import read_template

SCRIPT = "slurm_job.sh"
TASK_MODULE = "clusterddp.node.task"
SLURM_SUPERVISOR = "clusterddp.node.slurm_supervisor"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmPlan:
    """One job before its submit; sbatch gets exactly these values."""

    sbatch_options: dict[str, str | bool]
    """sbatch's options that follow from the spec and the user's environment, by their long names."""
    srun_options: dict[str, str | bool]
    container: dict[str, Any] | None
    mounts: tuple[str, ...]
    """Directories that the container needs in addition to the run's and the user's own mounts."""
    variables: tuple[str, ...]
    """Names of the submitting shell's variables that the ranks get, from launcher/environment.json."""
    script: str
    """Text of the batch script, the same for every run."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    sbatch: tuple[str, ...] = ()
    """argv before the script and its arguments."""
    srun: tuple[str, ...] = ()
    """argv up to and including RUN_DIR; the attempt follows."""

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def plan_slurm(
    options: JobOptions, *, container: dict[str, Any] | None, mounts: tuple[str, ...], environ: Mapping[str, str]
) -> SlurmPlan:
    """Plan the job of one run; `place_slurm` adds what depends on the run's directory."""
    return SlurmPlan(
        sbatch_options=options.sbatch,
        srun_options=options.srun,
        container=container,
        mounts=mounts,
        variables=tuple(sorted(travelling_variables(environ))),
        script=read_template(SCRIPT),
        arguments=(sys.executable, "", *_start_paths(environ)),
    )


def place_slurm(plan: SlurmPlan, *, name: str, token: str, run_dir: Path, attempt: int) -> SlurmPlan:
    """Fill in what depends on the run's directory and on the first attempt of the job."""
    tag = job_tag(token, attempt)
    python, _, *paths = plan.arguments
    return dataclasses.replace(
        plan,
        arguments=(python, str(run_dir), *paths),
        sbatch=sbatch_argv(
            plan.sbatch_options,
            name=job_name(name, tag),
            comment=f"clusterddp {run_dir.name} {tag}",
            directory=RunDir(run_dir).launcher_dir,
        ),
        srun=_srun_argv(plan, run_dir),
    )


def sbatch_argv(
    options: Mapping[str, str | bool], *, name: str, comment: str, directory: Path, log: str = "job.log"
) -> tuple[str, ...]:
    """Return sbatch's argv before the script; the comment of the spec comes before ours."""
    users = options.get("comment")
    ours: Options = {
        "parsable": True,
        "job_name": name,
        "comment": f"{users}; {comment}" if isinstance(users, str) and users else comment,
        "export": "NONE",
        "chdir": str(directory),
        "output": str(directory / log),
        "open_mode": "append",
    }
    rest = {option: value for option, value in options.items() if option != "comment"}
    return ("sbatch", *option_argv(ours), *option_argv(rest))


def _srun_argv(plan: SlurmPlan, run_dir: Path) -> tuple[str, ...]:
    options = plan.sbatch_options
    ours: Options = {
        "kill_on_bad_exit": "1",
        "nodes": options["nodes"],
        "ntasks": options["ntasks"],
        "ntasks_per_node": options["ntasks_per_node"],
        # srun of 22.05 to 23.02 does not inherit it from the job.
        "cpus_per_task": options["cpus_per_task"],
        # Ranks with neighbouring numbers then share a socket, and usually their GPUs; Slurm's default is cyclic.
        "distribution": options.get("distribution") or "block:block",
        "unbuffered": True,
        "label": True,
        "open_mode": "append",
        # srun would inherit NONE from the environment of the batch step.
        "export": "ALL",
        "output": str(RunDir(run_dir).launcher_dir / "tasks.log"),
    }
    inside = container_words(plan.container, mounts=plan.mounts, run_dir=run_dir)
    flags = container_flags(plan.container, mounts=plan.mounts, run_dir=run_dir)
    task = (*inside, TASK_MODULE, str(run_dir))
    return (*_without_binding(options), "srun", *option_argv(ours), *option_argv(plan.srun_options), *flags, *task)


def _without_binding(options: Mapping[str, str | bool]) -> tuple[str, ...]:
    """Return the words before srun with which every rank sees all GPUs of its node, unless the user binds them.

    sbatch sets variables for GPUs per task, from which srun gives each task only its own GPUs. `--gpu-bind=none` does
    not help: srun 20.11 refuses it, and with 22.05 no task sees any GPU.
    """
    by_task = {"gpus_per_task": "SLURM_GPUS_PER_TASK", "tres_per_task": "SLURM_TRES_PER_TASK"}
    if by_task.keys().isdisjoint(options) or not BIND_OPTIONS.isdisjoint(options):
        return ()
    return ("env", *(f"--unset={variable}" for variable in by_task.values()))


def _start_paths(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return PYTHONPATH and LD_LIBRARY_PATH for a job's empty environment, without empty values at the end."""
    environment = process_environment("", environ)
    paths = [environment.get("PYTHONPATH", ""), environment.get("LD_LIBRARY_PATH", "")]
    while paths and not paths[-1]:
        paths.pop()
    return tuple(paths)

"""`exec` and `shell` on Slurm: a step of the run's job on the rank's node, which shares all that the job has."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.launchers.exec_command import MODULE, ExecCommand, run_child
from clusterddp.launchers.slurm.jobs import find_job
from clusterddp.planning.environment import python_path
from clusterddp.planning.plan import read_plan
from clusterddp.slurm.commands import run_slurm, slurm_environment
from clusterddp.slurm.jobs import Phase

if TYPE_CHECKING:
    from clusterddp.run.directory import AttemptDir, RunDir
    from clusterddp.run.record import RunRecord

_OVERLAPS_SINCE = (20, 11)
"""The release from which on steps share nothing by default, and take `--overlap`."""
_SHARES_GPUS_SINCE = (22, 5)
"""The release from which on such a step shares GPUs, too: before, it waits for those that the ranks have."""


def exec_in_job(
    run: RunDir, record: RunRecord, attempt: AttemptDir, command: ExecCommand, environ: Mapping[str, str]
) -> int:
    """Run a command in a step of the run's job; return its exit code.

    Raises: SlurmError: Slurm could not be asked. UsageError: the ranks are in a container. ClusterddpError: the job
    does not run.
    """
    plan = read_plan(run)
    job = find_job(run, record, environ)
    if job is None or job.phase is not Phase.RUNNING:
        raise ClusterddpError(f"{run.name}: its job does not run: {job.state if job else 'Slurm has none'}")
    assert plan.slurm is not None
    step = step_argv(
        _plain_id(job.job_id, environ),
        command,
        cpus_per_task=str(plan.slurm.sbatch_options["cpus_per_task"]),
        version=_read_version(environ),
    )
    refuse_container(run.name, plan.slurm.container, command, step)
    argv = [*step, f"--chdir={run.launcher_dir}", sys.executable, "-m", MODULE]
    environment = slurm_environment(environ) | python_path(environ)
    return run_child([*argv, *command.arguments(str(run.path), attempt)], environment, command, cwd=run.launcher_dir)


def step_argv(job_id: str, command: ExecCommand, *, cpus_per_task: str, version: tuple[int, int]) -> list[str]:
    """Return the argv of srun up to the command.

    The step has the cores of a rank, all memory of the job, and all of its GPUs, because it asks for none. Before
    22.05 Slurm gives it no GPU: that is seen where it confines devices.
    """
    has_terminal = command.keyboard is not None and command.keyboard.terminal
    return [
        "srun",
        f"--jobid={job_id}",
        *(["--overlap"] if version >= _OVERLAPS_SINCE else []),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={command.host}",
        f"--cpus-per-task={cpus_per_task}",
        "--mem=0",
        *(["--gres=none"] if version < _SHARES_GPUS_SINCE else []),
        "--mpi=none",
        "--export=ALL",
        "--quiet",
        "--disable-status",  # the first Ctrl-C goes to the command, a second one within 1 s ends srun
        "--pty" if has_terminal else "--unbuffered",
    ]


def refuse_container(name: str, container: Mapping[str, Any] | None, command: ExecCommand, step: Sequence[str]) -> None:
    """Refuse to run beside ranks in a container, whose files and processes the command would not see.

    Raises: UsageError: they are in one; the hint has the command that starts another container of its image.
    """
    if container is None:
        return
    image = str(container["image"])
    words = [word for word in step if word not in {"--unbuffered", "--quiet", "--disable-status", "--pty"}]
    enter = [f"--container-image={image}"] if container["runtime"] == "pyxis" else ["apptainer", "exec", image]
    raise UsageError(
        f"{name}: its ranks are in a container, in which clusterddp starts no command",
        hint=f"another container of its image on {command.host}: {shlex.join([*words, '--pty', *enter, '/bin/sh'])}",
    )


def _plain_id(job_id: str, environ: Mapping[str, str]) -> str:
    """Return the id by which srun finds a job: of the task of an array its own number."""
    if "_" not in job_id:
        return job_id
    return run_slurm(["squeue", "--noheader", "--format=%A", f"--jobs={job_id}"], environ=environ).strip()


def _read_version(environ: Mapping[str, str]) -> tuple[int, int]:
    """Read the release of srun: `slurm-wlm 22.05.8`; of an unknown answer the newest form is assumed."""
    match = re.search(r"(\d{1,4})\.(\d{1,4})", run_slurm(["srun", "--version"], environ=environ))
    return (int(match[1]), int(match[2])) if match else _OVERLAPS_SINCE

"""The details that a plan shows: rank 0's variables, the files, the commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clusterddp.planning.command_lines import launcher_command, rank_command
from clusterddp.planning.slurm.job import SCRIPT, SlurmPlan
from clusterddp.planning.ssh.plan import SshPlan
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.supervisors import SUPERVISOR_COMMAND

ENTRYS = "the entry: how it is started"
"""The origin of variables that the start-up of a rank sets for its entry."""
_PORT = "a free port, chosen at the start"


def rank0_variables(
    gang: Gang, run_dir: str, slurm: SlurmPlan | None, ssh: SshPlan | None
) -> dict[str, dict[str, str]]:
    """Compute the variables of rank 0, each with its origin; `run_dir`: the run's directory on the ranks' hosts."""
    if not gang.master_addr:
        head = ssh.hosts[0].host if ssh else "the first node"
        gang = dataclasses.replace(gang, master_addr=f"{head}'s address, found at the start")
    variables = gang.variables_of(0, run_dir=run_dir, attempt=0, master_port=gang.master_port or _PORT)
    shown = {name: {"value": variable.value, "origin": variable.origin} for name, variable in variables.items()}
    changes = gang.entry.environment({name: variable.value for name, variable in variables.items()})
    for name, value in changes.items():
        if value is None:
            shown.pop(name, None)
        elif name not in shown or shown[name]["value"] != value:
            shown[name] = {"value": value, "origin": ENTRYS}
    if "CUDA_VISIBLE_DEVICES" in gang.env:
        return shown
    if slurm and not gang.on_cpu:
        shown["CUDA_VISIBLE_DEVICES"] = {"value": "the GPUs that Slurm gives", "origin": "Slurm"}
    if ssh and ssh.hosts[0].gpus and not gang.nodes[0].gpus:
        value = f"{ssh.hosts[0].gpus} of {ssh.hosts[0].host}'s, leased at the start"
        shown["CUDA_VISIBLE_DEVICES"] = {"value": value, "origin": "the GPUs of the node"}
    return shown


def files_written(run: RunDir, *, with_code: bool, with_job: bool) -> tuple[str, ...]:
    """List the paths that the submit writes on this machine."""
    attempt = run.attempt(0)
    paths = [run.spec, run.plan, run.record, run.environment, *([run.code] if with_code else [])]
    paths += [attempt.path, run.checkpoints, run.tensorboard, run.launcher_dir]
    if with_job:
        paths += [run.launcher_dir / SCRIPT, run.job_environment, run.job_secrets]
    return tuple(str(path) for path in paths)


def files_on_hosts(ssh: SshPlan, run_dir: str, *, with_code: bool) -> tuple[str, ...]:
    """List the paths that the submit writes on every host, besides the files of `ssh.send`."""
    kept = [f"{ssh.root}/packages/<sha256 of this package>", run_dir]
    code = [f"{ssh.root}/code/<sha256 of the code>"] if with_code else []
    return (*kept, *code)


def commands_started(
    gang: Gang, run_dir: Path, slurm: SlurmPlan | None, ssh: SshPlan | None, on_host: str
) -> tuple[tuple[str, ...], ...]:
    """List the argv of all processes, in the order of their start: the launcher, supervisors, a rank.

    `on_host`: the run's directory on the ranks' hosts.
    """
    if ssh:
        from clusterddp.remote.session import constant_command

        pythons = [node.python_words for node in ssh.hosts]
        supervisors = [(python, *SUPERVISOR_COMMAND[1:]) for python in pythons]
        return ((constant_command(),), *supervisors, (pythons[0], *rank_command(Path(on_host))[1:]))
    supervisors = [SUPERVISOR_COMMAND for _ in gang.nodes]
    started = (*supervisors, rank_command(run_dir))
    if slurm:
        script = str(RunDir(run_dir).launcher_dir / SCRIPT)
        return ((*slurm.sbatch, script, *slurm.arguments), (*slurm.srun, "0"), *started)
    return (launcher_command(run_dir, 0), *started)

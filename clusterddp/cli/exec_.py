"""The command exec: a command, or a shell, beside a running rank. This process becomes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import click

from clusterddp.cli.arguments import command, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal
from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.seal import demand_sealed
from clusterddp.system.own_directory import demand_own

_SHELL = ("/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}"')


@command("exec")
@works_at_login
@run_argument(default=None)
@click.argument("argv", metavar="[-- CMD [ARG]...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--rank", type=click.IntRange(min=0), metavar="N", default=0, help="Beside rank N; 0 by default.")
@runs_option
@click.pass_obj
def exec_(terminal: Terminal, *, name: str, argv: tuple[str, ...], rank: int, runs_dir: Path) -> NoReturn:
    """Run a command, or without CMD a shell, beside a running rank: on its machine, in its job, with its environment.

    It is srun on Slurm and your own ssh over SSH. The command is not a rank: RANK, MASTER_PORT and so on are
    CLUSTERDDP_EXEC_RANK, CLUSTERDDP_EXEC_MASTER_PORT there. It is killed when its run ends. The exit code is its own.

    \b
    clusterddp exec RUN
    clusterddp exec RUN -- nvidia-smi
    clusterddp exec RUN --rank 5 -- sh -c 'df -h . && ls'
    """
    from clusterddp.places.registry import launcher_named
    from clusterddp.places.slurm.commands import slurm_environment
    from clusterddp.places.ssh.sync import Synchroniser
    from clusterddp.places.state import read_state
    from clusterddp.planning.processes import python_path
    from clusterddp.run.record import read_rank, read_run
    from clusterddp.run.state import RunState
    from clusterddp.run.steps import shown_step

    run = RunDir(find_run(runs_dir, name).path.absolute())
    demand_own(run.path)
    record = read_run(run)
    if record.is_hold:
        raise UsageError(f"{run.name}: is a hold, which has no ranks", hint="clusterddp exec RUN takes a run in it")
    demand_sealed(run)  # root, too, would start the command as another user than the rank's
    with Synchroniser([run], terminal.environ, interval_s=0.5) as sync:
        sync.update()
        view = read_state(run)
    if view.state is RunState.UNKNOWN:
        raise PreflightError(f"{run.name}: whether its ranks run is not known: {view.reason}")
    if view.state is not RunState.RUNNING or view.attempt is None:
        hint = f"clusterddp status {run.name} shows when its ranks run"
        if view.finished:
            hint = f"clusterddp logs {run.name} shows what it wrote; clusterddp submit {run.name} starts it again"
        raise UsageError(f"{run.name} has no running rank: it is {view.state.value}", hint=hint)
    step = shown_step(run, view.attempt)
    beside = read_rank(step.attempt(view.attempt), rank)
    if beside is None or beside.ended is not None:
        raise UsageError(f"{run.name}: rank {rank} does not run", hint=f"clusterddp status {run.name}")
    launcher = launcher_named(record.launcher, terminal.environ)
    words = [f"{view.attempt}/{step.step}" if step.step else str(view.attempt), str(rank), *(argv or _SHELL)]
    started = launcher.exec_argv(run, record, beside, words, terminal=os.isatty(0))
    os.chdir(run.launcher_dir)  # no file there hides a module of Python's
    try:
        os.execvpe(started[0], started, slurm_environment(terminal.environ) | python_path(terminal.environ))
    except FileNotFoundError as error:
        raise ClusterddpError(f"there is no {started[0]} on PATH") from error


COMMANDS = {"exec": exec_}

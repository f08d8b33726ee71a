"""The commands exec and shell: a command, or an interactive shell, beside a running rank."""

from __future__ import annotations

from pathlib import Path

import click

from clusterddp.cli.arguments import command, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal
from clusterddp.errors import UsageError
from clusterddp.run.find import find_run

_SHELL = ("/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}"')


@command("exec")
@works_at_login
@run_argument(default=None)
@click.argument("argv", metavar="[--] CMD [ARG]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--rank", "ranks", metavar="RANKS", default="0", help="Beside rank 0 (default), or beside each of 0,3-5, or all."
)
@runs_option
@click.pass_obj
def exec_(terminal: Terminal, *, name: str, argv: tuple[str, ...], ranks: str, runs_dir: Path) -> int:
    """Run a command beside a running rank: on its machine, in its job and directory, with its environment.

    The command is no rank: RANK, MASTER_PORT and the like are CLUSTERDDP_EXEC_RANK, CLUSTERDDP_EXEC_MASTER_PORT there.
    It ends with its rank, and with this command. The exit code is its own; with several ranks each line begins with its
    rank, and the exit code is the highest one.

    \b
    clusterddp exec RUN -- nvidia-smi
    clusterddp exec RUN --rank 5 -- sh -c 'df -h . && ls'
    clusterddp exec RUN --rank all -- nvidia-smi --query-gpu=memory.used --format=csv
    """
    from clusterddp.look.logs import parse_ranks
    from clusterddp.run.record import read_gang
    from clusterddp.submission.exec_ranks import find_running
    from clusterddp.system.keyboard import Keyboard, has_terminal

    if not argv:
        raise UsageError("no command is given", hint=f"clusterddp exec {name} --rank {ranks} -- nvidia-smi")
    run = find_run(runs_dir, name)
    chosen = parse_ranks(ranks, read_gang(run).world_size)
    running = find_running(run, terminal.environ, ranks=chosen)
    keyboard = Keyboard(terminal=has_terminal()) if len(chosen) == 1 else None
    return running.exec_command(argv, terminal.environ, keyboard)


@command("shell")
@works_at_login
@run_argument()
@click.option("--rank", type=click.IntRange(min=0), metavar="K", help="Beside rank K; 0 by default.")
@click.option("--node", "node_rank", type=click.IntRange(min=0), metavar="N", help="Beside the first rank of node N.")
@runs_option
@click.pass_obj
def shell(terminal: Terminal, *, name: str, rank: int | None, node_rank: int | None, runs_dir: Path) -> int:
    """Open a shell beside a running rank: on its machine, in its job and directory, with its environment.

    As with exec the shell is no rank, and ends with its rank.

    \b
    clusterddp shell RUN
    clusterddp shell RUN --node 1
    """
    from clusterddp.submission.exec_ranks import find_running
    from clusterddp.system.keyboard import Keyboard, has_terminal

    if rank is not None and node_rank is not None:
        raise UsageError("--rank and --node both choose the place of the shell, expected one of them")
    if not has_terminal():
        hint = f"clusterddp exec {name} -- CMD runs a command"
        raise UsageError("a shell needs a terminal as standard input, output and error", hint=hint)
    running = find_running(find_run(runs_dir, name), terminal.environ, ranks=[rank or 0], node_rank=node_rank)
    return running.exec_command(_SHELL, terminal.environ, Keyboard(terminal=True))


COMMANDS = {"exec": exec_, "shell": shell}

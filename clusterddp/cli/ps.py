"""The commands ps and gc: list the processes of runs on machines, and end those that a power cut or a kill left."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import Age, HostName, RunName, collected, command, output_option, runs_option
from clusterddp.cli.terminal import Terminal, columns_of, confirm, put, put_json, say
from clusterddp.errors import PreflightError, SshError, UsageError
from clusterddp.run.find import find_run
from clusterddp.run.record import read_run

if TYPE_CHECKING:
    from clusterddp.look.ps import Cleanup, Machines

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The run and the machines that the options of ps and gc name."""

    name: str | None
    hosts: tuple[str, ...]
    python: str | None
    root: str | None
    runs_dir: Path

    @property
    def tokens(self) -> list[str] | None:
        """The token of the run; None: all runs."""
        return None if self.name is None else [read_run(find_run(self.runs_dir, self.name)).token]

    def open(self, environ: Mapping[str, str]) -> Machines:
        """Return the machines.

        Raises: UsageError: the run is on Slurm.
        """
        from clusterddp.look.ps import DEFAULT_ROOT, Hosts, ThisMachine, accesses_of
        from clusterddp.planning.ssh.plan import HostAccess
        from clusterddp.spec.hosts import expand_all

        root = self.root or DEFAULT_ROOT
        if self.hosts:
            return Hosts(
                [HostAccess(host=host, python=self.python, root=root) for host in expand_all(self.hosts)], environ
            )
        if self.python:
            raise UsageError("--python is that of --hosts, and there are none")
        if self.name is None:
            return ThisMachine(self.runs_dir, root)
        run = find_run(self.runs_dir, self.name)
        if of_run := accesses_of(run):
            return Hosts(of_run, environ)
        if read_run(run).launcher == "slurm":
            raise UsageError(
                f"{run.name} runs on Slurm, which answers for its processes",
                hint=f"clusterddp cancel {run.name}; --hosts NODE,.. looks at nodes that SSH reaches",
            )
        return ThisMachine(self.runs_dir)


def _machine_options(function: _F) -> _F:
    """Declare the run, its machines, and how hosts are used; the command receives a `Selection`."""
    function = collected("selection", Selection)(function)
    for decorate in (
        runs_option,
        output_option,
        click.option(
            "--dir",
            "root",
            metavar="DIR",
            help="Directory of runs on a machine: ssh.dir of the spec, else ~/.clusterddp.",
        ),
        click.option("--python", metavar="PATH", help="The Python on --hosts; default: python3."),
        click.option(
            "--hosts",
            multiple=True,
            metavar="HOST,..",
            type=HostName(),
            help="These hosts over SSH, not this machine: node[1-4],gpu7.",
        ),
        click.argument("name", metavar="[RUN]", type=RunName(), default=None, required=False),
    ):
        function = decorate(function)
    return function


@command("ps")
@_machine_options
@click.pass_obj
def ps(terminal: Terminal, *, selection: Selection, output: str) -> int:
    """Show your runs on this machine, on --hosts, or on the hosts of RUN: processes, GPUs, supervisors.

    A process is orphaned when the supervisor of its run is gone from the host, with the guard and the task beside it;
    `gc` kills those. Processes are found by the cookie of their run, CLUSTERDDP_COOKIE in their environment: one that
    has overwritten its environment is not found. Exit code 3 when a host cannot be asked.
    """
    from clusterddp.cli.text.ps import failure_json, process_lines, run_json, say_unmarked
    from clusterddp.look.ps import left_over_of

    with selection.open(terminal.environ) as machines:
        found = machines.look(selection.tokens)
    if output == "json":
        rows = [
            failure_json(host, runs)
            if isinstance(runs, SshError)
            else {"host": host, "ok": True, "runs": [run_json(run) for run in runs]}
            for host, runs in found.items()
        ]
        put_json({"hosts": rows})
    else:
        put("\n".join(process_lines(found, columns=columns_of(sys.stdout))))
        left_over = left_over_of(found)
        say_unmarked(left_over)
        if left_over:
            words = [selection.name] if selection.name else []
            words += ["--hosts", ",".join(left_over)] if selection.hosts else []
            say(f"{shlex.join(['clusterddp', 'gc', *words])} kills the orphaned processes")
    return PreflightError.exit_code if any(isinstance(runs, SshError) for runs in found.values()) else 0


@command("gc")
@_machine_options
@click.option(
    "--older-than",
    "older_than_s",
    type=Age(),
    metavar="30d",
    help="Also remove runs that ended that long ago, and what they needed.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be ended and removed; do nothing.")
@click.pass_obj
def gc(
    terminal: Terminal,
    *,
    selection: Selection,
    older_than_s: float | None,
    yes: bool,
    dry_run: bool,
    output: str,
) -> int:
    """Kill orphaned processes of your runs on this machine, on --hosts, or on the hosts of RUN, after asking.

    Kills only processes with the cookie of a run that has no live supervisor, guard or task: never a live run,
    never a process of another user. With --older-than 30d (h, d, w) it also removes directories under ~/.clusterddp of
    those machines: runs that ended, with their checkpoints there; snapshots and packages that no run needs.

    Exit code 1 when something cannot be ended or removed, 3 when a host cannot be asked.
    """
    from clusterddp.cli.text import ps as text
    from clusterddp.look.ps import Cleanup

    if selection.name and older_than_s:
        raise UsageError("--older-than is about all runs of a machine, not about one", hint="leave RUN out")
    with selection.open(terminal.environ) as machines:
        show = say if output == "json" else put
        cleanup = Cleanup(machines=machines, tokens=selection.tokens, older_than_s=older_than_s)
        cleanup.look()
        if lines := text.cleanup_lines(cleanup, columns=columns_of(sys.stdout)):
            show("\n".join(lines))
        text.say_kept(cleanup)
        if not _carry_out(cleanup, show, yes=yes, dry_run=dry_run):
            return 1
    if output == "json":
        put_json(text.cleanup_json(cleanup))
    return cleanup.exit_code


COMMANDS = {"ps": ps, "gc": gc}


def _carry_out(cleanup: Cleanup, show: Callable[[str], None], *, yes: bool, dry_run: bool) -> bool:
    """End and remove what was found, after asking; return False when the user refuses."""
    from clusterddp.cli.text import ps as text
    from clusterddp.look.ps import answers

    question = text.cleanup_question(cleanup)
    if not question:
        if answers(cleanup.found):
            say("no orphaned processes" + (" on the others" if cleanup.exit_code else ""))
    elif not dry_run:
        refused = "nothing was ended, nothing was removed"
        if not (yes or confirm(question, hint="--yes, or -n to look only", refused=refused)):
            say(refused)
            return False
        cleanup.carry_out()
        text.say_removed(cleanup, show)
    return True

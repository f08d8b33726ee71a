"""The commands ps and gc: what lives of runs on machines, and the end of what a power cut or a kill has left there."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import RunName, command, output_option, runs_option
from clusterddp.cli.hosts import HostName
from clusterddp.cli.terminal import Terminal, put, put_json, say
from clusterddp.errors import PreflightError, SshError, UsageError
from clusterddp.run.directory import find_run
from clusterddp.run.record import read_run

if TYPE_CHECKING:
    from clusterddp.look.ps import Machines

_F = TypeVar("_F", bound=Callable[..., Any])
_AGE = re.compile(r"([0-9]{1,5})([hdw])")
_UNIT_S = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def _machine_options(function: _F) -> _F:
    """Declare which machines are meant, which of the runs there, and how hosts are used."""
    for decorate in (
        runs_option,
        output_option,
        click.option("--dir", "root", metavar="DIR", help="ssh.dir of the spec, where it is not ~/.clusterddp."),
        click.option("--python", metavar="PATH", help="The Python of --hosts, where it is not python3."),
        click.option("--hosts", multiple=True, metavar="HOST,..", type=HostName(), help="Not here: node[1-4],gpu7."),
        click.argument("name", metavar="[RUN]", type=RunName(), default=None, required=False),
    ):
        function = decorate(function)
    return function


@command("ps")
@_machine_options
@click.pass_obj
def ps(
    terminal: Terminal,
    *,
    name: str | None,
    hosts: tuple[str, ...],
    python: str | None,
    root: str | None,
    output: str,
    runs_dir: Path,
) -> int:
    """Show your runs on this machine, on --hosts, or on the hosts of RUN: processes, GPUs, who answers for them.

    A run is left over when no supervisor, guard or task of it lives on a host while other processes of it do; `gc` ends
    those. Processes are known by the cookie in their environment: one that has overwritten its environment is not
    found. Exit code 3 when a host cannot be asked.
    """
    from clusterddp.cli.clearing import say_unmarked
    from clusterddp.cli.ps_text import failure_json, process_lines, run_json

    with _open(terminal, name, hosts=hosts, python=python, root=root, runs_dir=runs_dir) as machines:
        found = machines.look(_tokens(name, runs_dir))
    if output == "json":
        rows = [
            failure_json(host, runs)
            if isinstance(runs, SshError)
            else {"host": host, "ok": True, "runs": [run_json(run) for run in runs]}
            for host, runs in found.items()
        ]
        put_json({"hosts": rows})
    else:
        put("\n".join(process_lines(found)))
        left_over = [
            (host, run)
            for host, runs in found.items()
            if not isinstance(runs, SshError)
            for run in runs
            if run.answered_by is None
        ]
        for host, run in left_over:
            say_unmarked(host, run)
        if left_over:
            words = [name] if name else []
            words += ["--hosts", ",".join(dict.fromkeys(host for host, _ in left_over))] if hosts else []
            say(f"{shlex.join(['clusterddp', 'gc', *words])} ends what is left over")
    return PreflightError.exit_code if any(isinstance(runs, SshError) for runs in found.values()) else 0


@command("gc")
@_machine_options
@click.option("--older-than", metavar="30d", help="Also remove runs that ended that long ago, and what they needed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("-n", "--dry-run", is_flag=True, help="Show it and do nothing.")
@click.pass_obj
def gc(
    terminal: Terminal,
    *,
    name: str | None,
    hosts: tuple[str, ...],
    python: str | None,
    root: str | None,
    older_than: str | None,
    yes: bool,
    dry_run: bool,
    output: str,
    runs_dir: Path,
) -> int:
    """End what is left over of your runs on this machine, on --hosts, or on the hosts of RUN, after asking.

    Only processes that carry the cookie of a run for which nobody answers: no live run, nothing of other people. With
    --older-than 30d (h, d, w) also directories under ~/.clusterddp of those machines: runs that ended, with their
    checkpoints there; snapshots and packages that no run needs.

    Exit code 1 when something would not go, 3 when a host cannot be asked.
    """
    from clusterddp.cli.clearing import Clearing

    older_than_s = _read_age(older_than) if older_than else None
    if name and older_than:
        raise UsageError("--older-than is about all runs of a machine, not about one", hint="leave RUN out")
    with _open(terminal, name, hosts=hosts, python=python, root=root, runs_dir=runs_dir) as machines:
        show = say if output == "json" else put
        tokens = _tokens(name, runs_dir)
        clearing = Clearing(machines=machines, tokens=tokens, older_than_s=older_than_s, put=show)
        clearing.look()
        if lines := clearing.lines():
            show("\n".join(lines))
        clearing.say_what_stays()
        if not clearing.question:
            if any(not isinstance(runs, SshError) for runs in clearing.found.values()):
                say("nothing is left over" + (" on the others" if clearing.exit_code else ""))
        elif not dry_run:
            if not (yes or _confirm(clearing.question)):
                say("nothing was ended, nothing was removed")
                return 1
            clearing.carry_out()
            clearing.tell()
    if output == "json":
        put_json(clearing.to_json())
    return clearing.exit_code


COMMANDS = {"ps": ps, "gc": gc}


def _open(
    terminal: Terminal,
    name: str | None,
    *,
    hosts: tuple[str, ...],
    python: str | None,
    root: str | None,
    runs_dir: Path,
) -> Machines:
    """Return the machines that are meant.

    Raises: UsageError: of a run on Slurm it is not known which they are.
    """
    from clusterddp.look.ps import DEFAULT_ROOT, Hosts, ThisMachine, accesses_of
    from clusterddp.spec.hosts import expand_all
    from clusterddp.ssh.session import HostAccess

    if hosts:
        accesses = [HostAccess(host=host, python=python, root=root or DEFAULT_ROOT) for host in expand_all(hosts)]
        return Hosts(accesses, terminal.environ)
    if python:
        raise UsageError("--python is that of --hosts, and there are none")
    if name is None:
        return ThisMachine(runs_dir, root or DEFAULT_ROOT)
    run = find_run(runs_dir, name)
    if of_run := accesses_of(run):
        return Hosts(of_run, terminal.environ)
    if read_run(run).launcher == "slurm":
        raise UsageError(
            f"{run.name} runs on Slurm, which answers for its processes",
            hint=f"clusterddp cancel {run.name}; --hosts NODE,.. looks at nodes that SSH reaches",
        )
    return ThisMachine(runs_dir)


def _tokens(name: str | None, runs_dir: Path) -> list[str] | None:
    return None if name is None else [read_run(find_run(runs_dir, name)).token]


def _read_age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None or not int(match[1]):
        # What is younger may be part of a submit that is under way.
        raise UsageError(f"--older-than {text}: an age of an hour or more is expected", hint="12h, 30d, 4w")
    return int(match[1]) * _UNIT_S[match[2]]


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask: standard input is no terminal", hint="--yes, or -n to look only")
    try:
        return click.confirm(question, err=True)
    except click.Abort as abort:
        raise KeyboardInterrupt("nothing was ended, nothing was removed") from abort

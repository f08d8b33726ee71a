"""The commands ps and gc: list the processes of runs on machines, and end those that a power cut or a kill left."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import Age, HostName, RunName, collected, command, output_option, runs_option
from clusterddp.cli.hosts import failure_json, failure_lines
from clusterddp.cli.terminal import (
    Column,
    Terminal,
    columns_of,
    confirm,
    duration,
    lay_out,
    put,
    put_json,
    say,
    say_error,
    to_columns,
)
from clusterddp.errors import ClusterddpError, PreflightError, SshError, UsageError
from clusterddp.places.ssh.sessions import errors_of, good_of
from clusterddp.run.find import find_run
from clusterddp.run.record import read_run
from clusterddp.run.seal import demand_sealed
from clusterddp.system.units import format_bytes, format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.run.leftovers import Ended, RunHere
    from clusterddp.run.removal import Removed, Storage
    from clusterddp.view.ps import Machines

_PIDS_SHOWN = 6
_ORPHANED = "orphaned"
_KINDS = {"run": "run", "code": "snapshot of code", "package": "clusterddp", "remnant": "transfer that was cut off"}
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
        from clusterddp.planning.ssh import SshNode
        from clusterddp.spec.hosts import expand_all
        from clusterddp.view.ps import DEFAULT_ROOT, Hosts, ThisMachine, hosts_of

        root = self.root or DEFAULT_ROOT
        if self.hosts:
            return Hosts(
                [SshNode(host=host, python=self.python, root=root) for host in expand_all(self.hosts)], environ
            )
        if self.python:
            raise UsageError("--python is that of --hosts, and there are none")
        if self.name is None:
            return ThisMachine(self.runs_dir, root)
        run = find_run(self.runs_dir, self.name)
        if of_run := hosts_of(run):
            return Hosts(of_run, environ)
        if read_run(run).launcher == "slurm":
            raise UsageError(
                f"{run.name} runs on Slurm, which answers for its processes",
                hint=f"clusterddp cancel {run.name}; --hosts NODE,.. looks at nodes that SSH reaches",
            )
        return ThisMachine(run.path.parent)


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
    `gc` kills those. Processes are found by CLUSTERDDP_COOKIE in their environment; children of ranks that
    have lost it, by a number in a resource limit. Exit code 3 when a host cannot be asked.
    """
    with selection.open(terminal.environ) as machines:
        found = machines.look(selection.tokens)
    if output == "json":
        rows = [
            failure_json(host, runs)
            if isinstance(runs, SshError)
            else {"host": host, "ok": True, "runs": [_run_json(run) for run in runs]}
            for host, runs in found.items()
        ]
        put_json({"hosts": rows})
    else:
        put("\n".join(_process_lines(found, columns=columns_of(sys.stdout))))
        left_over = _left_over_of(found)
        _say_unmarked(left_over)
        if left_over:
            words = [selection.name] if selection.name else []
            words += ["--hosts", ",".join(left_over)] if selection.hosts else []
            say(f"{shlex.join(['clusterddp', 'gc', *words])} kills the orphaned processes")
    return PreflightError.exit_code if errors_of(found) else 0


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

    Kills only processes that `ps` shows of a run that has no live supervisor, guard or task: never a live run,
    never a process of another user. With --older-than 30d (h, d, w) it also removes directories under ~/.clusterddp of
    those machines: runs that ended, with their checkpoints there; snapshots and packages that no run needs.

    Exit code 1 when something cannot be ended or removed, 3 when a host cannot be asked.
    """
    if selection.name and older_than_s:
        raise UsageError("--older-than is about all runs of a machine, not about one", hint="leave RUN out")
    if selection.name:
        demand_sealed(find_run(selection.runs_dir, selection.name))
    show = say if output == "json" else put
    with selection.open(terminal.environ) as machines:
        cleanup = Cleanup(found=machines.look(selection.tokens))
        if older_than_s is not None:
            cleanup.storages = machines.stored(older_than_s)
        columns = columns_of(sys.stdout)
        lines = _process_lines(cleanup.left_over, columns=columns) if cleanup.left_over else []
        lines += stored_lines(cleanup.storages, columns=columns)
        if lines := [*lines, *failure_lines({**cleanup.storages, **cleanup.found})]:
            show("\n".join(lines))
        _say_kept(cleanup)
        question = _question(cleanup)
        if not question and good_of(cleanup.found):
            say("no orphaned processes" + (" on the others" if cleanup.exit_code else ""))
        elif question and not dry_run:
            refused = "nothing was ended, nothing was removed"
            if not (yes or confirm(question, hint="--yes, or -n to look only", refused=refused)):
                say(refused)
                return 1
            cleanup.ended = machines.end(
                {host: [run.token for run in runs] for host, runs in cleanup.left_over.items()}
            )
            if older_than_s is not None:
                cleanup.removed = machines.remove(cleanup.removable, older_than_s)
            _say_done(cleanup, show)
    if output == "json":
        put_json({"hosts": [_host_json(cleanup, host) for host in cleanup.found]})
    return cleanup.exit_code


COMMANDS = {"ps": ps, "gc": gc}


@dataclass(kw_only=True)
class Cleanup:
    """What gc has found on each machine, and what it has ended and removed."""

    found: Mapping[str, list[RunHere] | SshError]
    storages: Mapping[str, Storage | SshError] = field(default_factory=dict)
    ended: Mapping[str, list[Ended] | SshError] = field(default_factory=dict)
    removed: Mapping[str, list[Removed] | SshError] = field(default_factory=dict)

    @property
    def left_over(self) -> dict[str, list[RunHere]]:
        """The runs without a supervisor, guard or task, by machine; machines without such runs are left out."""
        return _left_over_of(self.found)

    @property
    def removable(self) -> dict[str, list[str]]:
        """The places that can be removed, by machine; machines without are left out."""
        places = {host: [each.place for each in storage.removable] for host, storage in good_of(self.storages).items()}
        return {host: of_host for host, of_host in places.items() if of_host}

    @property
    def exit_code(self) -> int:
        replies = [*self.found.values(), *self.storages.values(), *self.ended.values(), *self.removed.values()]
        if any(isinstance(reply, SshError) for reply in replies):
            return PreflightError.exit_code
        alive = any(each.left for ended in good_of(self.ended).values() for each in ended)
        kept = any(each.error for removed in good_of(self.removed).values() for each in removed)
        return ClusterddpError.exit_code if alive or kept else 0


def _left_over_of(found: Mapping[str, list[RunHere] | SshError]) -> dict[str, list[RunHere]]:
    runs = {host: [run for run in of_host if run.answered_by is None] for host, of_host in good_of(found).items()}
    return {host: of_host for host, of_host in runs.items() if of_host}


def _process_lines(found: Mapping[str, list[RunHere] | SshError], *, columns: int | None) -> list[str]:
    """Lay out the runs of each machine as one table in `columns`; machines that did not answer follow."""
    rows = []
    for host, runs in found.items():
        if isinstance(runs, SshError):
            continue
        rows += [_row(host, run) for run in runs] or [[printable(host), "-", "nothing runs", "-", "-", "-", "-"]]
    if not rows:
        return failure_lines(found)

    def paint(state: str) -> str:
        return click.style(state, fg="red", bold=True) if state == _ORPHANED else state

    hosts, names, states, processes, gpus, since, supervisors = zip(*rows, strict=True)
    several = len(set(hosts)) > 1
    table_columns = [
        Column(title="HOST", cells=hosts, gives_way=0 if several else 5, least=8),
        Column(title="RUN", cells=names, least=14),
        Column(title="STATE", cells=states, paint=paint),
        Column(title="PROCESSES", cells=processes, gives_way=1, least=9),
        Column(title="GPUS", cells=gpus, gives_way=2),
        Column(title="SINCE", cells=since, gives_way=3),
        Column(title="SUPERVISED BY", cells=supervisors, gives_way=4, least=13),
    ]
    return lay_out(table_columns, room=columns) + failure_lines(found)


def _row(host: str, run: RunHere) -> list[str]:
    """Write a run on one machine; the pids of its processes too, when it is left over."""
    processes = str(len(run.processes))
    if run.answered_by is None:
        pids = [str(process.pid) for process in run.processes]
        more = f" and {len(pids) - _PIDS_SHOWN} more" if len(pids) > _PIDS_SHOWN else ""
        processes = f"{len(pids)}: {' '.join(pids[:_PIDS_SHOWN])}{more}"
    return [
        printable(host),
        printable(run.label),
        _ORPHANED if run.answered_by is None else "running",
        processes,
        ",".join(run.gpus) or "-",
        duration(run.age_s),
        "-" if run.answered_by is None else printable(run.answered_by),
    ]


def stored_lines(found: Mapping[str, Storage | SshError], *, columns: int | None) -> list[str]:
    """Lay out what can be removed on each machine in `columns`; hosts and places are never cut."""
    rows = []
    for host, storage in good_of(found).items():
        for each in storage.removable:
            place = printable(f"{storage.root}/{each.place if each.kind == 'run' else each.place[:24]}")
            note = f"with {format_bytes(each.checkpoints)} of checkpoints" if each.checkpoints else ""
            age, size = duration(each.age_s), format_bytes(each.size)
            rows.append([printable(host), _KINDS[each.kind], place, age, size, note])
    titles = (("HOST", 0), ("WHAT", 2), ("PLACE", 0), ("AGE", 3), ("SIZE", 0), ("", 1))
    return lay_out(to_columns(titles, rows), room=columns) if rows else []


def _question(cleanup: Cleanup) -> str:
    """Write what is to be done, as a question; empty when there is nothing to do."""
    processes = sum(len(run.processes) for runs in cleanup.left_over.values() for run in runs)
    removable = [each for storage in good_of(cleanup.storages).values() for each in storage.removable]
    words = [f"end {format_count(processes, 'process')}"] if processes else []
    if removable:
        size = format_bytes(sum(each.size for each in removable))
        words.append(f"remove {format_count(len(removable), 'directory')} ({size})")
    question = " and ".join(words)
    return f"{question[:1].upper()}{question[1:]}?" if words else ""


def _say_kept(cleanup: Cleanup) -> None:
    """Print what gc keeps though the user may expect its removal."""
    _say_unmarked(cleanup.left_over)
    for host, storage in good_of(cleanup.storages).items():
        if storage.unfinished:
            kept, where = printable(", ".join(storage.unfinished)), printable(storage.root)
            say(f"{printable(host)}: no end is recorded of {kept}: kept; they are in {where}/runs")


def _say_unmarked(left_over: Mapping[str, list[RunHere]]) -> None:
    """Print which processes gc does not end, since nothing but their parent shows that they belong to a run."""
    for host, runs in left_over.items():
        for run in runs:
            if run.unmarked:
                processes, pids = format_count(len(run.unmarked), "process"), " ".join(map(str, run.unmarked))
                say(
                    f"{printable(host)}: {processes} that {printable(run.label)} has started "
                    f"do not carry the run's variable, so gc does not end them: kill {pids}"
                )


def _say_done(cleanup: Cleanup, put: Callable[[str], object]) -> None:
    """Print what was ended and removed, with `put`, and what was not."""
    for host, runs in cleanup.left_over.items():
        ended = cleanup.ended[host]
        if isinstance(ended, SshError):
            say_error(ended.message, hint=ended.hint)
            continue
        labels = {run.token: run.label for run in runs}
        for each in ended:
            _say_ended(host, labels[each.token], each, put)
    for host, removed in cleanup.removed.items():
        if isinstance(removed, SshError):
            say_error(removed.message, hint=removed.hint)
            continue
        gone = [each for each in removed if each.error is None]
        if gone:
            size = format_bytes(sum(each.size for each in gone))
            put(f"{format_count(len(gone), 'directory')} removed on {printable(host)}, {size}")
        for stays in removed:
            if stays.error is not None:
                say_error(f"{host}: {stays.place} stays: {stays.error}")


def _say_ended(host: str, label: str, ended: Ended, put: Callable[[str], object]) -> None:
    """Print one line: `3 processes of brisk-otter-3 ended on gpu01`."""
    if ended.ended or ended.answered_by is None:
        put(f"{format_count(ended.ended, 'process')} of {printable(label)} ended on {printable(host)}")
    if ended.answered_by is not None:
        whom = printable(ended.answered_by)
        say(f"{printable(host)}: {printable(label)} is supervised again, by {whom}: not ended")
    if ended.left:
        say_error(
            f"{host}: {format_count(len(ended.left), 'process')} of {label} cannot be ended: {', '.join(ended.left)}",
            hint="what waits for a disk or a driver ends when that answers; else the host needs a restart",
        )


def _run_json(run: RunHere) -> dict[str, Any]:
    """Describe a run on one machine for scripts, without its token, which is a secret."""
    now = time.time()
    return {
        "run": run.run,
        "key": run.token[:8],
        "left_over": run.answered_by is None,
        "answered_by": run.answered_by,
        "gpus": list(run.gpus),
        "processes": [
            {"pid": each.pid, "role": each.role, "started": round(now - each.age_s, 1), "command": each.command}
            for each in run.processes
        ],
        "without_cookie": list(run.unmarked),
    }


def _host_json(cleanup: Cleanup, host: str) -> dict[str, Any]:
    storage = cleanup.storages.get(host)
    ended, removed = cleanup.ended.get(host, []), cleanup.removed.get(host, [])
    for answer in (cleanup.found[host], storage, ended, removed):
        if isinstance(answer, SshError):
            return failure_json(host, answer)
    assert not isinstance(storage, SshError)
    assert not isinstance(ended, SshError)
    assert not isinstance(removed, SshError)
    left_over = cleanup.left_over.get(host, [])
    names = {run.token: {"run": run.run, "key": run.token[:8]} for run in left_over}
    return {
        "host": host,
        "ok": True,
        "left_over": [_run_json(run) for run in left_over],
        "ended": [
            {**names[each.token], "ended": each.ended, "left": list(each.left), "answered_by": each.answered_by}
            for each in ended
        ],
        "removable": [
            {"place": each.place, "kind": each.kind, "age_s": each.age_s, "bytes": each.size}
            for each in (storage.removable if storage else ())
        ],
        "removed": [{"place": each.place, "bytes": each.size, "error": each.error} for each in removed],
    }

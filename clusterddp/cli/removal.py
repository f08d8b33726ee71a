"""The command rm: removes runs that have ended, and shows how much disk they take."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import Age, RunName, collected, command, output_option, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import (
    Terminal,
    columns_of,
    confirm,
    duration,
    lay_out,
    put,
    put_json,
    say,
    say_error,
    state_text,
    to_columns,
)
from clusterddp.errors import ClusterddpError, SshError, UsageError
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import announce, read_state
from clusterddp.run.code import store_of
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.leftovers import find_runs
from clusterddp.run.record import RunRecord, read_run
from clusterddp.run.removal import (
    Snapshot,
    Usage,
    check_inside,
    find_unused_snapshots,
    fingerprint,
    measure_run,
    remove_place,
    remove_snapshots,
)
from clusterddp.run.seal import mark_of
from clusterddp.run.state import RunState, RunView
from clusterddp.run.sweep import SweepDir, find_sweep, read_queue
from clusterddp.system.directories import find_remnants, finish_removals
from clusterddp.system.gpu_lease import ENDING_S
from clusterddp.system.units import format_bytes, format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.ssh.host_run import HostRun
    from clusterddp.planning.ssh import SshNode

_HOSTS_TIMEOUT_S = 6.0
"""How long the hosts of runs that have not ended may take to answer."""
_LOOKS = 3
_ENDED = [state.value for state in RunState if state.finished]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """Which of the runs are meant; without any of these all are."""

    states: tuple[str, ...] = ()
    spec_name: str | None = None
    older_than_s: float | None = None

    @property
    def selects(self) -> bool:
        return bool(self.states or self.spec_name is not None or self.older_than_s is not None)

    def takes(self, candidate: Candidate) -> bool:
        return (
            (not self.states or candidate.view.state.value in self.states)
            and self.spec_name in (None, candidate.record.name)
            and (self.older_than_s is None or time.time() - candidate.ended >= self.older_than_s)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalOptions:
    """How `rm` removes what was selected."""

    local: bool
    yes: bool
    dry_run: bool
    output: str

    def show(self, text: str) -> None:
        """Print for people: to stdout, or to stderr where stdout has JSON."""
        (say if self.output == "json" else put)(text)


@command("rm")
@works_at_login
@click.argument("names", metavar="[RUN]...", nargs=-1, type=RunName())
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_ENDED, case_sensitive=False),
    help="Only runs in this state; may be repeated.",
)
@click.option("--name", "spec_name", metavar="NAME", help="Only runs of specs with this name.")
@click.option("--older-than", "older_than_s", type=Age(), metavar="30d", help="Only runs that ended that long ago.")
@click.option("--local", is_flag=True, help="Of runs over SSH: remove them here, and leave the hosts alone.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@output_option
@runs_option
@collected("selector", Selector)
@collected("options", RemovalOptions)
@click.pass_obj
def rm(
    terminal: Terminal, *, names: tuple[str, ...], selector: Selector, options: RemovalOptions, runs_dir: Path
) -> int:
    """Remove runs that have ended, with their checkpoints, logs and results, after asking.

    With the name of a sweep, all its runs. The options select some of the named runs, or of all. A run over SSH is
    removed on its hosts, too. Snapshots of code to which no run links any more go with the runs. Nothing outside of the
    runs directory is touched, and no link is followed.

    \b
    clusterddp rm brisk-otter-3 calm-fox-1
    clusterddp rm --state FAILED --older-than 30d -n      what would be removed, and how much
    clusterddp rm --name sweep-lr --state CANCELLED --yes
    """
    if not names and not selector.selects:
        raise UsageError("names no run", hint="clusterddp rm RUN, or --state, --name, --older-than")
    removal = Removal(runs_dir=runs_dir.resolve(), environ=terminal.environ, report=say, here_only=options.local)
    removal.look(names, selector)
    code = _unused_code(removal.runs_dir, without=removal.places)
    if removal.candidates:
        options.show("\n".join(_candidate_lines(removal, code)))
    elif not removal.refused:
        say(f"no such run in {runs_dir}")
    if removal.unfinished:
        say(f"{format_count(removal.unfinished, 'run')} not ended, and left out")
    for path in find_remnants(removal.runs_dir):
        say(printable(f"{path} is left of a removal that was killed, and goes, too"))
    if not options.dry_run and (removal.candidates or options.yes):
        question, refused = f"Remove {_size_text(removal.candidates, code)}?", "nothing was removed"
        if not (options.yes or confirm(question, hint="--yes, or -n to look only", refused=refused)):
            say(refused)
            return 1
        code = _remove(removal, options)
    for error in removal.refused.values():
        say_error(error.message, hint=error.hint)
    if options.output == "json":
        put_json(_removal_json(removal, code, dry_run=options.dry_run))
    return max((error.exit_code for error in removal.refused.values()), default=0)


COMMANDS = {"rm": rm}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A run that has ended and can be removed."""

    run: RunDir
    record: RunRecord
    view: RunView
    ended: float
    """Seconds since the epoch."""
    usage: Usage
    hosts: tuple[str, ...]
    """The hosts over SSH that have a directory of it."""
    seen: tuple[object, ...]


@dataclass(kw_only=True)
class Removal:
    """One removal of runs: `look` comes first, then `remove`."""

    runs_dir: Path
    environ: Mapping[str, str]
    report: Callable[[str], None]
    here_only: bool = False
    """Hosts that do not answer keep their directories."""
    candidates: list[Candidate] = field(default_factory=list)
    sweeps: list[SweepDir] = field(default_factory=list)
    """Sweeps of which every run is removed."""
    refused: dict[str, ClusterddpError] = field(default_factory=dict)
    """Run -> why it stays: those that were named, or could not be removed."""
    unfinished: int = 0
    """Selected runs that have not ended."""
    removed: list[Candidate] = field(default_factory=list)

    def look(self, names: Sequence[str], selector: Selector) -> None:
        """Find the runs. Raises: RunNotFoundError, UsageError: a name is none of a run."""
        named = [run for name in dict.fromkeys(names) for run in self._named(name)]
        runs = {run.path: run for run in (named if names else list_runs(self.runs_dir))}
        explicit = bool(names) and not selector.selects
        found = self._ended(list(runs.values()), explicit=explicit)
        self.candidates = [candidate for candidate in found if selector.takes(candidate)]
        self._refuse_left_over()
        chosen = {candidate.run.path for candidate in self.candidates}
        for folder in dict.fromkeys(path.parent for path in chosen):
            sweep = SweepDir(folder)
            if sweep.record.is_file() and {run.path for run in list_runs(folder)} <= chosen:
                self.sweeps.append(sweep)

    @property
    def places(self) -> list[Path]:
        """The directories that are removed."""
        return [*(candidate.run.path for candidate in self.candidates), *(sweep.path for sweep in self.sweeps)]

    def remove(self) -> None:
        """Remove the runs, those over SSH on their hosts first; what cannot be removed is in `refused`."""
        self.refused |= {} if self.here_only else _remove_on_hosts(self.candidates, self.environ)
        for candidate in [each for each in self.candidates if each.run.name not in self.refused]:
            with self._refusing(candidate.run):
                remove_place(candidate.run.path, self.runs_dir, seen=candidate.seen)
                self.removed.append(candidate)
        for sweep in [each for each in self.sweeps if not list_runs(each.path)]:
            with self._refusing(sweep):
                _refuse_live_queue(sweep)
                remove_place(sweep.path, self.runs_dir, seen=fingerprint(sweep.path))

    def _named(self, name: str) -> list[RunDir]:
        """Return the run of a name, or all runs of a sweep; a name of a spec is not enough to remove a run."""
        sweep = find_sweep(self.runs_dir, name)
        if sweep:
            check_inside(sweep.path, self.runs_dir)
            _refuse_live_queue(sweep)
            return list_runs(sweep.path)
        run = find_run(self.runs_dir, name)
        if name != "@last" and "/" not in name and not run.name.startswith(name):
            raise UsageError(f"{name} is the name of a spec, not of a run", hint=f"--name {name} removes all its runs")
        return [run]

    def _ended(self, runs: list[RunDir], *, explicit: bool) -> Iterator[Candidate]:
        """Yield the runs that have ended; the others are refused if the user named them."""
        from clusterddp.places.ssh.host_run import find_host_runs

        with Synchroniser(runs, self.environ, report=self.report) as sync:
            sync.update(timeout_s=_HOSTS_TIMEOUT_S)
        records: list[tuple[RunDir, RunRecord]] = []
        for run in runs:
            with self._refusing(run, explicit=explicit):
                check_inside(run.path, self.runs_dir)
                if os.stat(run.path).st_uid != os.geteuid():  # root could remove it
                    raise UsageError(f"{run.name} belongs to another user, who can remove it")
                records.append((run, read_run(run)))
        announce(records)
        for run, record in records:
            with self._refusing(run, explicit=explicit):
                view, seen = _read_settled(run, record)
                # Nobody asks an unsealed run whether it goes on: the user decides.
                given_up = mark_of(run) and self.here_only and explicit and view.state is RunState.UNKNOWN
                if not (view.finished or given_up):
                    self.unfinished += not explicit
                    if view.state is RunState.UNKNOWN:
                        raise UsageError(f"{run.name}: whether it has ended is not known: {view.reason}")
                    raise UsageError(f"{run.name} is {view.state.value}", hint=f"clusterddp cancel {run.name} ends it")
                hosts = tuple(each.host for each in find_host_runs(run)) if record.launcher == "ssh" else ()
                changed = (each.stat().st_mtime for each in (run.path, *(each.path for each in run.attempts()[-1:])))
                ended, usage = view.end.ended if view.end else max(changed), measure_run(run)
                yield Candidate(run=run, record=record, view=view, ended=ended, usage=usage, hosts=hosts, seen=seen)

    @contextlib.contextmanager
    def _refusing(self, run: RunDir | SweepDir, *, explicit: bool = True) -> Iterator[None]:
        """Refuse a run that cannot be read or removed, or leave it out if it was not named."""
        try:
            yield
        except (ClusterddpError, OSError, TypeError) as error:
            if explicit:
                unread = ClusterddpError(f"{run.path}: cannot be read: {error}")
                self.refused[run.name] = error if isinstance(error, ClusterddpError) else unread

    def _refuse_left_over(self) -> None:
        """Refuse runs of which processes live on this machine; those that exit are waited for."""
        deadline = time.monotonic() + ENDING_S
        tokens = {each.record.token for each in self.candidates}
        while (alive := {run.token: run for run in find_runs(only=tokens)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        for candidate in [each for each in self.candidates if each.record.token in alive]:
            self.candidates.remove(candidate)
            count = len(alive[candidate.record.token].processes)
            name = candidate.run.name
            self.refused[name] = UsageError(
                f"{name} has ended, and {count} of its processes are alive here", hint=f"clusterddp gc {name} ends them"
            )


def _read_settled(run: RunDir, record: RunRecord) -> tuple[RunView, tuple[object, ...]]:
    """Read the state of a run, and its fingerprint in this state."""
    for _ in range(_LOOKS):
        seen = fingerprint(run.path)
        view = read_state(run, record=record)
        if fingerprint(run.path) == seen:
            break
        record = read_run(run)
    return view, seen


def _refuse_live_queue(sweep: SweepDir) -> None:
    queue = read_queue(sweep)
    if queue and queue.state in ("RUNNING", "UNKNOWN"):
        raise UsageError(f"the queue of {sweep.name} is {queue.state}", hint=f"clusterddp cancel {sweep.name} ends it")


def _remove_on_hosts(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, ClusterddpError]:
    """Remove the directories of runs on their hosts; return, by run, why one is still there."""
    from clusterddp.places.ssh.host_run import find_host_runs
    from clusterddp.view.ps import Hosts

    groups: dict[tuple[SshNode, ...], list[HostRun]] = {}
    kept: dict[str, ClusterddpError] = {}
    for run in [each.run for each in candidates if each.record.launcher == "ssh"]:
        found = find_host_runs(run)
        if found:
            groups.setdefault(tuple(each.node for each in found), []).append(found[0])
        else:
            why = "it is unsealed" if mark_of(run) else "its record is damaged"
            kept[run.name] = _stays(run.name, "its hosts are not asked", why)
    for nodes, host_runs in groups.items():
        run_of = {f"runs/{each.name}": each.run.name for each in host_runs}
        with Hosts(nodes, environ) as hosts:
            answers = hosts.remove({node.host: list(run_of) for node in nodes}, None)
        for host, answer in answers.items():
            if isinstance(answer, SshError):
                kept |= {run: _stays(run, host, f"cannot be asked: {answer.message}") for run in run_of.values()}
            else:
                failed = [each for each in answer if each.error]
                kept |= {run_of[each.place]: _stays(run_of[each.place], host, str(each.error)) for each in failed}
    return kept


def _stays(run: str, where: str, why: str) -> ClusterddpError:
    return ClusterddpError(f"{run} stays: {where}: {why}", hint="--local removes it here, and leaves the hosts alone")


def _remove(removal: Removal, options: RemovalOptions) -> list[Snapshot]:
    """Remove the runs, what earlier removals left, and unused code; return the snapshots that were removed."""
    removal.remove()
    for folder in (removal.runs_dir, store_of(removal.runs_dir)):
        finish_removals(folder)
    code = remove_snapshots(_unused_code(removal.runs_dir), removal.runs_dir)
    if removal.removed or code:
        options.show(f"removed {_size_text(removal.removed, code)}")
    return code


def _unused_code(runs_dir: Path, *, without: Sequence[Path] = ()) -> list[Snapshot]:
    """List the snapshots that no run needs; `without`: as if these places were removed."""
    try:
        return find_unused_snapshots(runs_dir, without=without)
    except OSError as error:
        say(printable(f"no snapshot of code is removed: {error.filename}: {error.strerror}"))
        return []


def _candidate_lines(removal: Removal, code: list[Snapshot]) -> list[str]:
    """Lay out what is to be removed; names are never cut."""
    rows = []
    for each in removal.candidates:
        notes = [f"{format_bytes(each.usage.checkpoints)} of checkpoints"] if each.usage.checkpoints else []
        notes += ["unsealed: only this directory"] if mark_of(each.run) else []
        notes += [f"on {', '.join(each.hosts)}, too"] if each.hosts and not removal.here_only else []
        state = state_text(each.view.state.value)
        age = f"{duration(time.time() - each.ended)} ago"
        rows.append([printable(each.run.name), state, age, format_bytes(each.usage.total), printable("; ".join(notes))])
    titles = (("RUN", 0), ("STATE", 2), ("ENDED", 3), ("SIZE", 0), ("", 1))
    lines = lay_out(to_columns(titles, rows), room=columns_of(sys.stdout))
    return [*lines, f"in all: {_size_text(removal.candidates, code)}"]


def _size_text(runs: Sequence[Candidate], code: Sequence[Snapshot]) -> str:
    size = sum(each.usage.total for each in runs) + sum(each.size for each in code)
    snapshots = f" and {format_count(len(code), 'snapshot')} of code" if code else ""
    return f"{format_count(len(runs), 'run')}{snapshots}, {format_bytes(size)}"


def _removal_json(removal: Removal, code: list[Snapshot], *, dry_run: bool) -> dict[str, Any]:
    gone = {each.run.path for each in removal.removed}
    return {
        "dry_run": dry_run,
        "runs": [
            {
                "run": each.run.name,
                "state": each.view.state.value,
                "ended": each.ended,
                "bytes": each.usage.total,
                **dataclasses.asdict(each.usage),
                "hosts": list(each.hosts),
                "removed": each.run.path in gone,
            }
            for each in removal.candidates
        ],
        "refused": [{"run": name, "why": error.message} for name, error in removal.refused.items()],
        "unfinished": removal.unfinished,
        "code": {"snapshots": len(code), "bytes": sum(each.size for each in code)},
    }

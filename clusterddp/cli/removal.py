"""The command rm: removes runs that have ended, and shows how much disk they take."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from clusterddp.errors import UsageError
from clusterddp.look.printable import printable
from clusterddp.look.removal import Candidate, Removal, Selector
from clusterddp.run.code import store_of
from clusterddp.run.removal import Snapshot, find_unused_snapshots, remove_snapshots
from clusterddp.run.state import RunState
from clusterddp.system.directories import finish_removals
from clusterddp.system.units import format_bytes, format_count

_ENDED = [state.value for state in RunState if state.finished]


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
@click.option("--expired", is_flag=True, help="Only runs whose keep is over.")
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
        raise UsageError("names no run", hint="clusterddp rm RUN, or --state, --name, --older-than, --expired")
    removal = Removal(runs_dir=runs_dir.resolve(), environ=terminal.environ, report=say, here_only=options.local)
    removal.look(names, selector)
    code = _unused_code(removal.runs_dir, without=removal.places)
    if removal.candidates:
        options.show("\n".join(_candidate_lines(removal, code)))
    elif not removal.refused:
        say(f"no such run in {runs_dir}")
    if removal.unfinished:
        say(f"{format_count(removal.unfinished, 'run')} not ended, and left out")
    if not options.dry_run and (removal.candidates or options.yes):
        if not _confirm(removal, code, options):
            return 1
        code = _carry_out(removal, options)
    for error in removal.refused.values():
        say_error(error.message, hint=error.hint)
    if options.output == "json":
        put_json(_removal_json(removal, code, dry_run=options.dry_run))
    return max((error.exit_code for error in removal.refused.values()), default=0)


COMMANDS = {"rm": rm}


def _confirm(removal: Removal, code: list[Snapshot], options: RemovalOptions) -> bool:
    """Ask whether to remove what was found; return False when the user refuses."""
    question, refused = f"Remove {_size_text(removal.candidates, code)}?", "nothing was removed"
    if options.yes or confirm(question, hint="--yes, or -n to look only", refused=refused):
        return True
    say(refused)
    return False


def _carry_out(removal: Removal, options: RemovalOptions) -> list[Snapshot]:
    """Remove the runs, what earlier removals left, and unused code; return the snapshots that were removed."""
    removal.carry_out()
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

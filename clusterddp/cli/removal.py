"""The commands rm and du: remove runs that have ended, and show how much disk runs take."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from clusterddp.cli.arguments import collected, command, output_option, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.param_types import Age, RunName
from clusterddp.cli.terminal import Terminal, columns_of, confirm, duration, put, put_json, say, say_error
from clusterddp.cli.text.columns import lay_out, to_columns
from clusterddp.cli.text.states import state_text
from clusterddp.errors import UsageError
from clusterddp.look.printable import printable
from clusterddp.look.removal import Candidate, Removal, Selector
from clusterddp.run.directory import RunDir, is_of_another_user
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.removal import Snapshot, find_snapshots, finish_removals, remnants, remove_snapshots
from clusterddp.run.sweep import find_sweep, sweep_of
from clusterddp.run.usage import Usage, ended_at, expires_at, keep_of, measure, measure_run
from clusterddp.run.view import RunState
from clusterddp.system.units import format_bytes, format_count

_USAGE_COLUMNS = (
    ("RUN", 0), ("SIZE", 0), ("CHECKPOINTS", 1), ("LOGS", 4), ("OUTPUT", 3), ("TB", 5), ("KEEP", 2),
)  # fmt: skip
"""Of `du`: what a terminal that is too narrow leaves out first has the highest number."""
_LEAST_LABEL = 22
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


@command("du")
@works_at_login
@click.argument("names", metavar="[RUN]...", nargs=-1, type=RunName())
@output_option
@runs_option
@click.pass_obj
def du(terminal: Terminal, *, names: tuple[str, ...], output: str, runs_dir: Path) -> None:
    """Show how much disk runs take here, the largest first: all of them, or RUN..., or the runs of a sweep.

    What runs over SSH have on their hosts is not counted (`gc --older-than 30d -n` shows that), nor what a program
    wrote outside of its run.
    """
    runs_dir = runs_dir.resolve()
    runs = [run for name in names for run in _runs_of(runs_dir, name)] if names else list_runs(runs_dir)
    own = [run for run in dict.fromkeys(runs) if not is_of_another_user(run.path)]
    found = sorted(((run, measure_run(run)) for run in own), key=lambda each: -each[1].total)
    code = [] if names else find_snapshots(runs_dir)
    remains = 0 if names else sum(measure(path) for path in remnants(runs_dir))
    total = sum(usage.total for _, usage in found) + sum(each.size for each in code) + remains
    if output == "json":
        put_json(_usage_json(found, code, remains=remains, total=total, runs_dir=runs_dir))
        return
    if not found:
        say(f"no runs in {runs_dir} yet" if not runs else f"every run in {runs_dir} belongs to another user")
    put("\n".join(_usage_lines(found, code, fold=not names, remains=remains, total=total)))
    if len(own) < len(runs):
        say(f"{format_count(len(runs) - len(own), 'run')} of other users not counted")


COMMANDS = {"rm": rm, "du": du}


def _runs_of(runs_dir: Path, name: str) -> list[RunDir]:
    sweep = find_sweep(runs_dir, name)
    return list_runs(sweep.path) if sweep else [find_run(runs_dir, name)]


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
    finish_removals(removal.runs_dir)
    code = remove_snapshots(_unused_code(removal.runs_dir), removal.runs_dir)
    if removal.removed or code:
        options.show(f"removed {_size_text(removal.removed, code)}")
    return code


def _unused_code(runs_dir: Path, *, without: Sequence[Path] = ()) -> list[Snapshot]:
    """List the snapshots that no run needs; `without`: as if these places were removed."""
    try:
        return [each for each in find_snapshots(runs_dir, without=without) if each.unused]
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
                **_sizes(each.usage),
                "hosts": list(each.hosts),
                "removed": each.run.path in gone,
            }
            for each in removal.candidates
        ],
        "refused": [{"run": name, "why": error.message} for name, error in removal.refused.items()],
        "unfinished": removal.unfinished,
        "code": {"snapshots": len(code), "bytes": sum(each.size for each in code)},
    }


def _usage_lines(
    found: list[tuple[RunDir, Usage]], code: list[Snapshot], *, fold: bool, remains: int, total: int
) -> list[str]:
    rows = []
    now = time.time()
    for name, usage, runs in _folded(found) if fold else [(run.name, usage, [run]) for run, usage in found]:
        sizes = (usage.total, usage.checkpoints, usage.logs, usage.output, usage.tensorboard)
        expires = [expires_at(run, ended_at(run)) for run in runs]
        expired = sum(at is not None and at <= now for at in expires)
        keep = (keep_of(runs[0]) or "-") + (f", {expired} expired" if expired and len(runs) > 1 else "")
        keep += ", expired" if expired and len(runs) == 1 else ""
        label = name if len(runs) == 1 else f"{name} ({format_count(len(runs), 'run')})"
        rows.append([printable(label), *(format_bytes(size) if size else "-" for size in sizes), printable(keep)])
    if code:
        unused = sum(each.size for each in code if each.unused)
        note = f"{format_count(len(code), 'snapshot')}" + (f", {format_bytes(unused)} unused" if unused else "")
        rows.append([f"code ({note})", format_bytes(sum(each.size for each in code))])
    if remains:
        rows.append(["left by a removal that was killed", format_bytes(remains)])
    rows.append(["total", format_bytes(total)])
    whole = [row + [""] * (len(_USAGE_COLUMNS) - len(row)) for row in rows]
    label_column, *columns = to_columns(_USAGE_COLUMNS, whole)
    label_column = dataclasses.replace(label_column, least=_LEAST_LABEL)
    return lay_out([label_column, *columns], room=columns_of(sys.stdout))


def _folded(found: list[tuple[RunDir, Usage]]) -> list[tuple[str, Usage, list[RunDir]]]:
    """Add up the runs of each sweep; the largest first."""
    groups: dict[str, list[tuple[RunDir, Usage]]] = {}
    for run, usage in found:
        sweep = sweep_of(run)
        groups.setdefault(sweep.name if sweep else run.name, []).append((run, usage))
    names = [field.name for field in dataclasses.fields(Usage)]
    folded = [
        (name, Usage(**{part: sum(getattr(usage, part) for _, usage in each) for part in names}), [r for r, _ in each])
        for name, each in groups.items()
    ]
    return sorted(folded, key=lambda each: -each[1].total)


def _usage_json(
    found: list[tuple[RunDir, Usage]], code: list[Snapshot], *, remains: int, total: int, runs_dir: Path
) -> dict[str, Any]:
    runs = []
    for run, usage in found:
        sweep, ended = sweep_of(run), ended_at(run)
        facts = {"run": run.name, "sweep": sweep.name if sweep else None, "run_dir": str(run.path), "ended": ended}
        runs.append({**facts, "keep": keep_of(run), "expires": expires_at(run, ended), **_sizes(usage)})
    unused = [each for each in code if each.unused]
    snapshots = {"snapshots": len(code), "bytes": sum(each.size for each in code)}
    return {
        "runs_dir": str(runs_dir),
        "bytes": total,
        "runs": runs,
        "code": snapshots | {"unused": len(unused), "unused_bytes": sum(each.size for each in unused)},
        "remains": remains,
    }


def _sizes(usage: Usage) -> dict[str, int]:
    return {"bytes": usage.total, **dataclasses.asdict(usage)}

"""The command list: many runs, one a line, newest first."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import RunName, collected, command, output_option, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, columns_of, put, put_json, say, say_note
from clusterddp.cli.text.run_list import list_lines
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_run
from clusterddp.run.removal import measure_run
from clusterddp.run.state import RunState
from clusterddp.run.sweep import find_sweep
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.run.record import RunRecord
    from clusterddp.run.state import RunView
    from clusterddp.view.status import RunSummary

_TIMEOUT_S = 6.0
"""How long `list` waits for the hosts of runs."""
_NEWEST_SHOWN = 20
_SORTED_BY = ("accuracy", "created", "name", "size", "time")
_SORT_KEYS = [*_SORTED_BY, *(f"-{key}" for key in _SORTED_BY)]
_SORT_HELP = (
    "accuracy (best first), created (newest first), time (that of its ranks, longest first), size (on disk, largest "
    "first) or name; -KEY reverses."
)
_RUNS_AT_ONCE = 1000
"""How many runs are read at a time when some of them are selected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which runs `list` shows, and in which order."""

    states: tuple[str, ...]
    spec_name: str | None
    order: str | None

    @property
    def selects(self) -> bool:
        return bool(self.states) or self.spec_name is not None

    @property
    def noun(self) -> str:
        """Write what the runs have in common: `FAILED runs named mine`."""
        named = "" if self.spec_name is None else f" named {printable(self.spec_name)}"
        return f"{' or '.join(self.states)} runs{named}".lstrip()


@command("list")
@works_at_login
@click.argument("name", metavar="[SWEEP]", type=RunName(), default=None, required=False)
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="STATE",
    type=click.Choice([state.value for state in RunState], case_sensitive=False),
    shell_complete=lambda ctx, param, word: [state.value for state in RunState if state.value.startswith(word.upper())],
    help="Only runs in this state; may be repeated.",
)
@click.option("--name", "spec_name", metavar="NAME", help="Only runs whose spec has this name.")
@click.option("--sort", "order", type=click.Choice(_SORT_KEYS), metavar="KEY", help=_SORT_HELP)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show at most N; 20, or all runs of SWEEP.")
@click.option("--wide", is_flag=True, help="All columns, uncut, and what each run takes on disk here.")
@output_option
@runs_option
@collected("selection", Selection)
@click.pass_obj
def list_(
    terminal: Terminal,
    *,
    name: str | None,
    selection: Selection,
    limit: int | None,
    wide: bool,
    output: str,
    runs_dir: Path,
) -> None:
    """Show the runs, newest first; with SWEEP those of a sweep, in the order of their numbers."""
    sweep = find_sweep(runs_dir, name) if name else None
    runs = sweep.runs() if sweep else [find_run(runs_dir, name)] if name else list_runs(runs_dir)
    limit = limit or (max(1, len(runs)) if name else _NEWEST_SHOWN)
    in_order = iter(runs) if sweep else reversed(runs)
    measures = wide or (selection.order or "").endswith("size")
    summaries, found = _select(in_order, selection, terminal, limit=limit, counts=output == "text", measures=measures)
    if output == "json":
        put_json([summary.to_json() for summary in summaries])
    elif summaries:
        put("\n".join(list_lines(summaries, now=time.time(), columns=columns_of(sys.stdout), wide=wide)))
        total = found if selection.selects or selection.order else len(runs)
        if len(summaries) < total:
            which = "first" if selection.order else "newest"
            say(f"the {which} {len(summaries)} of {total} {selection.noun}; --limit {total} shows all")
    else:
        say(f"no {selection.noun} in {runs_dir}" if runs else f"no runs in {runs_dir} yet: clusterddp demo makes one")


COMMANDS = {"list": list_}


def _select(
    runs: Iterator[RunDir], selection: Selection, terminal: Terminal, *, limit: int, counts: bool, measures: bool
) -> tuple[list[RunSummary], int]:
    """Read the runs that are shown, and count those that are selected.

    `counts` False: only as far as is needed. `measures`: also what they take on disk.
    """
    from clusterddp.view.status import read_summary

    at_once = max(limit, _RUNS_AT_ONCE) if selection.selects or selection.order else limit
    selected: list[RunSummary] = []
    num_found = 0
    for run, record, view in select_runs(runs, selection, terminal, at_once=at_once):
        num_found += 1
        # The runs that are only counted need no more than their state.
        if selection.order or len(selected) < limit:
            try:
                summary = read_summary(run, record=record, view=view)
                size = measure_run(run).total if measures else None
                selected.append(dataclasses.replace(summary, bytes=size))
            except (ClusterddpError, OSError, TypeError) as error:
                say(printable(f"{run.path}: {error}"))
                num_found -= 1
        if len(selected) == limit and not selection.order and not (counts and selection.selects):
            break
    if selection.order:
        selected = _sorted(selected, selection.order)
    return selected[:limit], num_found


def select_runs(
    runs: Iterator[RunDir], selection: Selection, terminal: Terminal, *, at_once: int
) -> Iterator[tuple[RunDir, RunRecord, RunView]]:
    """Yield the runs that are selected; Slurm is asked once for `at_once` of them, and each host once."""
    from clusterddp.places.state import announce

    while batch := list(itertools.islice(runs, at_once)):
        with Synchroniser(batch, terminal.environ, report=say_note) as sync:
            sync.update(timeout_s=_TIMEOUT_S)
        records = []
        for run in batch:
            try:
                record = read_run(run)
            except (ClusterddpError, OSError, TypeError) as error:  # one broken record must not hide the others
                say(printable(f"{run.path}: {error}"))
                continue
            if selection.spec_name in {None, record.name}:
                records.append((run, record))
        announce(records)
        for run, record in records:
            view = read_state(run, record=record)
            if not selection.states or view.state.value in selection.states:
                yield run, record, view


def _sorted(summaries: Sequence[RunSummary], order: str) -> list[RunSummary]:
    """Sort runs by one of `_SORT_KEYS`, by `time` as the column TIME shows it; runs without a value come last."""
    reverses, key = order.startswith("-"), order.removeprefix("-")
    if key == "name":
        return sorted(summaries, key=lambda run: run.run, reverse=reverses)
    value_of: dict[str, Callable[[RunSummary], Any]] = {
        "accuracy": lambda run: run.progress.accuracy if run.progress else None,
        "created": lambda run: run.created,
        "size": lambda run: run.bytes,
        "time": lambda run: run.times.running_s or None,
    }

    def place(run: RunSummary) -> float:
        value = value_of[key](run)
        return math.inf if value is None else value if reverses else -value

    return sorted(summaries, key=place)

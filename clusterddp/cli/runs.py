"""Commands about runs that exist: status, logs, wait, cancel, list."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import RunName, address, command, output_option, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.sweeps import show_sweep, wait_for_all
from clusterddp.cli.terminal import Terminal, put, put_json, say, say_error
from clusterddp.cli.text.status import list_lines, status_lines
from clusterddp.cli.watch import say_ending, say_note, say_unfetched, staying_with, watch_until_ended, write_logs
from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.launchers.state import read_state
from clusterddp.look.printable import printable
from clusterddp.results.reports import is_unknown, raise_if_unknown
from clusterddp.results.sync import Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import FOREIGN, read_run
from clusterddp.run.sweep import find_sweep
from clusterddp.system.files import read_json

if TYPE_CHECKING:
    from clusterddp.look.status import RunStatus, RunSummary
    from clusterddp.run.record import RunRecord

_WATCH_INTERVAL_S = 1.0
_LIST_TIMEOUT_S = 6.0
"""How long `list` waits for the hosts of runs."""
_NEWEST_SHOWN = 20
_RUNS_AT_ONCE = 1000
"""How many runs are read at a time when --state selects some of them."""


@command("status")
@works_at_login
@run_argument()
@click.option("-a", "--all-ranks", is_flag=True, help="One line per rank, however many there are.")
@click.option("-w", "--watch", is_flag=True, help="Update the display until the run has ended.")
@output_option
@runs_option
@click.pass_obj
def status(terminal: Terminal, *, name: str, all_ranks: bool, watch: bool, output: str, runs_dir: Path) -> int:
    """Show one run: its state, progress and ranks, and why it failed.

    Without RUN, the newest one. With -o json and --watch, one line of JSON whenever something has changed.
    """
    sweep = find_sweep(runs_dir, name)
    if sweep and not watch:
        show_sweep(sweep, terminal, output=output)
        return 0
    run = find_run(runs_dir, name)

    def text_of(state: RunStatus) -> str:
        return "\n".join(status_lines(state, run, address=address(run, terminal), one_by_one=all_ranks))

    # The text names the hosts that do not answer.
    with Synchroniser([run], terminal.environ, report=say_note, names_hosts=output == "json") as sync:
        if watch and output == "text" and terminal.can_redraw(sys.stdout):
            state = _redraw(run, text_of, terminal, sync)
        else:
            for state in _watched(run, sync) if watch else [_fetched_status(run, sync)]:
                if output == "json":
                    put_json(state.to_json(), indent=None if watch else 1)
                    sys.stdout.flush()
                else:
                    put(text_of(state) + ("\n" if watch else ""))
    return PreflightError.exit_code if is_unknown(run, state.state) else 0


@command("logs")
@works_at_login
@run_argument()
@click.option("--rank", "ranks", metavar="RANKS", default="0", help="0 (default), 0,3-5, all, or failed.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--attempt", type=click.IntRange(min=0), metavar="N", help="The newest one by default.")
@click.option("--tail", "tail_lines", type=click.IntRange(min=0), metavar="N", help="The last N lines of each file.")
@click.option("--raw", is_flag=True, help="Do not escape control characters on a terminal.")
@runs_option
@click.pass_obj
def logs(
    terminal: Terminal,
    *,
    name: str,
    ranks: str,
    follow: bool,
    attempt: int | None,
    tail_lines: int | None,
    raw: bool,
    runs_dir: Path,
) -> None:
    """Show what ranks wrote to standard output and standard error.

    With several ranks each line begins with its rank and host. The files are RUN/attempts/N/logs/rank-000.out and .err.
    """
    run = find_run(runs_dir, name)
    escape = False if raw else None
    with staying_with(run, terminal) as sync:
        anything = write_logs(run, ranks, sync, follow=follow, attempt=attempt, tail_lines=tail_lines, escape=escape)
    if not anything:
        raise_if_unknown(run, read_state(run))
    if not anything and tail_lines != 0:
        record = read_run(run)
        what = "has written nothing"
        if record.launcher == FOREIGN:
            what = (
                f"has no log here: ranks of clusterddp worker write to the launcher that started them ({record.job_id})"
            )
        say(f"rank {ranks} of {run.name} {what}")
    if not follow and ranks == "0":
        _say_failed_rank(run, attempt, terminal)


@command("wait")
@works_at_login
@run_argument()
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="S", help="Give up after S seconds.")
@runs_option
@click.pass_obj
def wait(terminal: Terminal, *, name: str, timeout_s: float | None, runs_dir: Path) -> int:
    """Wait until a run has ended.

    The exit code is 0 completed, 5 failed, 6 cancelled; 1 when it has not ended after --timeout seconds.
    """
    sweep = find_sweep(runs_dir, name)
    if sweep:
        return wait_for_all(sweep, terminal, timeout_s=timeout_s)
    run = find_run(runs_dir, name)
    with staying_with(run, terminal) as sync:
        view = watch_until_ended(run, terminal, sync, timeout_s=timeout_s)
        return say_ending(run, view, terminal, sync)


@command("cancel")
@works_at_login
@click.argument("names", metavar="RUN...", nargs=-1, required=True, type=RunName())
@click.option("--save", is_flag=True, help="Let the ranks write a checkpoint first.")
@runs_option
@click.pass_obj
def cancel(terminal: Terminal, *, names: tuple[str, ...], save: bool, runs_dir: Path) -> int:
    """End runs: every process of them, on every node. A run that has ended is left as it is."""
    from clusterddp.submission.cancel import cancel as cancel_run
    from clusterddp.sweep.submit import cancel_sweep

    exit_code = 0
    for name in names:
        try:
            sweep = find_sweep(runs_dir, name)
            if sweep:
                say(f"{sweep.name}: {cancel_sweep(sweep, save=save)}")
                continue
            run = find_run(runs_dir, name)
            report = partial(_say_of, run.name)
            report(cancel_run(run, save=save, report=report))
        except ClusterddpError as error:  # the others are cancelled nevertheless
            say_error(error.message, hint=error.hint)
            exit_code = max(exit_code, error.exit_code)
    return exit_code


def _say_of(run: str, text: str) -> None:
    say(f"{run}: {printable(text)}")


@command("list")
@works_at_login
@click.argument("name", metavar="[SWEEP]", type=RunName(), default=None, required=False)
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only runs in this state; may be repeated.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many; 20, or all runs of SWEEP.")
@output_option
@runs_option
@click.pass_obj
def list_(
    terminal: Terminal,
    *,
    name: str | None,
    states: tuple[str, ...],
    limit: int | None,
    output: str,
    runs_dir: Path,
) -> None:
    """Show the runs, newest first; with SWEEP those of a sweep, in the order of their numbers."""
    wanted = {_state_word(state) for state in states}
    summaries = []
    sweep = find_sweep(runs_dir, name) if name else None
    runs = sweep.runs() if sweep else [find_run(runs_dir, name)] if name else list_runs(runs_dir)
    limit = limit or (max(1, len(runs)) if name else _NEWEST_SHOWN)
    at_once = max(limit, _RUNS_AT_ONCE) if wanted else limit
    for summary in _summaries(iter(runs) if sweep else reversed(runs), terminal, at_once=at_once):
        if not wanted or summary.state.value in wanted:
            summaries.append(summary)
        if len(summaries) == limit:
            break
    if output == "json":
        put_json([summary.to_json() for summary in summaries])
    elif summaries:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        put("\n".join(list_lines(summaries, now=time.time(), columns=columns)))
        if len(summaries) == limit < len(runs):
            say(f"the newest {limit} of {len(runs)} runs; -n {len(runs)} shows more")
    else:
        say(f"no such run in {runs_dir}" if runs else f"no runs in {runs_dir} yet: clusterddp demo makes one")


COMMANDS = {"status": status, "logs": logs, "wait": wait, "cancel": cancel, "list": list_}


def _fetched_status(run: RunDir, sync: Synchroniser) -> RunStatus:
    """Read the run's status; of a run that has ended, after its results are copied back."""
    from clusterddp.look.status import read_status

    sync.update()
    state = read_status(run)
    if not state.state.finished:
        return state
    if not sync.download():
        say_unfetched(run)
    return read_status(run)


def _watched(run: RunDir, sync: Synchroniser) -> Iterator[RunStatus]:
    """Yield the run's status whenever it has changed, until the run has ended."""
    before = None
    while True:
        state = _fetched_status(run, sync)
        # An UNKNOWN state has its age in the reason, which is no change.
        update = dataclasses.replace(state, reason="") if state.state.value == "UNKNOWN" else state
        if update != before:
            yield state
        if state.state.finished:
            return
        before = update
        time.sleep(_WATCH_INTERVAL_S)


def _redraw(run: RunDir, text_of: Callable[[RunStatus], str], terminal: Terminal, sync: Synchroniser) -> RunStatus:
    """Draw the status in place until the run has ended; the last one stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(no_color=terminal.no_color or None)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = _fetched_status(run, sync)
            live.update(Text.from_ansi(text_of(state), no_wrap=True, overflow="ellipsis"), refresh=True)
            if state.state.finished:
                return state
            time.sleep(_WATCH_INTERVAL_S)


def _say_failed_rank(run: RunDir, attempt: int | None, terminal: Terminal) -> None:
    """Below rank 0's log of a failed attempt, name the rank that failed first."""
    attempts = run.attempts()
    if not attempts:
        return
    end = read_json((attempts[-1] if attempt is None else run.attempt(attempt)).end) or {}
    rank = (end.get("root_cause") or {}).get("rank")
    if rank:
        say(f"rank {rank} failed first: clusterddp logs {address(run, terminal)} --rank {rank}")


def _state_word(text: str) -> str:
    from clusterddp.run.view import RunState

    try:
        return RunState(text.upper()).value
    except ValueError:
        words = ", ".join(state.value for state in RunState)
        raise click.BadParameter(f'"{text}" is none of {words}', param_hint="--state") from None


def _summaries(runs: Iterator[RunDir], terminal: Terminal, *, at_once: int) -> Iterator[RunSummary]:
    """Yield the summary of each run; Slurm is asked once for `at_once` of them, and each host once."""
    from clusterddp.launchers.state import announce
    from clusterddp.look.status import read_summary

    while batch := list(itertools.islice(runs, at_once)):
        with Synchroniser(batch, terminal.environ, report=say_note) as sync:
            sync.update(timeout_s=_LIST_TIMEOUT_S)
        records = list(_with_records(batch))
        announce(records)
        for run, record in records:
            try:
                yield read_summary(run, record=record, view=read_state(run, record=record))
            except (ClusterddpError, OSError, TypeError) as error:
                say(printable(f"{run.path}: {error}"))


def _with_records(runs: list[RunDir]) -> Iterator[tuple[RunDir, RunRecord]]:
    """Yield the runs whose record can be read."""
    for run in runs:
        try:
            yield run, read_run(run)
        except (ClusterddpError, OSError, TypeError) as error:  # one broken record must not hide the others
            say(printable(f"{run.path}: {error}"))

"""Commands about a run that exists: status, logs, wait, cancel."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import RunName, address, command, output_option, run_argument, runs_option
from clusterddp.cli.list_ import Selection, select_runs
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, columns_of, confirm, put_json, say, say_error, say_note
from clusterddp.cli.text.status import status_lines
from clusterddp.cli.watch import (
    say_ending,
    say_unfetched,
    show_states,
    show_sweep,
    staying_with,
    wait_for_all,
    watch_until_ended,
    write_logs,
)
from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.places.ssh.host_run import is_unknown, raise_if_unknown
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import FOREIGN, read_run
from clusterddp.run.seal import is_ours
from clusterddp.run.state import RunState
from clusterddp.run.steps import is_batch_script, is_whole_script, job_output, shown_step, steps_of
from clusterddp.run.sweep import find_sweep, sweep_of
from clusterddp.system.files import read_json
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.view.status import RunStatus


@command("status")
@works_at_login
@run_argument()
@click.option("-a", "--all-ranks", is_flag=True, help="One line per rank, however many there are.")
@click.option("-w", "--watch", is_flag=True, help="Update the display until the run, or the sweep, has ended.")
@output_option
@runs_option
@click.pass_obj
def status(terminal: Terminal, *, name: str, all_ranks: bool, watch: bool, output: str, runs_dir: Path) -> int:
    """Show one run: its state, progress and ranks, and why it failed; of a sweep, a line for each of its runs.

    Without RUN, the newest one. With -o json and --watch, one line of JSON whenever something has changed.
    """
    sweep = find_sweep(runs_dir, name)
    if sweep:
        show_sweep(sweep, terminal, output=output, watch=watch)
        return 0
    run = find_run(runs_dir, name)

    def text_of(state: RunStatus) -> str:
        columns = columns_of(sys.stdout)
        return "\n".join(
            status_lines(state, run, address=address(run, terminal), one_by_one=all_ranks, columns=columns)
        )

    # The text names the hosts that do not answer.
    with Synchroniser([run], terminal.environ, report=say_note, names_hosts=output == "json") as sync:
        read = partial(_fetched_status, run, sync, terminal.environ)
        state = show_states(read, text_of, terminal, output=output, watch=watch)
    return PreflightError.exit_code if is_unknown(run, state.state) else 0


@command("logs")
@works_at_login
@run_argument()
@click.option("--rank", "ranks", metavar="RANKS", help="0 (default), 0,3-5, all, or failed.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, over restarts and requeues.")
@click.option("--attempt", type=click.IntRange(min=0), metavar="N", help="The newest one by default.")
@click.option("--step", metavar="K", help="Of a batch script; with --rank alone, that of the ranks in status.")
@click.option("--tail", "tail_lines", type=click.IntRange(min=0), metavar="N", help="The last N lines of each file.")
@click.option("--since", metavar="TIME", help="Lines since then: 90s, 10m, 2h, 1d ago, or 2026-01-31T14:30.")
@click.option("--grep", metavar="PATTERN", help="Of these, the lines that match a regular expression (of Python).")
@click.option("--timestamps", is_flag=True, help="Begin each line with the time when it was written.")
@click.option("--no-fold", is_flag=True, help="Show equal lines of several ranks one by one.")
@click.option("--raw", is_flag=True, help="Do not escape control characters on a terminal.")
@output_option
@runs_option
@click.pass_obj
def logs(
    terminal: Terminal,
    *,
    name: str,
    ranks: str | None,
    follow: bool,
    attempt: int | None,
    step: str | None,
    tail_lines: int | None,
    since: str | None,
    grep: str | None,
    timestamps: bool,
    no_fold: bool,
    raw: bool,
    output: str,
    runs_dir: Path,
) -> None:
    """Show what ranks wrote to standard output and standard error; of a batch script the output of its job.

    With several ranks each line begins with its rank and host, and a line that several wrote with their numbers. The
    files are RUN/attempts/N/logs/rank-000.out and .err; times are exact to 5 seconds. With -o json each line is an
    object with its ranks, host, time and text.
    """
    from clusterddp.view.logs import LogQuery, parse_pattern, parse_since

    as_json = output == "json"
    query = LogQuery(
        attempt=attempt,
        tail_lines=tail_lines,
        since=None if since is None else parse_since(since, now=time.time()),
        matches=None if grep is None else parse_pattern(grep),
        timestamps=timestamps or as_json,
        folds=not no_fold,
    )
    run = _step_of(find_run(runs_dir, name), step, ranks, query.attempt)
    escape = False if raw else None
    ranks = ranks or "0"
    whose = run.name if is_whole_script(run) else f"rank {ranks} of {run.name}"
    with staying_with(run, terminal) as sync:
        anything = write_logs(run, ranks, terminal, sync, follow=follow, query=query, escape=escape, as_json=as_json)
    if not anything:
        raise_if_unknown(run, read_state(run))
    if not anything and (query.matches or query.since is not None):
        say(f"{whose} has no such line")
    elif not anything and query.tail_lines != 0:
        record = read_run(run)
        what = "has written nothing"
        if record.launcher == FOREIGN:
            what = (
                f"has no log here: ranks of clusterddp worker write to the launcher that started them ({record.job_id})"
            )
        say(f"{whose} {what}")
    if not follow and ranks == "0":
        _say_failed_rank(run, query.attempt, terminal)


@command("wait")
@works_at_login
@run_argument()
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="S", help="Give up after S seconds.")
@output_option
@runs_option
@click.pass_obj
def wait(terminal: Terminal, *, name: str, timeout_s: float | None, output: str, runs_dir: Path) -> int:
    """Wait until a run has ended.

    The exit code is 0 completed, 5 failed, 6 cancelled; 1 when it has not ended after --timeout seconds. With -o json
    its status, or that of the runs of a sweep, follows on standard output.
    """
    from clusterddp.view.status import read_status

    sweep = find_sweep(runs_dir, name)
    if sweep:
        exit_code = wait_for_all(sweep, terminal, timeout_s=timeout_s)
        if output == "json":
            show_sweep(sweep, terminal, output=output, watch=False)
        return exit_code
    run = find_run(runs_dir, name)
    with staying_with(run, terminal) as sync:
        view = watch_until_ended(run, terminal, sync, timeout_s=timeout_s)
        exit_code = say_ending(run, view, terminal, sync)
    if output == "json":
        put_json(read_status(run).to_json())
    return exit_code


@command("cancel")
@works_at_login
@click.argument("names", metavar="[RUN]...", nargs=-1, type=RunName())
@click.option("--all", "every", is_flag=True, help="All your runs that have not ended, after asking.")
@click.option("--name", "spec_name", metavar="NAME", help="Your runs whose spec has this name.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--save", is_flag=True, help="Let the ranks write a checkpoint first.")
@output_option
@runs_option
@click.pass_obj
def cancel(
    terminal: Terminal,
    *,
    names: tuple[str, ...],
    every: bool,
    spec_name: str | None,
    yes: bool,
    save: bool,
    output: str,
    runs_dir: Path,
) -> int:
    """End runs: every process of them, on every node. A run that has ended is left as it is."""
    from clusterddp.submission.cancel import cancel as cancel_run
    from clusterddp.submission.sweep_array import cancel_sweep

    if (bool(names), every, spec_name is not None).count(True) != 1:
        given = "names no run" if not names else "--all and --name choose the runs themselves"
        raise UsageError(given, hint="one of: clusterddp cancel RUN, cancel --name NAME, cancel --all")
    if not names:
        names = _unfinished(runs_dir, spec_name, terminal)
        say(printable(f"to cancel: {', '.join(names)}") if names else f"no run to cancel in {runs_dir}")
    if every and names and not yes and not confirm("Cancel them?", hint="--yes", refused="nothing was cancelled"):
        return 1
    exit_code = 0
    results: list[dict[str, str | None]] = []
    for index, name in enumerate(names):
        try:
            sweep = find_sweep(runs_dir, name)
            if sweep:
                run_name, result = sweep.name, cancel_sweep(sweep, save=save)
            else:
                run = find_run(runs_dir, name)
                run_name, result = run.name, cancel_run(run, save=save, report=partial(_say_of, run.name))
            _say_of(run_name, result)
            results.append({"run": run_name, "result": result, "error": None})
        except ClusterddpError as error:  # the others are cancelled nevertheless
            say_error(error.message, hint=error.hint)
            exit_code = max(exit_code, error.exit_code)
            results.append({"run": name, "result": None, "error": error.message})
        except KeyboardInterrupt as interrupt:
            said = str(interrupt) or f"{name}: interrupted; clusterddp cancel {name} goes on"
            left = "".join(f", {other}" for other in names[index + 1 :])
            raise KeyboardInterrupt(said + (f"; not cancelled: {left[2:]}" if left else "")) from None
    if output == "json":
        put_json({"runs": results})
    return exit_code


def _unfinished(runs_dir: Path, spec_name: str | None, terminal: Terminal) -> tuple[str, ...]:
    """List this user's runs that have not ended, a sweep once, oldest first; `spec_name`: of specs with this name."""
    states = tuple(state.value for state in RunState if not state.finished)
    runs = [run for run in list_runs(runs_dir) if is_ours(run)]
    selection = Selection(states=states, spec_name=spec_name, order=None)
    found = [run for run, _, _ in select_runs(iter(runs), selection, terminal, at_once=max(1, len(runs)))]
    return tuple(dict.fromkeys((sweep_of(run) or run).name for run in found))


def _say_of(run: str, text: str) -> None:
    say(f"{run}: {printable(text)}")


COMMANDS = {"status": status, "logs": logs, "wait": wait, "cancel": cancel}


def _fetched_status(run: RunDir, sync: Synchroniser, environ: Mapping[str, str]) -> RunStatus:
    """Read the run's status; of a run that has ended, after its results are copied back."""
    from clusterddp.cli.report import write_fetched_report
    from clusterddp.submission.notices import send_left
    from clusterddp.view.status import read_status

    sync.update()
    view = read_state(run)
    if view.finished:
        if not sync.download():
            say_unfetched(run)
        write_fetched_report(run, environ)
        send_left(run, view, environ)
    return read_status(run, view)


def _step_of(run: RunDir, step: str | None, ranks: str | None, attempt: int | None) -> RunDir:
    """Return the run as a step of it sees it, of which a step or ranks are wanted; say where the job's output is.

    Another run is returned as it is.
    Raises: UsageError: it has no such step.
    """
    attempts = run.attempts()
    number = attempts[-1].number if attempt is None and attempts else attempt
    if not is_batch_script(run) or number is None:
        if step is not None:
            raise UsageError(f"--step {step}: {run.name} has no steps")
        return run
    if paths := job_output(run.attempt(number)):
        say(f"the output of the job is in {printable(' and '.join(map(str, paths)))}")
    if step is None and ranks is None:
        if not paths:
            say(f"{run.name}: no file with its output is seen from here")
        return run
    known = {each.step: each for each in steps_of(run, number)}
    if step is not None and step not in known:
        raise UsageError(f"--step {step}: {run.name} has {', '.join(map(str, known)) or 'no steps'}")
    if not known:
        raise UsageError(f"{run.name}: attempt {number} has no ranks whose output clusterddp has")
    return shown_step(run, number) if step is None else known[step]


def _say_failed_rank(run: RunDir, attempt: int | None, terminal: Terminal) -> None:
    """Below rank 0's log of a failed attempt, name the rank that failed first."""
    attempts = run.attempts()
    if not attempts:
        return
    end = read_json((attempts[-1] if attempt is None else run.attempt(attempt)).end) or {}
    rank = (end.get("root_cause") or {}).get("rank")
    if rank:
        say(f"rank {rank} failed first: clusterddp logs {address(run, terminal)} --rank {rank}")

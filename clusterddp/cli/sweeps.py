"""Sweeps on the command line: show all runs, wait for them."""

from __future__ import annotations

import shutil
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import address
from clusterddp.cli.terminal import Terminal, columns_of, duration, put, put_json, say, say_note
from clusterddp.cli.text import run_list as text
from clusterddp.cli.watch import show_states
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunView
from clusterddp.run.sweep import SweepDir
from clusterddp.submission.notices import PATIENCE_S, send_left_of_sweep
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.cli.arguments import StartOptions
    from clusterddp.submission.submit import Submitted
    from clusterddp.view.sweep import SweepStatus

_POLL_INTERVAL_S = 1.0
_PAUSE_PER_POLL = 5.0
"""A poll of a thousand runs takes a while: the pause after it is at least five times as long."""
_LINE_INTERVAL_S = 60.0


def show_sweep(sweep: SweepDir, terminal: Terminal, *, output: str, watch: bool) -> None:
    """Show all runs of a sweep; with `watch` until all of them have ended."""

    def text_of(status: SweepStatus) -> str:
        """Write as many runs as fit on a terminal that is watched, and all of them when they have ended."""
        redraws = watch and terminal.can_redraw(sys.stdout) and not status.finished
        rows = shutil.get_terminal_size().lines - 1 if redraws else None
        return "\n".join(text.status_lines(status, columns=columns_of(sys.stdout), rows=rows))

    with Synchroniser(sweep.runs(), terminal.environ, report=say_note) as sync:
        read = partial(_read_status, sweep, sync)
        status = show_states(read, text_of, terminal, output=output, watch=watch, pauses=_PAUSE_PER_POLL)
    if status.finished:
        _send_left(sweep, status, terminal)


def _read_status(sweep: SweepDir, sync: Synchroniser) -> SweepStatus:
    from clusterddp.view.sweep import read_sweep_status

    sync.update()
    return read_sweep_status(sweep)


def wait_for_all(sweep: SweepDir, terminal: Terminal, *, timeout_s: float | None = None) -> int:
    """Wait until every run of a sweep has ended; return 5 if one failed, else 6 if one was cancelled, else 0.

    Raises: ClusterddpError: not all have ended after `timeout_s` seconds.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with Synchroniser(sweep.runs(), terminal.environ, report=say_note) as sync:
            status = _poll(sweep, sync, deadline)
            if status.finished:
                sync.download()
    except KeyboardInterrupt:
        say(f"\ndetached; the sweep goes on. cancel: clusterddp cancel {sweep.name}")
        raise
    if not status.finished:
        raise ClusterddpError(f"{sweep.name} has not ended after {timeout_s:g} s: {text.plain_counts(status.states)}")
    _send_left(sweep, status, terminal, patience_s=PATIENCE_S)
    say(f"{sweep.name}  {text.counts_text(status)}  after {duration(time.time() - status.created)}")
    failed = [run for run in status.runs if run.state.value in {"FAILED", "LOST"}]
    for run in failed[:8]:
        say(f"  {run.run}  {printable(run.variant)}  {printable(run.reason)}")
    if len(failed) > 8:
        say(f"  ... and {len(failed) - 8} more: clusterddp list --state FAILED {sweep.name}")
    if status.queue and any(run.state.value == "LOST" for run in status.runs):
        say(f"  go on   clusterddp resume {sweep.name}")
    return 5 if failed else 6 if "CANCELLED" in status.states else 0


def _send_left(sweep: SweepDir, status: SweepStatus, terminal: Terminal, *, patience_s: float = 0.0) -> None:
    """Send the message about the end of a sweep that has ended, where no process has sent it."""
    views = [RunView(state=run.state, attempt=run.attempt, end=None, reason="") for run in status.runs]
    ended = max((run.ended for run in status.runs if run.ended), default=status.created)
    send_left_of_sweep(sweep, views, ended, terminal.environ, patience_s=patience_s)


def stay_with_sweep(submitted: Submitted, terminal: Terminal, options: StartOptions, *, verb: str) -> int:
    """Print which sweep was started and what to type next, or wait for its runs; return the exit code."""
    carrier = text.carrier_text(submitted.launcher, str(submitted.job_id))
    say(f"{verb} {click.style(submitted.run, bold=True)}: {format_count(len(submitted.runs), 'run')}  ({carrier})")
    if options.output == "json":
        facts = {"sweep": submitted.run, "launcher": submitted.launcher, "job_id": submitted.job_id}
        put_json(facts | {"runs": list(submitted.runs)}, indent=None)
    elif not sys.stdout.isatty():
        put(submitted.run)
    if options.wait:
        return wait_for_all(SweepDir(submitted.run_dir), terminal)
    where = address(RunDir(submitted.run_dir), terminal)
    say(f"  status  clusterddp status {where}")
    say(f"  wait    clusterddp wait {where}")
    say(f"  cancel  clusterddp cancel {where}")
    return 0


def _poll(sweep: SweepDir, sync: Synchroniser, deadline: float | None) -> SweepStatus:
    """Poll until all runs have ended or the time is up, and print changes."""
    said: tuple[str, str] = ("", "")
    said_at = 0.0
    while True:
        begun = time.monotonic()
        status = _read_status(sweep, sync)
        now = time.monotonic()
        if status.finished or (deadline is not None and now >= deadline):
            return status
        waits_for = status.queue.waits_for if status.queue else ""
        shown = (text.plain_counts(status.states), waits_for)
        if shown != said or now - said_at > _LINE_INTERVAL_S:
            said, said_at = shown, now
            say(f"{sweep.name}  {shown[0]}" + (f"; waits: {printable(waits_for)}" if waits_for else ""))
        time.sleep(max(_POLL_INTERVAL_S, _PAUSE_PER_POLL * (now - begun)))

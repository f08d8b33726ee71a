"""Show how a run, or a sweep, goes on until it ends: a bar or lines of progress, its logs, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from clusterddp.cli.arguments import StartOptions, address
from clusterddp.cli.terminal import (
    COLUMNS,
    WITHOUT_REASON,
    Terminal,
    columns_of,
    duration,
    json_text,
    put,
    put_json,
    say,
    say_note,
    state_text,
    writing_stdout,
)
from clusterddp.cli.text import run_list
from clusterddp.cli.text.status import measures, next_steps, progress_text, root_cause_lines, warning_text
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.host_run import raise_if_unknown
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_gang, read_run
from clusterddp.run.state import RunView
from clusterddp.run.steps import is_whole_script
from clusterddp.run.sweep import SweepDir
from clusterddp.submission.notices import PATIENCE_S, send_left, send_left_of_sweep
from clusterddp.system.files import read_json
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.worker.worker import Carried
    from clusterddp.submission.submit import Submitted
    from clusterddp.view.logs import LogPiece, LogQuery
    from clusterddp.view.progress import Progress
    from clusterddp.view.status import RunStatus, SweepStatus

_State = TypeVar("_State", "RunStatus", "SweepStatus")
_POLL_INTERVAL_S = 0.25
_WATCH_INTERVAL_S = 1.0
_SIGHT_S = 60.0
"""How long the hosts of a run without a known state are asked again, unless a time limit is given."""
_LINE_INTERVAL_S = 10.0
"""How long no line is written though the progress changes, where lines cannot be redrawn."""
_SAME_LINE_INTERVAL_S = 300.0
"""The same while nothing changes: in a queue, or in a program that reports no progress."""
_SWEEP_LINE_INTERVAL_S = 60.0
_PAUSE_PER_POLL = 5.0
"""A poll of a thousand runs takes a while: the pause after it is at least five times as long."""
_TAIL_BYTES, _LINE_BYTES = 1 << 20, 1 << 10
"""What is downloaded of a log for its last lines, and more for each of them."""

Show = Callable[[RunView, "Progress | None"], None]


def stay_with(
    submitted: Submitted, terminal: Terminal, options: StartOptions, *, verb: str, carried: Carried | None = None
) -> int:
    """Print which run was started, and watch it as long as the options ask for; return the exit code.

    `carried`: this command is a part of the run, which ends with it.
    """
    run = RunDir(Path(submitted.run_dir))
    with _carrying(run, carried) if carried else contextlib.nullcontext():
        say(f"{verb} {click.style(submitted.run, bold=True)}  ({submitted.launcher} job {submitted.job_id})")
        if options.output == "json":
            facts = {"run": submitted.run, "launcher": submitted.launcher, "job_id": submitted.job_id}
            put_json(facts | {"run_dir": str(submitted.run_dir)}, indent=None)
        elif not sys.stdout.isatty():  # on a terminal the line above has the name
            put(submitted.run)
        if not (carried or options.wait or options.follow):
            where = address(run, terminal)
            start = f"start   clusterddp submit SPEC --in {where}"
            say(f"  {start if read_run(run).is_hold else f'follow  clusterddp logs -f {where}'}")
            say(f"  status  clusterddp status {where}")
            say(f"  cancel  clusterddp cancel {where}")
            return 0
        with Synchroniser([run], terminal.environ, report=say_note) as sync:
            with contextlib.nullcontext() if carried else detaching(run, terminal):
                if options.follow:
                    stream = sys.stderr if options.output == "json" else sys.stdout
                    write_logs(run, "0", terminal, sync, follow=True, stream=stream)
                view = watch_until_ended(run, terminal, sync)
            return say_ending(run, view, terminal, sync)


@contextlib.contextmanager
def _carrying(run: RunDir, carried: Carried) -> Iterator[None]:
    """Let the run end with this command, however that ends."""
    from clusterddp.submission.cancel import cancel

    try:
        yield
    except KeyboardInterrupt:
        say(f"\n{run.name} ends with this command")
        try:
            say(f"{run.name} {cancel(run)}")
        except ClusterddpError as error:
            say(f"{error.message}; its hosts end it when the heartbeats of this command stop")
        raise
    finally:
        carried.close()


@contextlib.contextmanager
def staying_with(run: RunDir, terminal: Terminal) -> Iterator[Synchroniser]:
    """Keep the local copy of the run up to date; Ctrl-C ends the watching, not the run."""
    with detaching(run, terminal), Synchroniser([run], terminal.environ, report=say_note) as sync:
        yield sync


def say_unfetched(run: RunDir) -> None:
    """Print that not all results were copied back from the run's hosts, and why."""
    from clusterddp.places.ssh.host_run import read_unreached

    why = "; ".join(["", *read_unreached(run).values()])
    say_note(f"not all that the spec wants here has been fetched{why}; status and wait try again")


@contextlib.contextmanager
def detaching(run: RunDir, terminal: Terminal) -> Iterator[None]:
    """Let Ctrl-C end the watching, not the run, and print that the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"\ndetached; the run goes on. cancel: clusterddp cancel {address(run, terminal)}")
        raise


def watch_until_ended(
    run: RunDir, terminal: Terminal, sync: Synchroniser = NO_HOSTS, *, timeout_s: float | None = None
) -> RunView:
    """Show the progress of the run until it has ended; `sync` keeps its files here up to date.

    Raises: ClusterddpError: it has not ended after `timeout_s` seconds. PreflightError: none of its hosts has answered
    by then, or for a minute where there is no limit, and its state is unknown.
    """
    with progress_bar(terminal) if terminal.can_redraw(sys.stderr) else progress_lines(run) as show:
        return _poll(run, show, timeout_s, sync)


def show_states(
    read: Callable[[], _State],
    text_of: Callable[[_State], str],
    terminal: Terminal,
    *,
    output: str,
    watch: bool,
    pauses: float = 0,
) -> _State:
    """Show what `read` returns, with `watch` anew until that has ended; return the last of it.

    On a terminal the text is drawn over that of the state before; elsewhere a state follows when something of it has
    changed. `pauses`: the pause after a read is at least so many times as long as the read.
    """
    if watch and output == "text" and terminal.can_redraw(sys.stdout):
        state = _draw(_states_until_ended(read, pauses=pauses, only_changed=False), text_of, terminal)
        put(text_of(state))
        return state
    for state in _states_until_ended(read, pauses=pauses) if watch else [read()]:
        if output == "json":
            put_json(state.to_json(), indent=None if watch else 1)
            sys.stdout.flush()
        else:
            put(text_of(state) + ("\n" if watch else ""))
    return state


def _draw(states: Iterator[_State], text_of: Callable[[_State], str], terminal: Terminal) -> _State:
    """Draw the text of each state over that of the one before; return the last state.

    A terminal that gets another width moves lines about, and where they are is not known: the screen is cleared.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(no_color=terminal.no_color or None)
    columns = console.width
    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        for state in states:
            if columns != console.width:
                live.update("", refresh=True)
                console.clear()
                columns = console.width
            live.update(Text.from_ansi(text_of(state), overflow="fold"), refresh=True)
        live.transient = True
        live.update("")
    return state


def _states_until_ended(read: Callable[[], _State], *, pauses: float, only_changed: bool = True) -> Iterator[_State]:
    """Yield what `read` returns about once a second, until that has ended."""
    before = None
    while True:
        begun = time.monotonic()
        state = read()
        pause_s = max(_WATCH_INTERVAL_S, pauses * (time.monotonic() - begun))
        facts = state.without_times()
        if state.finished or not only_changed or facts != before:
            yield state
        if state.finished:
            return
        before = facts
        time.sleep(pause_s)


def say_ending(run: RunDir, view: RunView, terminal: Terminal, sync: Synchroniser = NO_HOSTS) -> int:
    """Copy the results back, print how the run ended, and return its exit code."""
    from clusterddp.cli.report import write_fetched_report
    from clusterddp.view.status import find_job_log

    fetched = sync.download()
    write_fetched_report(run, terminal.environ)
    end = view.end
    cause = end.root_cause if end else None
    text = f"{run.name} {state_text(view.state.value)}"
    if end:
        created = (read_json(run.record) or {}).get("created_ns", 0) / 1e9
        text += f" after {duration(end.ended - created)}"
    accuracy = (read_json(run.summary) or {}).get("accuracy")
    if view.state.value == "COMPLETED" and isinstance(accuracy, float):
        text += f", accuracy {accuracy:.1%}"
    elif view.state.value != "COMPLETED" and not cause and view.reason:
        text += f": {printable(view.reason)}"
    say(text)
    if end and end.warning:
        say(f"  {warning_text(end.warning)}")
    if cause:
        say("\n".join(root_cause_lines(cause, run)))
    started = view.attempt is not None and run.attempt(view.attempt).start.exists()
    job_log = None if started else find_job_log(run)
    if view.state.value != "COMPLETED":
        for line in next_steps(view.state.value, address(run, terminal), run, cause, job_log=job_log):
            say(line)
    if not fetched:
        say_unfetched(run)
    send_left(run, view, terminal.environ, patience_s=PATIENCE_S, sync=sync)
    failed = {"COMPLETED": 0, "CANCELLED": 6}.get(view.state.value, 5)
    return failed or (0 if fetched else ClusterddpError.exit_code)


def _poll(run: RunDir, show: Show, timeout_s: float | None, sync: Synchroniser) -> RunView:
    from clusterddp.places.state import read_state
    from clusterddp.view.progress import read_progress

    begun = time.monotonic()
    while True:
        sync.update()
        view = read_state(run)
        waited_s = time.monotonic() - begun
        if waited_s >= (_SIGHT_S if timeout_s is None else timeout_s):
            raise_if_unknown(run, view, asked_s=waited_s)
        show(view, read_progress(run))
        if view.finished:
            return view
        if timeout_s is not None and waited_s >= timeout_s:
            raise ClusterddpError(f"{run.name} is still {view.state.value} after {timeout_s:g} s")
        time.sleep(_POLL_INTERVAL_S)


@contextlib.contextmanager
def progress_lines(run: RunDir) -> Iterator[Show]:
    """Show a line when the state changes, after each epoch, and from time to time.

    One like the last has how long it was waited.
    """
    said: tuple[object, ...] = ()
    last = ""
    begun = said_at = time.monotonic()

    def show(view: RunView, progress: Progress | None) -> None:
        nonlocal said, said_at, last
        # A new epoch begins with a new accuracy: one line for both.
        result = progress and (progress.epoch if progress.accuracy is None else progress.accuracy)
        waits = view.state.value in {"PENDING", "REQUEUED"}
        facts = (view.state, view.attempt, view.reason if waits else result)
        reason = "" if view.state.value in WITHOUT_REASON else printable(view.reason)
        text = progress_text(progress) if progress and not waits else reason
        line = f"{run.name} {view.state.value}  {text}".rstrip()
        now = time.monotonic()
        interval_s = _SAME_LINE_INTERVAL_S if waits or line == last else _LINE_INTERVAL_S
        if view.finished or (facts == said and now - said_at < interval_s):
            return
        say(f"{line}  ({duration(now - begun)})" if line == last else line)
        said, said_at, last = facts, now, line

    yield show


@contextlib.contextmanager
def progress_bar(terminal: Terminal) -> Iterator[Show]:
    """Show a bar on stderr, gone when the run has ended."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True, no_color=terminal.no_color or None, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        TimeElapsedColumn(),
    )
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task("PENDING", total=None, facts="")

    def show(view: RunView, progress: Progress | None) -> None:
        description, facts = view.state.value, ""
        if view.state.value in {"PENDING", "REQUEUED", "UNKNOWN"}:
            facts = printable(view.reason)
        elif progress:
            description = f"epoch {progress.epoch}/{progress.epochs}" if progress.epochs else description
            eta = [f"{duration(progress.eta_s)} left"] if progress.eta_s else []
            facts = "  ".join(measures(progress) + eta)
        bar.update(
            task,
            description=description,
            facts=facts,
            total=None if progress is None or progress.fraction is None else 1.0,
            completed=(progress.fraction or 0.0) if progress else 0.0,
        )

    with bar:
        yield show


def write_logs(
    run: RunDir,
    ranks: str,
    terminal: Terminal,
    sync: Synchroniser = NO_HOSTS,
    *,
    follow: bool,
    query: LogQuery | None = None,
    escape: bool | None = None,
    stream: TextIO | None = None,
    as_json: bool = False,
) -> bool:
    """Write the logs of ranks to `stream`, or to stdout; return whether there was anything.

    `escape` None: escape control characters when the stream is a terminal. `as_json`: each line is an object.
    """
    from clusterddp.view.logs import LogPiece, LogQuery, NewAttempt, follow_logs, format_piece, json_piece, read_logs

    stream = stream or sys.stdout
    escape = stream.isatty() if escape is None else escape

    def spell(piece: LogPiece) -> bytes:
        if as_json:
            return json_text(json_piece(piece), indent=None).encode() + b"\n"
        return format_piece(piece, prefix=len(chosen) > 1, escape=escape, timestamps=wanted.timestamps)

    out, last = stream.buffer, b""
    with contextlib.ExitStack() as stack, contextlib.closing(StateLine(run, terminal)) as state_line:
        chosen, wanted = _fetch_logs(run, ranks, sync, query or LogQuery(), stack, follow=follow)
        pieces = follow_logs(run, chosen, wanted, sync=sync) if follow else read_logs(run, chosen, wanted)
        for piece in pieces:
            if piece is None:  # no more output now
                with writing_stdout():
                    out.flush()
                if not last or last.endswith(b"\n"):
                    state_line.show()
                continue
            state_line.remove(printed=isinstance(piece, LogPiece))
            if isinstance(piece, NewAttempt):
                say(f"attempt {piece.number} of {run.name} starts")
            else:
                last = piece.data
                with writing_stdout():
                    out.write(spell(piece))
        with writing_stdout():
            out.flush()
    if escape and last and not last.endswith((b"\n", b"\r")):
        say()  # the next message begins on a line of its own
    return bool(last)


class StateLine:
    """A line on stderr with the state of a run that waits, starts, or has printed nothing; on a terminal only."""

    def __init__(self, run: RunDir, terminal: Terminal) -> None:
        self.run = run
        self._draws = terminal.can_redraw(sys.stderr)
        self._begun = self._look_at = time.monotonic()
        self._drawn = False
        self._printed = False
        """Whether the attempt that is followed has printed anything."""

    def show(self) -> None:
        """Draw the state, about once a second; remove it where the ranks run and have printed something."""
        from clusterddp.places.state import read_state

        now = time.monotonic()
        if not self._draws or now < self._look_at:
            return
        self._look_at = now + _WATCH_INTERVAL_S
        view = read_state(self.run)
        if view.finished or (view.state.value == "RUNNING" and self._printed):
            self.close()
            return
        room = (columns_of(sys.stderr) or COLUMNS) - 1
        self._write("\r" + f"{starting_text(self.run, view)}  ({duration(now - self._begun)})"[:room])
        self._drawn = True

    def remove(self, *, printed: bool) -> None:
        """Remove the line, before output or the start of another attempt is printed."""
        self._printed = printed
        self.close()

    def close(self) -> None:
        """Remove the line if it is there."""
        if self._drawn:
            self._write("\r")
            self._drawn = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{text}\x1b[K")
            sys.stderr.flush()


def starting_text(run: RunDir, view: RunView) -> str:
    """Write the state of a run that has printed nothing, with the number of ranks that have started."""
    from clusterddp.view.ranks import count_started

    state, facts = view.state.value, [printable(view.reason)] if view.reason else []
    if view.attempt is not None and view.end is None and not is_whole_script(run):
        world_size = read_gang(run).world_size
        started = count_started(run.attempt(view.attempt))
        if started < world_size:
            state = "STARTING" if started else state
            facts.append(f"{started} of {format_count(world_size, 'rank')} started")
        else:
            facts = [f"{format_count(world_size, 'rank')} started, no output yet"]
    return f"{run.name} {state}  {', '.join(facts)}".rstrip()


def _fetch_logs(
    run: RunDir, ranks: str, sync: Synchroniser, query: LogQuery, stack: contextlib.ExitStack, *, follow: bool
) -> tuple[tuple[int, ...], LogQuery]:
    """Choose ranks, and copy their logs from remote hosts, or only the ends, which `stack` removes again.

    Returns the ranks, and the query by which the copies are read.
    """
    from clusterddp.view.logs import JOB, choose_ranks, position_of_last_lines

    if follow or ranks == "failed":
        sync.update()
    chosen = choose_ranks(run, ranks, attempt=query.attempt, follow=follow)
    attempts = run.attempts()
    newest = attempts[-1].number if follow and attempts else None
    first, lines = newest if query.attempt is None else query.attempt, query.tail_lines
    if sync.has_hosts and lines is not None and query.since is None and not follow:
        tails = Path(stack.enter_context(TemporaryDirectory(prefix="clusterddp-")))
        sync.want_logs(chosen, first, tails=(tails, _TAIL_BYTES + lines * _LINE_BYTES))
        sync.update_logs()
        if all(position_of_last_lines(path, lines) for path in tails.rglob("rank-*")):
            query = dataclasses.replace(query, tails=tails)
    sync.want_logs(chosen, first)
    # --follow without --tail shows the beginning while the rest is copied
    if query.tails is None and (not follow or lines is not None or query.since is not None):
        sync.update_logs()
    if (query.timestamps or query.since is not None) and chosen == (JOB,):
        say("note: the times of these lines were not recorded; --since shows a file whole if it changed since then")
    return chosen, query


def show_sweep(sweep: SweepDir, terminal: Terminal, *, output: str, watch: bool) -> None:
    """Show all runs of a sweep; with `watch` until all of them have ended."""

    def text_of(status: SweepStatus) -> str:
        """Write as many runs as fit on a terminal that is watched, and all of them when they have ended."""
        redraws = watch and terminal.can_redraw(sys.stdout) and not status.finished
        rows = shutil.get_terminal_size().lines - 1 if redraws else None
        return "\n".join(run_list.status_lines(status, columns=columns_of(sys.stdout), rows=rows))

    with Synchroniser(sweep.runs(), terminal.environ, report=say_note) as sync:
        read = partial(_read_sweep, sweep, sync)
        status = show_states(read, text_of, terminal, output=output, watch=watch, pauses=_PAUSE_PER_POLL)
    if status.finished:
        _send_left_of(sweep, status, terminal)


def _read_sweep(sweep: SweepDir, sync: Synchroniser) -> SweepStatus:
    from clusterddp.view.status import read_sweep_status

    sync.update()
    return read_sweep_status(sweep)


def wait_for_all(sweep: SweepDir, terminal: Terminal, *, timeout_s: float | None = None) -> int:
    """Wait until every run of a sweep has ended; return 5 if one failed, else 6 if one was cancelled, else 0.

    Raises: ClusterddpError: not all have ended after `timeout_s` seconds.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with Synchroniser(sweep.runs(), terminal.environ, report=say_note) as sync:
            status = _poll_sweep(sweep, sync, deadline)
            if status.finished:
                sync.download()
    except KeyboardInterrupt:
        say(f"\ndetached; the sweep goes on. cancel: clusterddp cancel {sweep.name}")
        raise
    if not status.finished:
        counts = run_list.plain_counts(status.states)
        raise ClusterddpError(f"{sweep.name} has not ended after {timeout_s:g} s: {counts}")
    _send_left_of(sweep, status, terminal, patience_s=PATIENCE_S)
    say(f"{sweep.name}  {run_list.counts_text(status)}  after {duration(time.time() - status.created)}")
    failed = [run for run in status.runs if run.state.value in {"FAILED", "LOST"}]
    for run in failed[:8]:
        say(f"  {run.run}  {printable(run.variant)}  {printable(run.reason)}")
    if len(failed) > 8:
        say(f"  ... and {len(failed) - 8} more: clusterddp list --state FAILED {sweep.name}")
    if status.queue and any(run.state.value == "LOST" for run in status.runs):
        say(f"  go on   clusterddp resume {sweep.name}")
    return 5 if failed else 6 if "CANCELLED" in status.states else 0


def _send_left_of(sweep: SweepDir, status: SweepStatus, terminal: Terminal, *, patience_s: float = 0.0) -> None:
    """Send the message about the end of a sweep that has ended, where no process has sent it."""
    views = [RunView(state=run.state, attempt=run.attempt, end=None, reason="") for run in status.runs]
    ended = max((run.ended for run in status.runs if run.ended), default=status.created)
    send_left_of_sweep(sweep, views, ended, terminal.environ, patience_s=patience_s)


def stay_with_sweep(submitted: Submitted, terminal: Terminal, options: StartOptions, *, verb: str) -> int:
    """Print which sweep was started and what to type next, or wait for its runs; return the exit code."""
    carrier = run_list.carrier_text(submitted.launcher, str(submitted.job_id))
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


def _poll_sweep(sweep: SweepDir, sync: Synchroniser, deadline: float | None) -> SweepStatus:
    """Poll until all runs have ended or the time is up, and print changes."""
    said: tuple[str, str] = ("", "")
    said_at = 0.0
    while True:
        begun = time.monotonic()
        status = _read_sweep(sweep, sync)
        now = time.monotonic()
        if status.finished or (deadline is not None and now >= deadline):
            return status
        waits_for = status.queue.waits_for if status.queue else ""
        shown = (run_list.plain_counts(status.states), waits_for)
        if shown != said or now - said_at > _SWEEP_LINE_INTERVAL_S:
            said, said_at = shown, now
            say(f"{sweep.name}  {shown[0]}" + (f"; waits: {printable(waits_for)}" if waits_for else ""))
        time.sleep(max(_WATCH_INTERVAL_S, _PAUSE_PER_POLL * (now - begun)))

"""Show how a run goes on until it ends: a bar or lines of progress, its logs, and how it ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from clusterddp.cli.arguments import StartOptions, address
from clusterddp.cli.log_output import write_logs
from clusterddp.cli.terminal import WITHOUT_REASON, Terminal, duration, put, put_json, say, say_note, state_text
from clusterddp.cli.text.status import measures, next_steps, progress_text, root_cause_lines, warning_text
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.host_run import raise_if_unknown
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.files import read_json
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.worker.worker import Carried
    from clusterddp.run.state import RunView
    from clusterddp.submission.submit import Submitted
    from clusterddp.view.progress import Progress
    from clusterddp.view.status import RunStatus
    from clusterddp.view.sweep import SweepStatus

_State = TypeVar("_State", "RunStatus", "SweepStatus")
_POLL_INTERVAL_S = 0.25
_WATCH_INTERVAL_S = 1.0
_SIGHT_S = 60.0
"""How long the hosts of a run without a known state are asked again, unless a time limit is given."""
_LINE_INTERVAL_S = 10.0
"""How long no line is written though the progress changes, where lines cannot be redrawn."""
_SAME_LINE_INTERVAL_S = 300.0
"""The same while nothing changes: in a queue, or in a program that reports no progress."""

Show = Callable[["RunView", "Progress | None"], None]


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
    from clusterddp.submission.notices import PATIENCE_S, send_left
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

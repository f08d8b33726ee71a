"""Staying with a run: a bar or lines while it goes on, its logs as they are written, how it ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from clusterddp.cli.arguments import address
from clusterddp.cli.status_text import (
    SAYS_IT_ALL,
    measures,
    next_steps,
    progress_text,
    root_cause_lines,
    state_text,
    warning_text,
)
from clusterddp.cli.terminal import Terminal, duration, say, writing_stdout
from clusterddp.errors import ClusterddpError
from clusterddp.look.printable import printable
from clusterddp.results.reports import demand_sight
from clusterddp.results.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from clusterddp.look.progress import Progress
    from clusterddp.run.view import RunView

_POLL_INTERVAL_S = 0.25
_SIGHT_S = 60.0
"""How long the hosts of a run of which nothing is known are asked again and again, where no limit is given."""
_LINE_INTERVAL_S = 10.0
"""How long nothing is said where a line cannot be drawn again, unless something has happened."""
_WAITING_LINE_INTERVAL_S = 300.0
"""The same while the run waits its turn, which may take days."""

Show = Callable[["RunView", "Progress | None"], None]


@contextlib.contextmanager
def staying_with(run: RunDir, terminal: Terminal) -> Iterator[Synchroniser]:
    """Keep the run's files as new as they can be; let Ctrl-C end the watching, not the run, and say so."""
    with detaching(run, terminal), Synchroniser([run], terminal.environ, say=say_note) as sync:
        yield sync


def say_note(text: str) -> None:
    """Tell what happens beside the run."""
    say(f"note: {printable(text)}")


def say_unfetched(run: RunDir) -> None:
    """Tell that a run's hosts still have something that its spec wants here, and why."""
    from clusterddp.run.host_state import read_silence

    why = "; ".join(["", *read_silence(run).values()])
    say_note(f"not all that the spec wants here has been fetched{why}; status and wait try again")


@contextlib.contextmanager
def detaching(run: RunDir, terminal: Terminal) -> Iterator[None]:
    """Let Ctrl-C end the watching, not the run, and say so."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"\ndetached; the run goes on. cancel: clusterddp cancel {address(run, terminal)}")
        raise


def watch_until_ended(
    run: RunDir, terminal: Terminal, sync: Synchroniser = NO_HOSTS, *, timeout_s: float | None = None
) -> RunView:
    """Show how the run goes on until it has ended; `sync` downloads its files meanwhile.

    Raises: ClusterddpError: it has not ended after `timeout_s` seconds. PreflightError: none of its hosts has answered
    by then, or for a minute where there is no limit, and nothing is known of it.
    """
    with _bar(terminal) if terminal.can_redraw(sys.stderr) else _lines(run) as show:
        return _poll(run, show, timeout_s, sync)


def write_logs(
    run: RunDir,
    ranks: str,
    sync: Synchroniser = NO_HOSTS,
    *,
    follow: bool,
    attempt: int | None = None,
    tail_lines: int | None = None,
    escape: bool | None = None,
    stream: TextIO | None = None,
) -> bool:
    """Write the logs of ranks to `stream`, or to stdout; say whether there was anything.

    `escape` None: escape control characters when the stream is a terminal.
    """
    from clusterddp.look.logs import LogPiece, NewAttempt, choose_ranks, follow_logs, format_piece, read_logs

    if follow or ranks == "failed":
        sync.update()
    chosen = choose_ranks(run, ranks, attempt=attempt, follow=follow)
    attempts = run.attempts()
    newest = attempts[-1].number if follow and attempts else None
    sync.want_logs(chosen, newest if attempt is None else attempt)
    if not follow or tail_lines is not None:  # who follows all of it sees the beginning while the rest is on its way
        sync.update_logs()
    stream = stream or sys.stdout
    escape = stream.isatty() if escape is None else escape
    if follow:
        pieces = follow_logs(run, chosen, attempt=attempt, tail_lines=tail_lines, sync=sync)
    else:
        pieces = read_logs(run, chosen, attempt=attempt, tail_lines=tail_lines)
    out = stream.buffer
    last = b""
    for piece in pieces:
        with writing_stdout():
            if isinstance(piece, LogPiece):
                last = piece.data
                out.write(format_piece(piece, prefix=len(chosen) > 1, escape=escape))
            else:  # nothing more for now
                out.flush()
        if isinstance(piece, NewAttempt):
            say(f"attempt {piece.number} of {run.name} starts")
    with writing_stdout():
        out.flush()
    if escape and last and not last.endswith((b"\n", b"\r")):
        say()  # what is said next begins on a line of its own
    return bool(last)


def say_ending(run: RunDir, view: RunView, terminal: Terminal, sync: Synchroniser = NO_HOSTS) -> int:
    """Fetch what the spec says, tell how a run ended, and return the exit code that stands for it."""
    from clusterddp.look.status import find_job_log

    fetched = sync.download()
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
    for line in next_steps(view.state.value, address(run, terminal), run, cause, job_log=job_log):
        say(line)
    if not fetched:
        say_unfetched(run)
    return exit_code_of(view) or (0 if fetched else ClusterddpError.exit_code)


def exit_code_of(view: RunView) -> int:
    """Return the exit code that stands for how a run ended."""
    return {"COMPLETED": 0, "CANCELLED": 6}.get(view.state.value, 5)


def _poll(run: RunDir, show: Show, timeout_s: float | None, sync: Synchroniser) -> RunView:
    from clusterddp.launchers.state import read_state
    from clusterddp.look.progress import read_progress

    begun = time.monotonic()
    while True:
        sync.update()
        view = read_state(run)
        waited_s = time.monotonic() - begun
        if waited_s >= (_SIGHT_S if timeout_s is None else timeout_s):
            demand_sight(run, view, asked_s=waited_s)
        show(view, read_progress(run))
        if view.finished:
            return view
        if timeout_s is not None and waited_s >= timeout_s:
            raise ClusterddpError(f"{run.name} is still {view.state.value} after {timeout_s:g} s")
        time.sleep(_POLL_INTERVAL_S)


@contextlib.contextmanager
def _lines(run: RunDir) -> Iterator[Show]:
    """Show a line when the state changes, after each epoch, and from time to time."""
    said: tuple[object, ...] = ()
    said_at = 0.0

    def show(view: RunView, progress: Progress | None) -> None:
        nonlocal said, said_at
        # A new epoch begins with a new accuracy: one line for both.
        news = progress and (progress.epoch if progress.accuracy is None else progress.accuracy)
        waits = view.state.value in {"PENDING", "REQUEUED"}
        facts = (view.state, view.attempt, view.reason if waits else news)
        interval_s = _WAITING_LINE_INTERVAL_S if waits else _LINE_INTERVAL_S
        if view.finished or (facts == said and time.monotonic() - said_at < interval_s):
            return
        said, said_at = facts, time.monotonic()
        reason = "" if view.state.value in SAYS_IT_ALL else printable(view.reason)
        text = progress_text(progress) if progress and not waits else reason
        say(f"{run.name} {view.state.value}  {text}".rstrip())

    yield show


@contextlib.contextmanager
def _bar(terminal: Terminal) -> Iterator[Show]:
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
    with Bar(*columns, console=console, transient=True) as bar:
        yield _shown_by(bar)


def _shown_by(bar: Bar) -> Show:
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

    return show

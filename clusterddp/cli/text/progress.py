"""Show the progress of a run while a command waits: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from clusterddp.cli.terminal import Terminal, duration, say
from clusterddp.cli.text.states import WITHOUT_REASON
from clusterddp.cli.text.status import measures, progress_text
from clusterddp.look.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from clusterddp.look.progress import Progress
    from clusterddp.run.directory import RunDir
    from clusterddp.run.view import RunView

_LINE_INTERVAL_S = 10.0
"""How long no line is written though the progress changes, where lines cannot be redrawn."""
_SAME_LINE_INTERVAL_S = 300.0
"""The same while nothing changes: in a queue, or in a program that reports no progress."""

Show = Callable[["RunView", "Progress | None"], None]


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

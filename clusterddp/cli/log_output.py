"""Write the logs of ranks; while a run that is followed prints nothing, one line on the terminal has its state."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

from clusterddp.cli.terminal import COLUMNS, Terminal, columns_of, duration, json_text, say, writing_stdout
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_gang
from clusterddp.run.steps import is_whole_script
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.run.state import RunView
    from clusterddp.view.logs import LogPiece, LogQuery

_LOOK_EVERY_S = 1.0
_TAIL_BYTES, _LINE_BYTES = 1 << 20, 1 << 10
"""What is downloaded of a log for its last lines, and more for each of them."""


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
        self._look_at = now + _LOOK_EVERY_S
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

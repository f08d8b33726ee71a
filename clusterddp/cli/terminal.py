"""How a command prints: data to stdout, messages to stderr, tables, in the width and colours that a stream can show."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.view.printable import UNSAFE, printable

_OURS = re.compile(r"(\n|\x1b\[(?:[01]|3[0-7])m)")
"""The end of a line; what click.style writes for bold text and for the eight colours."""

HELP_OPTIONS = ["-h", "--help"]
SCHEMA = 1
"""The number of the forms of `-o json`; another one when a key means something else."""
COLUMNS = 80
"""The width of text that is laid out for people where there is no terminal."""
WITHOUT_REASON = {"RUNNING", "COMPLETED"}
"""States that are shown without a reason."""
_COLORS = {"COMPLETED": "green", "FAILED": "red", "LOST": "red", "RUNNING": "cyan"}
_COLORS |= {"STOPPING": "yellow", "KILLED": "yellow"}
_GAP = 2


class Terminal:
    """The environment of the command and how it prints; `main` makes it and passes it to every command."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.debug = environ.get("CLUSTERDDP_DEBUG", "") not in {"", "0"}
        self.no_color = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"

    @property
    def color(self) -> bool | None:
        """Whether colour is wanted; None: on a terminal only."""
        if self.no_color:
            return False
        return True if self.environ.get("FORCE_COLOR", "") not in {"", "0"} else None

    def can_redraw(self, stream: Any) -> bool:
        """Return whether `stream` is a terminal on which a line can be drawn again."""
        return bool(stream.isatty()) and self.environ.get("TERM", "") not in {"", "dumb"}


def put(text: str) -> None:
    """Print data to stdout; text of other programs may be part of it."""
    with writing_stdout():
        click.echo(_escaped(text))


def put_json(value: Any, *, indent: int | None = 1) -> None:
    """Print the JSON of `-o json`: an object with the number of its form, or a list of such objects."""
    form = {"schema": SCHEMA}
    put_plain_json([form | each for each in value] if isinstance(value, list) else form | value, indent=indent)


def put_plain_json(value: Any, *, indent: int | None = 1) -> None:
    """Print a JSON value whose form is not ours."""
    with writing_stdout():
        click.echo(json_text(value, indent=indent))


def json_text(value: Any, *, indent: int | None) -> str:
    """Return JSON whose control characters are written as JSON escapes them."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return "\n".join(UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in text.split("\n"))


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Name stdout in its errors (a full disk), so that no file of a run is suspected; BrokenPipeError passes.

    Raises: ClusterddpError, BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ClusterddpError(f"standard output: {error.strerror}") from error


def say(text: str = "") -> None:
    """Print a message to stderr; text of other programs may be part of it."""
    click.echo(_escaped(text), err=True)


def say_note(text: str) -> None:
    """Print a note to stderr."""
    say(f"note: {printable(text)}")


def say_error(message: str, *, hint: str | None = None) -> None:
    """Print an error and its hint to stderr; text of other programs may be part of both."""
    say(f"{click.style('error:', fg='red', bold=True)} {message}")
    if hint:
        say(f"{click.style('hint:', bold=True)} {hint}")


def confirm(question: str, *, hint: str, refused: str) -> bool:
    """Ask the user a question of yes or no; Ctrl-C is no, with `refused` as its message.

    Raises: UsageError: standard input is no terminal; `hint` names the option to use in its place.
    """
    if not sys.stdin.isatty():
        raise UsageError("cannot ask: standard input is not a terminal", hint=hint)
    try:
        return click.confirm(question, err=True)
    except click.Abort as abort:
        raise KeyboardInterrupt(refused) from abort


def table(rows: list[list[str]], *, indent: str = "") -> list[str]:
    """Lay out rows in columns as wide as their widest cell, colour not counted; the first row is the heading.

    Text of other programs may be part of a cell: a line end and a tab in it are escaped.
    """
    rows = [[cell.replace("\n", r"\x0a").replace("\t", r"\x09") for cell in row] for row in rows]
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell + " " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    lines[0] = click.style(lines[0], bold=True)
    return lines


def columns_of(stream: Any) -> int | None:
    """Return how wide the terminal `stream` is; None: it is a file or a pipe, in which lines have no limit."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: none for colours, two for a wide character."""
    plain = click.unstyle(text)
    if plain.isascii():
        return len(plain)
    from rich.cells import cell_len

    return cell_len(plain)


def cut(text: str, columns: int) -> str:
    """Return as much of a text as fits into `columns`, with all of its colours."""
    parts = []
    for part in _OURS.split(text):
        ends = itertools.accumulate(map(width_of, part))
        fits = part if _OURS.fullmatch(part) else part[: sum(end <= columns for end in ends)]
        columns -= width_of(fits)
        parts.append(fits)
    return "".join(parts)


def wrapped(line: str, columns: int | None, *, indent: int = 0) -> list[str]:
    """Break a line at spaces into lines of at most `columns`, colour not counted; a longer word stays whole.

    `indent`: the spaces before each line but the first.
    """
    if columns is None or width_of(line) <= columns:
        return [line]
    body = line.lstrip(" ")
    first, *others = body.split(" ")
    lines = [line[: -len(body)] + first]
    for word in others:
        if width_of(f"{lines[-1]} {word}") <= columns:
            lines[-1] += f" {word}"
        elif word:
            lines.append(" " * indent + word)
    return [each.rstrip() for each in lines]


def duration(seconds: float) -> str:
    """Write a time span for people: `8s`, `3m 20s`, `2h 05m`, `3d 4h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def rank_span(ranks: Sequence[int]) -> str:
    """Write which ranks a node has: `0-7`, or `3`."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _escaped(text: str) -> str:
    """Escape control characters, except line ends and our own colours."""
    return "".join(part if _OURS.fullmatch(part) else printable(part) for part in _OURS.split(text))


def state_text(state: str) -> str:
    """Return the state in its colour."""
    return click.style(state, fg=_COLORS.get(state), bold=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table, and what becomes of it where the room is short."""

    title: str
    cells: Sequence[str]
    """Without colour."""
    gives_way: int = 0
    """Columns with the highest number are left out first; 0: never left out."""
    least: int | None = None
    """To how few characters its cells may be cut; None: they are never cut."""
    paint: Callable[[str], str] | None = None
    """Colours a cell."""

    @property
    def width(self) -> int:
        return max(width_of(self.title), *map(width_of, self.cells))

    @property
    def least_width(self) -> int:
        return self.width if self.least is None else min(self.width, self.least)

    def cut(self, width: int) -> Column:
        """Return the column with cells of at most `width` columns of the terminal."""
        cells = [cell if width_of(cell) <= width else f"{cut(cell, width - 2)}.." for cell in self.cells]
        return dataclasses.replace(self, cells=cells)


def to_columns(titles: Sequence[tuple[str, int]], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Turn rows into columns; each title comes with its `gives_way`."""
    return [
        Column(title=title, cells=cells, gives_way=gives_way)
        for (title, gives_way), *cells in zip(titles, *rows, strict=True)
    ]


def lay_out(columns: Sequence[Column], *, room: int | None, indent: str = "") -> list[str]:
    """Lay out columns as lines of at most `room` columns of the terminal, if that can be; None: all of them, uncut."""
    shown = list(columns) if room is None else _fitting(list(columns), room - len(indent))
    painted = [[column.title, *map(column.paint or str, column.cells)] for column in shown]
    return table([list(row) for row in zip(*painted, strict=True)], indent=indent)


def _fitting(shown: list[Column], room: int) -> list[Column]:
    while _total([column.least_width for column in shown]) > room:
        optional = [column for column in shown if column.gives_way]
        if not optional:
            break
        shown.remove(max(optional, key=_expendable))
    excess = _total([column.width for column in shown]) - room
    fitting = {column.title: column for column in shown}
    for column in sorted(shown, key=_expendable, reverse=True):
        if excess > 0 and column.width > column.least_width:
            width = max(column.least_width, column.width - excess)
            excess -= column.width - width
            fitting[column.title] = column.cut(width)
    return list(fitting.values())


def _expendable(column: Column) -> tuple[bool, int]:
    """Return a key that is higher the sooner a column gives way: at first those without any value."""
    return not {*column.cells} - {"", "-"}, column.gives_way


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)

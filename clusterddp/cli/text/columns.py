"""Lay out a table in the width of a terminal: the least important columns give way first, then long cells are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterddp.cli.terminal import cut, table, width_of

_GAP = 2


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

"""How a comparison of runs is written: what differs first, then what each run came to."""

from __future__ import annotations

from collections.abc import Sequence

import click

from clusterddp.cli.terminal import cut, duration, state_text, table, width_of, wrapped
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable
from clusterddp.view.report import CodeDiff, Comparison, Results

_MOST_SIDE_BY_SIDE = 4
"""Up to so many runs are columns; more are rows."""
_MOST_ROWS = 40
_MOST_DIFF_LINES = 60
_COLORS = {"+": "green", "-": "red", "@": "cyan"}
_CELL = 40
_PLAIN = 80
"""The width of what is written into a file or a pipe, as far as cells are cut."""


def compare_lines(compared: Comparison, *, columns: int | None) -> list[str]:
    """Write a comparison; no line is longer than `columns`, when that is given."""
    names = [report.status.run for report in compared.runs]
    lines: list[str] = []
    width = columns or _PLAIN
    for title, rows in compared.by_part.items():
        cells = [
            [printable(row.key), *("-" if value is None else printable(value) for value in row.values)]
            for row in rows[:_MOST_ROWS]
        ]
        left = len(rows) - len(cells)
        lines += [*_lay_out(title, names, cells, width), *([f"  ... and {left} more"] if left else []), ""]
    if any(report.background.code for report in compared.runs):
        for diff in compared.diffs:
            lines += _diff_lines(names[0], diff)
    if not lines:
        lines = [*wrapped("no difference in configuration, code, packages, hosts or machine", columns, indent=2), ""]
    texts = []
    for report in compared.runs:
        logged = list(report.logged.items())[:_MOST_ROWS]
        texts.append(result_texts(report.results) | {f"{key} (logged)": number_text(each) for key, each in logged})
    states = ["state", *(state_text(report.status.state.value) for report in compared.runs)]
    keys = dict.fromkeys(key for of_run in texts for key in of_run)
    cells = [states, *([printable(key), *(of_run.get(key, "-") for of_run in texts)] for key in keys)]
    lines += _lay_out("results", names, cells, width)
    if columns is None:
        return lines
    return [line if width_of(line) <= columns else f"{cut(line, columns - 3)}..." for line in lines]


def result_texts(results: Results) -> dict[str, str]:
    """Write what a run came to, each with its name; what is not known is left out."""
    texts = {
        "accuracy": results.accuracy is not None and _percent(results.accuracy),
        "best accuracy": results.best_accuracy is not None and _percent(results.best_accuracy),
        "loss": results.loss is not None and f"{results.loss:.4f}",
        "epochs": results.epochs is not None and number_text(results.epochs),
        "steps": results.steps is not None and number_text(results.steps),
        "images/s": results.images_per_s is not None and number_text(round(results.images_per_s)),
        "step ms": results.step_ms is not None and f"{results.step_ms:.4g}",
        "ran": duration(results.ran_s),
        "waited": duration(results.waited_s),
        "effective": results.effective is not None and f"{results.effective:.1%}",
        "GPU-hours": results.gpu_hours is not None and number_text(round(results.gpu_hours, 4)),
        "rank-hours": results.gpu_hours is None and number_text(round(results.rank_hours, 4)),
    }
    return {name: text for name, text in texts.items() if text}


def number_text(value: float) -> str:
    """Write a number short: `0.0012`, `1,234`, `1.2e+07`."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def _lay_out(title: str, names: Sequence[str], cells: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Lay out keys and the values of runs; few runs are columns, many are rows, of as many tables as it takes."""
    rows = [[title, *map(printable, names)], *map(list, cells)]
    if len(names) <= _MOST_SIDE_BY_SIDE:
        heading = max(width_of(row[0]) for row in rows)
        width = max(8, min(_CELL, (columns - min(heading, _CELL)) // len(names) - 2))
        return table([[_shorten(row[0], _CELL), *(_shorten(cell, width) for cell in row[1:])] for row in rows])
    first = [_shorten(cell, _CELL) for cell in rows[0]]
    others = [[_shorten(cell, _CELL // 2) for cell in row] for row in rows[1:]]
    lines: list[str] = []
    while others:
        shown, room = [first], columns - _width(first)
        while others and (len(shown) == 1 or _width(others[0]) + 2 <= room):
            room -= _width(others[0]) + 2
            shown.append(others.pop(0))
        lines += [""] if lines else []
        lines += table([list(row) for row in zip(*shown, strict=True)])
    return lines


def _width(column: Sequence[str]) -> int:
    return max(map(width_of, column))


def _percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) <= 1 else number_text(share)


def _shorten(cell: str, width: int) -> str:
    """Cut the middle of a plain cell: paths and names differ at both ends."""
    if width_of(cell) <= width or cell != click.unstyle(cell):
        return cell
    head = (width - 2) // 2
    return f"{cut(cell, head)}..{cut(cell[::-1], width - 2 - head)[::-1]}"


def _diff_lines(first: str, diff: CodeDiff) -> list[str]:
    name = printable(diff.run)
    if diff.not_compared:
        return [f"code of {name}: not compared: {printable(diff.not_compared)}", ""]
    if not diff.files:
        return []
    lines = [
        click.style(f"code of {name} against {printable(first)}: {format_count(len(diff.files), 'file')}", bold=True)
    ]
    for file in diff.files:
        lines.append(f"  {printable(file.path)} {file.change}")
        lines += [f"    {click.style(printable(line), fg=_COLORS.get(line[:1]))}" for line in file.lines]
    if len(lines) > _MOST_DIFF_LINES:
        lines = [*lines[:_MOST_DIFF_LINES], f"  ... {len(lines) - _MOST_DIFF_LINES} more lines: -o json has them"]
    return [*lines, ""]

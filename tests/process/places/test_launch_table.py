"""The cells of docs/launchers.md's table that need one machine: each command is typed as it stands in the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch_cells import COLUMNS, Cell, Row, Where
from tests.support.launch_places import Places, check
from tests.support.launch_table import ROWS
from tests.support.paths import ROOT

CASES = [pytest.param(row, cell, id=key) for row in ROWS for key, cell in row.cases.items() if cell.where is Where.HERE]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "cell"), CASES)
def test_the_ranks_become_one_gang(
    row: Row, cell: Cell, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("command", "\n".join(cell.commands))
    check(row, cell, Places(), tmp_path)


def test_the_page_shows_each_command_and_why_a_cell_is_empty() -> None:
    page = (ROOT / "docs/launchers.md").read_text()
    table = {line.split("**")[1]: line for line in page.splitlines() if line.startswith("| **")}
    assert list(table) == [row.title for row in ROWS]
    for row in ROWS:
        words = [cell.commands[0] for cell in row.cases.values()] + list(row.none.values())
        assert [word for word in words if word not in table[row.title]] == []


def test_each_column_has_a_command_or_a_reason() -> None:
    columns = {row.key: sorted([*{cell.column for cell in row.cells}, *row.none]) for row in ROWS}
    assert columns == {row.key: sorted(COLUMNS) for row in ROWS}

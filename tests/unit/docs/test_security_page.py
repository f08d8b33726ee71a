"""The page SECURITY.md: each promise in a table names tests that exist."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]


def test_each_promise_has_a_meaning_and_a_test() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        assert len(row) == 3, row
        assert row[2].strip(" |") == "held by" or re.fullmatch(r"(`test_\w+`(, )?)+", row[2].strip(" |")), row


def test_each_test_that_the_page_names_exists() -> None:
    assert sorted(set(re.findall(r"`(test_\w+)`", PAGE)) - TESTS) == []

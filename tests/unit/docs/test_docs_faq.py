"""The page of error messages: the program's have the category that `status` shows, and ours are in the code."""

from __future__ import annotations

import re

import pytest

from clusterddp.run.record import RankEnd
from clusterddp.view.status import diagnose
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sorted((ROOT / "clusterddp").rglob("*.py"))))


def rows(heading: str) -> list[list[str]]:
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]


def messages(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("message", "category"),
    [(text, row[1].strip("`")) for row in rows("Out of memory, port in use, ...") for text in messages(row[0])],
)
def test_a_message_of_a_program_has_its_category(message: str, category: str) -> None:
    end = RankEnd(rank=3, host="node1", exit_code=1, error=message)
    assert diagnose(end).category == category


@pytest.mark.parametrize("message", [text for row in rows("Errors of clusterddp") for text in messages(row[0])])
def test_a_message_of_ours_is_in_the_code(message: str) -> None:
    assert message in CODE

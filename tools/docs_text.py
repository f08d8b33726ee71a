"""How the generated pages are written: heads, filled text, cells, items."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

WIDTH = 100
CODE_WIDTH = 80
"""What the column of the site shows of a line of code without scrolling."""
MARK = "<!-- Written by tools/write_docs: change the code, not this page. -->"


def head(title: str, text: str) -> list[str]:
    return [f"# {title}", "", MARK, "", *filled(text), ""]


def page(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def filled(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def items(texts: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for name, text in texts.items():
        lines += textwrap.wrap(f"* `{name}`: {text}", WIDTH, subsequent_indent="  ")
    return lines

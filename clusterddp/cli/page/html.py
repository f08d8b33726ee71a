"""HTML as a value: text is escaped where it enters an element, so no text of a run can become markup."""

from __future__ import annotations

import base64
import hashlib
import html
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files

from clusterddp.look.printable import printable

_VOID = frozenset(["input", "link", "meta"])
_MAX_TEXT = 2000


class Html(str):
    """Markup that was made here; any other text is escaped when it is put into an element."""

    __slots__ = ()


Child = Html | str | int | float | None


def el(name: str, /, *children: Child, **attributes: object) -> Html:
    """Make an element; an attribute that is None is left out, `class_` means `class` and `_` in names means `-`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value if isinstance(value, Html) else escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[Child]) -> Html:
    """Put parts behind each other."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def escape(value: object) -> str:
    """Escape text for HTML; control characters are shown, and a text that is far too long is cut."""
    text = str(value)
    text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
    return html.escape(printable(text), quote=True)


def cut(text: str, columns: int) -> str:
    """Shorten a text at its end."""
    return text if len(text) <= columns else text[: columns - 3] + "..."


def clock(moment: float) -> str:
    """Write a time for people; one that no calendar has is not known."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return "-"


def table(head: Sequence[Child], rows: Sequence[Sequence[Child]], *, caption: str, class_: str | None = None) -> Html:
    """Make a table with a caption; the first cell of each row is its heading."""
    body = [el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows]
    top = el("thead", el("tr", *(el("th", cell, scope="col") for cell in head))) if head else None
    return el(
        "div",
        el("table", el("caption", caption), top, el("tbody", *body), class_=class_),
        class_="scroll",
        tabindex="0",
    )


def facts(rows: Iterable[tuple[str, Child]], *, caption: str) -> Html | None:
    """Make a table of names and values; None when there are none."""
    known = [(name, value) for name, value in rows if value not in (None, "")]
    return table([], known, caption=caption, class_="facts") if known else None


def section(title: str, *children: Child) -> Html | None:
    """Make a part of the page with its heading; None when it is empty."""
    return el("section", el("h2", title), *children) if any(children) else None


def folded(summary: Child, *children: Child, is_open: bool = False) -> Html | None:
    """Make a part that opens by a click; None when it is empty."""
    if not any(children):
        return None
    return el("details", el("summary", summary), *children, **({"open": ""} if is_open else {}))


def document(title: str, *body: Child, live: bool = False) -> str:
    """Make a page that loads nothing and runs no script but its own; a `live` one asks its own server for news."""
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    own = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; style-src {_sum(style)}; script-src {_sum(script)}; img-src data:; "
        f"base-uri 'none'; form-action {own}" + ("; connect-src 'self'" if live else "")
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("link", rel="icon", href="data:,"),
        el("title", title),
        Html(f"<style>{style}</style>"),
    )
    end = Html(f"<script>{script}</script>")
    page = el("html", head, el("body", el("main", *body), end), lang="en", data_live="" if live else None)
    return f"<!doctype html>\n{page}\n"


def _sum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

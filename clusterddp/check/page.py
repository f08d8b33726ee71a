"""The report as one HTML file without references to others, from the JSON of a check."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
.red { color: #b00020; font-weight: 600; } .note { color: #9a6700; } .ok { color: #1a7f37; }
pre { background: #f6f8fa; overflow-x: auto; padding: .8rem; }
@media (prefers-color-scheme: dark) {
  body { background: #111; color: #ddd; } td, th { border-color: #333; } pre { background: #1b1b1b; }
  .red { color: #ff7b72; } .note { color: #d29922; } .ok { color: #3fb950; }
}
"""


def render_page(report: Mapping[str, Any], *, title: str) -> str:
    """Lay out a report: `checks` as a table, `findings` of the first rank, and every other value as it is."""
    parts = [f"<h1>{_text(title)}</h1>", *_section(report)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(report: Mapping[str, Any]) -> Iterable[str]:
    plain = {key: value for key, value in report.items() if not _is_large(value)}
    if plain:
        yield _table(["", ""], plain.items())
    if report.get("checks"):
        rows = [
            (each["level"], each["check"], each["host"], each["found"], each["fix"] if each["level"] != "ok" else "")
            for each in report["checks"]
        ]
        yield _table(["", "check", "where", "found", "fix"], rows, marked=True)
    for each in report.get("findings", ()):
        if each["rank"] == 0 or (each["found"] or {}).get("topology"):
            yield from _finding(each)
    for key, value in report.items():
        if _is_large(value) and key not in ("checks", "findings"):
            yield f"<h2>{_text(key)}</h2>"
            yield from _value(value)


def _finding(finding: Mapping[str, Any]) -> Iterable[str]:
    yield f"<h2>{_text(finding['probe'])}, rank {_text(finding['rank'])} on host {_text(finding['host'])}</h2>"
    if finding["found"] is None:
        yield f'<p class="red">{_text(finding["error"])}</p>'
    else:
        yield from _value(finding["found"])


def _value(value: Any) -> Iterable[str]:
    """Lay out objects as a section, lists of objects as a table, text of several lines as it is."""
    if isinstance(value, dict):
        yield from _section(value)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        names = list(dict.fromkeys(name for each in value for name in each))
        yield _table(names, [[each.get(name, "") for name in names] for each in value])
    elif isinstance(value, list) and all(isinstance(each, list) for each in value):
        yield _table([], value)
    else:
        yield f"<pre>{_text(value)}</pre>"


def _is_large(value: Any) -> bool:
    return bool(value) and (isinstance(value, dict | list) or (isinstance(value, str) and "\n" in value))


def _table(heading: Iterable[str], rows: Iterable[Iterable[Any]], *, marked: bool = False) -> str:
    """Lay out rows; `marked`: the first cell is the level of its row."""
    lines = []
    for row in rows:
        cells = [_text("" if cell is None else cell) for cell in row]
        first = f' class="{cells[0]}"' if marked else ""
        lines.append(
            "<tr>" + "".join(f"<td{first if n == 0 else ''}>{cell}</td>" for n, cell in enumerate(cells)) + "</tr>"
        )
    names = list(heading)
    head = "<tr>" + "".join(f"<th>{_text(name)}</th>" for name in names) + "</tr>\n" if any(names) else ""
    return f"<table>\n{head}" + "\n".join(lines) + "\n</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))

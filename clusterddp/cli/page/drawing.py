"""What pages are made of: HTML as a value, curves of runs as SVG.

Text is escaped where it enters an element, so no text of a run can become markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from clusterddp.cli.text.compare import number_text
from clusterddp.view.curves import Curve
from clusterddp.view.printable import printable

_VOID = frozenset(["input", "link", "meta"])
_MAX_TEXT = 2000
_WIDTH, _HEIGHT = 360, 196
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 8, 350, 172
_COLORS = 8
_MOST_DOTS = 60
_ORDER = ("loss", "accuracy", "lr", "images_per_s", "step_ms.p50")
_TITLES = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "lr": "Learning rate",
    "images_per_s": "Images per second",
    "step_ms.p50": "Step time, median (ms)",
    "step_ms.p95": "Step time, 95th percentile (ms)",
    "step_ms.max": "Step time, longest (ms)",
    "images_per_s_per_rank": "Images per second and rank",
    "data_wait_percent": "Waiting for data (% of step)",
    "comm_exposed_percent": "Waiting for other ranks (% of step)",
    "memory_peak_mb": "Memory, peak (MB)",
}


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


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of one of the runs of the page."""

    run: int
    name: str
    curve: Curve

    @property
    def label(self) -> str:
        return f"{self.name} {self.curve.kind}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """How values become places."""

    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        span = self.high - self.low
        share = min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.5
        return self.begin + share * (self.end - self.begin)


def style_of(run: int) -> str:
    """Return the classes of a run's lines: colours first, then other patterns of the line."""
    return f"s{run % _COLORS} p{run // _COLORS % 4} r{run}"


def key_order(key: str) -> tuple[int, str]:
    """Sort keys: what most people look at, then others by name."""
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER)), key


def legend(names: Sequence[str]) -> Html:
    """Draw which line is which run, each with a box that hides it."""
    labels = [
        el(
            "label",
            el("input", type="checkbox", checked="", data_run=run) if len(names) > 1 else None,
            el("svg", el("path", d="M0 4h30", class_=f"l {style_of(run)}"), viewBox="0 0 30 8", aria_hidden="true"),
            name,
        )
        for run, name in enumerate(names)
    ]
    return el("div", *labels, el("span", "dots: evaluations; thin line: training", class_="soft"), class_="legend")


def chart(number: int, key: str, series: Sequence[Series], points: int) -> Html:
    """Draw a key of all runs, as a picture that also says in words what it shows."""
    drawn = [(each, each.curve.thinned(points)) for each in series if each.curve.values]
    values = [value for _, found in drawn for _, value in found]
    steps = [step for _, found in drawn for step, _ in found]
    title = _TITLES.get(key, key)
    x = _Scale(*_widened(min(steps), max(steps), 0.0), _LEFT, _RIGHT)
    y = _Scale(*_widened(min(values), max(values), 0.04), _BOTTOM, _TOP)
    sentences = (
        f"{each.label}: last {number_text(curve.values[-1])} at step {number_text(curve.steps[-1])}, "
        f"lowest {number_text(min(curve.values))}, highest {number_text(max(curve.values))}"
        for each, _ in drawn
        for curve in [each.curve]
    )
    picture = el(
        "svg",
        el("title", title, id=f"t{number}"),
        el("desc", "; ".join(sentences), id=f"d{number}"),
        _axes(x, y),
        *(_line(each, found, x, y) for each, found in drawn),
        el("line", x1=0, x2=0, y1=_TOP, y2=_BOTTOM, class_="cursor"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby=f"t{number} d{number}",
        data_x=f"{x.low!r} {x.high!r}",
        data_y=f"{y.low!r} {y.high!r}",
        data_box=f"{_LEFT} {_TOP} {_RIGHT} {_BOTTOM}",
        tabindex="0",
    )
    return el("figure", el("figcaption", cut(title, 120)), picture, el("output"))


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    """Give an interval some room; one without length gets some around it."""
    is_flat = high - low <= max(1e-100, 1e-12 * max(abs(low), abs(high)))
    room = (abs(low) * 0.1 if abs(low) > 1e-100 else 1.0) if is_flat else (high - low) * share
    return low - room, high + room


def _axes(x: _Scale, y: _Scale) -> Html:
    parts: list[Html] = []
    for tick in _ticks(y.low, y.high, 4):
        place = _short(y.place(tick))
        parts.append(el("path", d=f"M{_LEFT} {place}H{_RIGHT}", class_="grid"))
        parts.append(el("text", number_text(tick), x=_LEFT - 5, y=_short(y.place(tick) + 3.5), text_anchor="end"))
    for tick in _ticks(x.low, x.high, 4):
        parts.append(el("text", number_text(tick), x=_short(x.place(tick)), y=_BOTTOM + 15, text_anchor="middle"))
    parts.append(el("text", "step", x=0, y=_BOTTOM + 15))
    return join(parts)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Choose round values in an interval."""
    raw = (high - low) / about
    unit = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    distance = unit * next((factor for factor in (1, 2, 5, 10) if factor * unit >= raw), 10)
    first = math.ceil(low / distance)
    return [number * distance for number in range(first, first + 2 * about + 2) if number * distance <= high]


def _line(series: Series, points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> Html:
    places = [(_short(x.place(step)), _short(y.place(value))) for step, value in points]
    kind = "train" if series.curve.kind == "train" else "eval"
    line = el(
        "polyline",
        points=Html(" ".join(f"{across},{down}" for across, down in places)),
        class_=f"l {kind} {style_of(series.run)}",
        data_name=cut(series.label, 80),
    )
    if series.curve.kind == "train" or len(places) > _MOST_DOTS:
        return line
    dots = "".join(f"M{across} {down}h0" for across, down in places)
    return join([line, el("path", d=Html(dots), class_=f"d s{series.run % _COLORS} r{series.run}")])


def _short(value: float) -> str:
    """Write a place with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")

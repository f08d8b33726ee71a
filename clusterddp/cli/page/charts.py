"""Curves as SVG: one chart for each key, the runs on top of each other, each with its colour and pattern of line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterddp.cli.page.html import Html, cut, el, join
from clusterddp.cli.text.compare import number_text
from clusterddp.look.curves import Curve

_WIDTH, _HEIGHT = 360, 196
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 8, 350, 172
_COLORS = 8
_MOST_DOTS = 60
_LOG_RATIO = 200.0
"""From this ratio of the highest loss to the lowest on, losses are drawn on a logarithmic scale."""
_ORDER = ("loss", "accuracy", "lr", "images_per_s", "step_ms.p50")
_REPEATS = frozenset(["step_ms.p95", "step_ms.max", "images_per_s_per_rank", "comm_bytes_per_step"])
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
    "straggler_spread": "Slowest rank by median of the others",
}


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
    """How values become places: linear, or by their logarithm."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        inside = math.log10(value) if self.is_log else value
        span = self.high - self.low
        share = (inside - self.low) / span if span else 0.5
        return self.begin + share * (self.end - self.begin)


def style_of(run: int) -> str:
    """Return the classes of a run's lines: colours first, then other patterns of the line."""
    return f"s{run % _COLORS} p{run // _COLORS % 4} r{run}"


def key_order(key: str) -> tuple[int, int, str]:
    """Sort keys: what most people look at, then others by name, then figures that repeat others."""
    if key in _ORDER:
        return 0, _ORDER.index(key), key
    return (2 if repeats(key) else 1), 0, key


def repeats(key: str) -> bool:
    """Return whether a key repeats what another one shows."""
    return key in _REPEATS


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
    """Draw a key of all runs."""
    drawn = [(each, each.curve.thinned(points)) for each in series if each.curve.values]
    values = [value for _, found in drawn for _, value in found]
    steps = [step for _, found in drawn for step, _ in found]
    is_log = "loss" in key.lower() and min(values) > 0 and max(values) / min(values) >= _LOG_RATIO
    percent = _is_share(key, values)
    x, y = _Scale(*_widened(min(steps), max(steps), 0.0), _LEFT, _RIGHT), _y_scale(values, is_log)
    write = _percent_text if percent else number_text
    title = _TITLES.get(key, key)
    picture = el(
        "svg",
        el("title", title, id=f"t{number}"),
        el("desc", "; ".join(_sentence(each, write) for each, _ in drawn), id=f"d{number}"),
        _axes(x, y, write),
        *(_line(each, found, x, y) for each, found in drawn),
        el("line", x1=0, x2=0, y1=_TOP, y2=_BOTTOM, class_="cursor"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby=f"t{number} d{number}",
        tabindex="0",
        data_x=f"{x.low!r} {x.high!r}",
        data_y=f"{y.low!r} {y.high!r}",
        data_box=f"{_LEFT} {_TOP} {_RIGHT} {_BOTTOM}",
        **({"data_log": ""} if is_log else {}),
        **({"data_percent": ""} if percent else {}),
    )
    scale = el("span", " (logarithmic)") if is_log else None
    return el("figure", el("figcaption", cut(title, 120), scale), picture, el("output"))


def _percent_text(value: float) -> str:
    return f"{100 * value:.4g} %"


def _is_share(key: str, values: Sequence[float]) -> bool:
    return "acc" in key.lower() and min(values) >= 0 and max(values) <= 1


def _y_scale(values: Sequence[float], is_log: bool) -> _Scale:
    low, high = min(values), max(values)
    if is_log:
        return _Scale(math.floor(math.log10(low)), math.ceil(math.log10(high)), _BOTTOM, _TOP, True)
    return _Scale(*_widened(low, high, 0.04), _BOTTOM, _TOP)


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    """Give an interval some room; one without length gets some around it."""
    is_flat = high - low <= max(1e-100, 1e-12 * max(abs(low), abs(high)))
    room = (abs(low) * 0.1 if abs(low) > 1e-100 else 1.0) if is_flat else (high - low) * share
    return low - room, high + room


def _axes(x: _Scale, y: _Scale, write: Callable[[float], str]) -> Html:
    parts: list[Html] = []
    for tick in _log_ticks(y) if y.is_log else _ticks(y.low, y.high, 4):
        place = _short(y.place(tick))
        parts.append(el("path", d=f"M{_LEFT} {place}H{_RIGHT}", class_="grid"))
        parts.append(el("text", write(tick), x=_LEFT - 5, y=_short(y.place(tick) + 3.5), text_anchor="end"))
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


def _log_ticks(scale: _Scale) -> list[float]:
    powers = range(int(scale.low), int(scale.high) + 1)
    return [10.0**power for power in powers][:: max(1, len(powers) // 5)]


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


def _sentence(series: Series, write: Callable[[float], str]) -> str:
    curve = series.curve
    low, high = min(curve.values), max(curve.values)
    return (
        f"{series.label}: last {write(curve.values[-1])} at step {number_text(curve.steps[-1])}, "
        f"lowest {write(low)}, highest {write(high)}"
    )


def _short(value: float) -> str:
    """Write a place with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")

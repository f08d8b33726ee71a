"""Time as SVG: the attempts of a run with their waits, and below them its ranks, on one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusterddp.cli.page.html import Html, clock, el, join
from clusterddp.cli.terminal import duration
from clusterddp.look.timeline import AttemptSpan, RankSpan, Timeline

_WIDTH, _LEFT, _RIGHT = 1000, 90, 990
_BAR = 22
_MAX_RANK_HEIGHT, _ALL_RANKS_HEIGHT = 14.0, 280.0
_MAX_BARS = 600
_MAX_ATTEMPTS = 200
_LETTER_WIDTH = 6.5
_LONG_STEPS = (1.1, 1.25, 1.5, 2.0)
"""Times the median, from which on a step has the next darker shade."""
_MAX_SPANS = 2000
_NICE_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2592000)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Seconds since the epoch as places in the picture."""

    begin: float
    end: float

    def place(self, moment: float) -> float:
        span = self.end - self.begin
        share = (moment - self.begin) / span if span > 0 else 0.0
        return _LEFT + min(1.0, max(0.0, share)) * (_RIGHT - _LEFT)

    def span(self, begin: float, end: float) -> tuple[float, float]:
        return self.place(begin), self.place(end)


def timeline_strip(timeline: Timeline, stragglers: Sequence[tuple[float, int, float]], number: int) -> Html | None:
    """Draw when a run waited and ran, and each of its ranks; None for a run without an attempt."""
    attempts = timeline.attempts[-_MAX_ATTEMPTS:]
    if not attempts:
        return None
    axis = _Axis(attempts[0].asked, attempts[-1].ended)
    ranks, top = _ranks(attempts, stragglers, axis, 2 * _BAR + 6)
    parts = [el("text", "attempts", x=0, y=_BAR - 6), *(_attempt(attempt, axis) for attempt in attempts)]
    height = top + 22
    picture = el(
        "svg",
        el("title", "Attempts and ranks over time", id=f"t{number}"),
        el("desc", "; ".join(map(_sentence, attempts[-20:])), id=f"d{number}"),
        *parts,
        ranks,
        _ticks(axis, top),
        viewBox=f"0 0 {_WIDTH} {height:.0f}",
        role="img",
        aria_labelledby=f"t{number} d{number}",
        class_="wide",
    )
    caption = "Attempts and ranks over time"
    if any(attempt.steps for attempt in attempts):
        caption += "; darker where the steps of a rank, without its waiting for others, took longer"
    return el("figure", el("figcaption", caption), el("div", picture, class_="scroll", tabindex="0"))


def _attempt(attempt: AttemptSpan, axis: _Axis) -> Html:
    began = attempt.ended if attempt.started is None else attempt.started
    what = f"attempt {attempt.number}"
    rows = (2, _BAR)
    waited = f"{what} waits {duration(attempt.waited_s)}"
    waits = _bar("WAIT", waited, axis.span(attempt.asked, began), rows)
    if attempt.started is None:
        return waits
    left, right = axis.span(began, attempt.ended)
    runs = _bar(attempt.outcome, f"{what}: {attempt.outcome}, ran {duration(attempt.ran_s)}", (left, right), rows)
    wordings = (f"{attempt.number} {attempt.outcome}", str(attempt.number))
    words = next((text for text in wordings if _fits(text, right - left)), "")
    label = el("text", words, x=f"{left + 4:.1f}", y=_BAR - 5, class_="in") if words else None
    return join([waits, runs, label])


def _fits(text: str, width: float) -> bool:
    return len(text) * _LETTER_WIDTH + 6 < width


def _ranks(
    attempts: Sequence[AttemptSpan], stragglers: Sequence[tuple[float, int, float]], axis: _Axis, top: float
) -> tuple[Html, float]:
    """Draw the ranks as rows; equal neighbours are one bar. Return the drawing and where it ends."""
    count = 1 + max((rank.rank for attempt in attempts for rank in attempt.ranks), default=-1)
    if not count:
        return Html(""), top
    row = min(_MAX_RANK_HEIGHT, _ALL_RANKS_HEIGHT / count)
    bars: list[Html] = []
    for attempt in attempts:
        for first, last in _folded(attempt.ranks, axis, _MAX_BARS // len(attempts)):
            name = f"rank {first.rank}" if first is last else f"ranks {first.rank}-{last.rank}"
            text = f"{name} on {first.host}: {first.state} after {duration(first.ended - first.started)}"
            begin, end = top + first.rank * row, top + (last.rank + 1) * row - (1 if row > 4 else 0)
            bars.append(_bar(first.state, text, axis.span(first.started, first.ended), (begin, end)))
        bars += _long_steps(attempt, axis, top, row)
    for moment, rank, ratio in stragglers[-_MAX_BARS // 4 :]:
        if 0 <= rank < count:
            text = f"rank {rank} takes {ratio:.2f} times as long as the others"
            begin, end = top + rank * row, top + (rank + 1) * row
            bars.append(_bar("slow", text, axis.span(moment, moment), (begin, end)))
    every = max(1, -(-count // 20))
    names = [
        el("text", f"rank {rank}", x=0, y=f"{top + rank * row + max(row, 9) - 2:.1f}")
        for rank in range(0, count, every)
    ]
    return join([*names, *bars]), top + count * row


def _long_steps(attempt: AttemptSpan, axis: _Axis, top: float, row: float) -> list[Html]:
    """Shade each rank's bar where its steps took longer than the median of all steps of the attempt."""
    known = sorted(step for sample in attempt.steps for step in sample.step_ms if step)
    if not known:
        return []
    median = known[len(known) // 2]
    ends = [*(sample.time for sample in attempt.steps[1:]), attempt.ended]
    spans: list[tuple[int, int, float, float]] = []
    for rank in range(len(attempt.steps[0].step_ms)):
        own: list[tuple[int, int, float, float]] = []
        for sample, end in zip(attempt.steps, ends, strict=True):
            level = sum((sample.step_ms[rank] or 0.0) >= times * median for times in _LONG_STEPS)
            if own and own[-1][0] == level:
                own[-1] = (*own[-1][:3], end)
            else:
                own.append((level, rank, sample.time, end))
        spans += own
    longest = sorted((span for span in spans if span[0]), reverse=True)[:_MAX_SPANS]
    shades = []
    for level, times in enumerate(_LONG_STEPS, start=1):
        path = "".join(
            f"M{left:.1f} {top + rank * row:.1f}h{right - left:.1f}v{row - (row > 4):.1f}h{left - right:.1f}z"
            for of, rank, begin, end in longest
            if of == level
            for left, right in [axis.span(begin, end)]
        )
        if path:
            text = f"steps of {times} times their median, {median:.3g} ms, or longer"
            shades.append(el("path", el("title", text), d=path, class_=f"long{level}"))
    return shades


def _folded(ranks: Sequence[RankSpan], axis: _Axis, most: int) -> list[tuple[RankSpan, RankSpan]]:
    """Fold neighbouring ranks of one host that look equal, at a grain that is coarser the more ranks there are."""
    folds = _equal_neighbours(ranks, axis, 1.0)
    for grain in (4.0, 32.0, float(_WIDTH)):
        if len(folds) > most:
            folds = _equal_neighbours(ranks, axis, grain)
    return folds[: max(1, most)]


def _equal_neighbours(ranks: Iterable[RankSpan], axis: _Axis, grain: float) -> list[tuple[RankSpan, RankSpan]]:
    """Fold neighbouring ranks of one host that look equal: the first and the last of each fold."""
    folds: list[tuple[RankSpan, RankSpan]] = []
    for rank in sorted(ranks, key=lambda span: span.rank):
        if (
            folds
            and folds[-1][1].rank + 1 == rank.rank
            and _look(folds[-1][0], axis, grain) == _look(rank, axis, grain)
        ):
            folds[-1] = (folds[-1][0], rank)
        else:
            folds.append((rank, rank))
    return folds


def _look(rank: RankSpan, axis: _Axis, grain: float) -> tuple[str, str, int, int]:
    begin, end = axis.span(rank.started, rank.ended)
    return rank.state, rank.host, round(begin / grain), round(end / grain)


def _bar(class_: str, text: str, span: tuple[float, float], rows: tuple[float, float]) -> Html:
    """Draw a bar, `span` across and `rows` down."""
    (left, right), (top, bottom) = span, rows
    return el(
        "rect",
        el("title", text),
        x=f"{left:.1f}",
        y=f"{top:.1f}",
        width=f"{max(right - left, 1.5):.1f}",
        height=f"{bottom - top:.1f}",
        class_=class_,
    )


def _ticks(axis: _Axis, top: float) -> Html:
    span = axis.end - axis.begin
    distance = next((each for each in _NICE_S if span / each <= 8), _NICE_S[-1])
    count = min(int(span / distance), 40)
    marks = [
        el("text", f"+{duration(each * distance)}" if each else clock(axis.begin),
           x=f"{axis.place(axis.begin + each * distance):.1f}", y=f"{top + 14:.1f}",
           text_anchor="middle" if each else "start")
        for each in range(count + 1)
        if each != 1 or axis.place(axis.begin + distance) > _LEFT + 130
    ]  # fmt: skip
    return join(marks)


def _sentence(attempt: AttemptSpan) -> str:
    waited = f"attempt {attempt.number} waited {duration(attempt.waited_s)}"
    return waited if attempt.started is None else f"{waited}, ran {duration(attempt.ran_s)}, {attempt.outcome}"

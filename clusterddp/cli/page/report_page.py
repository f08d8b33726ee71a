"""The page of one run or several: which parts it has, and how much of each, so that it stays small."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterddp.cli.page.charts import Series, chart, key_order, legend, repeats
from clusterddp.cli.page.html import Child, Html, clock, cut, document, el, folded, section
from clusterddp.cli.page.sections import (
    attempts_table,
    background_parts,
    cards,
    cause,
    checkpoints_table,
    curves_table,
    differences,
    events_table,
    ranks_table,
    results_table,
    state,
    uncommitted,
)
from clusterddp.cli.page.strips import timeline_strip
from clusterddp.cli.terminal import duration
from clusterddp.look.compare import compare
from clusterddp.look.report import RunReport
from clusterddp.system.units import format_count

MAX_BYTES = 300_000
"""The size of a page, whatever the length and number of its runs."""
_POINT_BYTES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much of each part a page shows."""

    points: int = 10_000
    """Of all curves together."""
    charts: int = 36
    lines: int = 24
    """Runs whose curves are drawn."""
    runs: int = 200
    """Rows of the table of runs."""
    details: int = 12
    """Runs that have their attempts and ranks shown, where there are several."""
    rows: int = 300
    """Of each other table."""
    diff_lines: int = 400

    def halved(self) -> Limits:
        values = {field.name: max(1, getattr(self, field.name) // 2) for field in dataclasses.fields(self)}
        return Limits(**values)


def draw_report(reports: Sequence[RunReport]) -> str:
    """Draw the page of one run or several; it has at most `MAX_BYTES`, with less of everything where that is needed."""
    limits = Limits()
    while len((page := _draw(reports, limits)).encode()) > MAX_BYTES:
        limits = limits.halved()
    return page


def draw_parts(reports: Sequence[RunReport], limits: Limits | None = None) -> list[Child]:
    """Draw what stands on the page of one run or several."""
    limits = limits or Limits()
    return _one(reports[0], limits) if len(reports) == 1 else _several(reports, limits)


def _draw(reports: Sequence[RunReport], limits: Limits) -> str:
    names = ", ".join(report.status.run for report in reports)
    return document(f"{cut(names, 120)} - clusterddp", *draw_parts(reports, limits), _made(reports[0]))


def _one(report: RunReport, limits: Limits) -> list[Child]:
    status = report.status
    return [
        el("h1", status.run, " ", state(status.state.value)),
        el("p", _where(report), class_="soft"),
        el("p", report.variant) if report.variant else None,
        el("p", status.reason) if status.state.value != "COMPLETED" and not status.root_cause else None,
        el("p", el("strong", "warning: "), status.warning) if status.warning else None,
        cards(report),
        cause(report),
        _charts([report], limits),
        section("Values", curves_table(report, limits.rows)),
        section(
            "Time",
            timeline_strip(report.timeline, report.curves.stragglers, 900),
            attempts_table(report, limits.rows),
            events_table(report, limits.rows),
        ),
        section("Ranks", ranks_table(report, limits.rows)),
        section("Checkpoints", checkpoints_table(report)),
        section("Made of", *background_parts(report, limits.rows), uncommitted(report, limits.diff_lines)),
    ]


def _several(reports: Sequence[RunReport], limits: Limits) -> list[Child]:
    compared = compare(reports[: limits.runs])
    return [
        el("h1", format_count(len(reports), "run")),
        section("Results", results_table(reports[: limits.runs]), _more(len(reports), limits.runs, "run")),
        section("What differs", *differences(compared, limits.rows, limits.diff_lines)),
        _charts(reports, limits),
        section("Each run", *(_detail(report, 900 + at) for at, report in enumerate(reports[: limits.details]))),
        _more(len(reports), limits.details, "run"),
    ]


def _detail(report: RunReport, number: int) -> Html:
    return el(
        "div",
        el("h3", report.status.run, " ", state(report.status.state.value)),
        el("p", _where(report), class_="soft"),
        cause(report),
        timeline_strip(report.timeline, report.curves.stragglers, number),
        checkpoints_table(report),
    )


def _charts(reports: Sequence[RunReport], limits: Limits) -> Html | None:
    drawn = reports[: limits.lines]
    series: dict[str, list[Series]] = {}
    for run, report in enumerate(drawn):
        for curve in report.curves.curves.values():
            if curve.values:
                series.setdefault(curve.key, []).append(Series(run, report.status.run, curve))
    keys = sorted(series, key=key_order)
    shown = keys[: limits.charts]
    if not shown:
        return None
    points = max(4, min(400, limits.points // sum(len(series[key]) for key in shown)))
    notes = [note for report in drawn for note in (_sampled(report), *_not_finite(report))]
    notes += [f"{format_count(len(keys) - len(shown), 'more key')} not drawn"] if len(keys) > len(shown) else []
    return section(
        "Curves",
        legend([report.status.run + (f"  {report.variant}" if report.variant else "") for report in drawn]),
        _more(len(reports), len(drawn), "run"),
        *_grids(series, shown, points),
        *(el("p", note, class_="soft") for note in notes[:40] if note),
    )


def _grids(series: Mapping[str, Sequence[Series]], keys: Sequence[str], points: int) -> list[Html | None]:
    """Draw the charts; those that repeat others are folded."""
    charts = {key: chart(at, key, series[key], points) for at, key in enumerate(keys)}
    main = [drawn for key, drawn in charts.items() if not repeats(key)]
    more = [drawn for key, drawn in charts.items() if repeats(key)]
    return [
        el("div", *main, class_="charts"),
        folded("More curves", el("div", *more, class_="charts") if more else None),
    ]


def _not_finite(report: RunReport) -> list[str]:
    return [
        f"{report.status.run}: {curve.key} ({curve.kind}) is not a finite number at step {curve.not_finite:.0f}"
        for curve in report.curves.curves.values()
        if curve.not_finite is not None
    ]


def _sampled(report: RunReport) -> str:
    curves = report.curves
    if curves.read_rows >= curves.total_rows:
        return ""
    return (
        f"{report.status.run}: the curves are drawn from {curves.read_rows:,} of about {curves.total_rows:,} rows: "
        "every evaluation and a sample of the others"
    )


def _more(count: int, shown: int, noun: str) -> Html | None:
    return el("p", f"and {format_count(count - shown, noun)} more", class_="soft") if count > shown else None


def _where(report: RunReport) -> str:
    status = report.status
    job = f"job {status.job_id}" if status.job_id else ""
    parts = [report.name if report.name != status.run else "", status.launcher, job]
    parts += [format_count(status.world_size, "rank"), f"submitted {clock(status.created)}"]
    until = status.ended or (None if status.state.finished else report.made)
    parts += [f"{duration(until - status.created)} from submit to {'end' if status.ended else 'now'}"] if until else []
    return ", ".join(part for part in parts if part)


def _made(report: RunReport) -> Html:
    return el("p", f"Written {clock(report.made)} by clusterddp report; {report.directory}", class_="soft")

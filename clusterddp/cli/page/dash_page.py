"""The pages of the dashboard: all runs, one run, several beside each other, the log of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from clusterddp.cli.page.html import Child, Html, document, el, section, table
from clusterddp.cli.page.report_page import draw_parts
from clusterddp.cli.page.sections import state
from clusterddp.cli.terminal import duration
from clusterddp.cli.text.status import measures, short_progress
from clusterddp.look.report import RunReport
from clusterddp.look.status import RunSummary
from clusterddp.system.units import format_count

MOST_RUNS = 200
"""Rows of the table of runs."""


def draw_runs(summaries: Sequence[RunSummary], *, total: int, directory: str, now: float) -> str:
    """Draw the table of the newest runs; of the checked ones a click opens the comparison."""
    head = ("", "run", "name", "state", "launcher", "progress", "values", "submitted", "ran", "why")
    rows = [_row(summary, now) for summary in summaries]
    button = el("p", el("button", "Compare the checked runs", type="submit"))
    runs = table(head, rows, caption=format_count(total, "run")) if rows else el("p", f"No runs in {directory} yet.")
    more = el("p", f"the newest {len(rows)} of {total}", class_="soft") if len(rows) < total else None
    form = el("form", runs, more, button if rows else None, action="/compare", method="get")
    return _live("clusterddp", el("h1", "Runs"), el("p", directory, class_="soft"), form)


def draw_run(report: RunReport, *, ranks: Sequence[int]) -> str:
    """Draw the report of one run, with links to the logs of its ranks."""
    links = [el("a", f"rank {rank}", href=_link("/log", run=report.status.run, rank=rank)) for rank in ranks]
    logs = section("Logs", el("p", *_spaced(links))) if links else None
    return _live(f"{report.status.run} - clusterddp", _back(), *draw_parts([report]), logs)


def draw_comparison(reports: Sequence[RunReport]) -> str:
    """Draw several runs beside each other."""
    names = [el("a", report.status.run, href=_link("/run", run=report.status.run)) for report in reports]
    return _live("compared - clusterddp", _back(), el("p", *_spaced(names)), *draw_parts(reports))


def draw_log(run: str, rank: int, stream: str, *, ranks: Sequence[int]) -> str:
    """Draw the page that follows the log of one rank."""
    other = "out" if stream == "err" else "err"
    name = "standard error" if other == "err" else "standard output"
    links = [el("a", name, href=_link("/log", run=run, rank=rank, stream=other))]
    others = (each for each in ranks if each != rank)
    links += [el("a", f"rank {each}", href=_link("/log", run=run, rank=each, stream=stream)) for each in others]
    log = el("pre", data_log=_link("/bytes", run=run, rank=rank, stream=stream), tabindex="0", class_="log")
    up = el("p", el("a", run, href=_link("/run", run=run)))
    return _live(f"{run} rank {rank} - clusterddp", up, el("h1", f"{run}, rank {rank}"), el("p", *_spaced(links)), log)


def _row(summary: RunSummary, now: float) -> tuple[Child, ...]:
    progress = summary.progress
    return (
        el("input", type="checkbox", name="run", value=summary.run, aria_label=f"compare {summary.run}"),
        el("a", summary.run, href=_link("/run", run=summary.run)),
        summary.name + (f" {summary.variant}" if summary.variant else ""),
        state(summary.state.value),
        summary.launcher,
        short_progress(progress),
        ", ".join(measures(progress)) if progress else "",
        f"{duration(now - summary.created)} ago",
        duration(summary.times.running_s),
        "" if summary.state.value in {"RUNNING", "COMPLETED"} else summary.reason,
    )


def _live(title: str, *body: Child) -> str:
    return document(title, *body, el("p", "", id="live", role="status"), live=True)


def _back() -> Html:
    return el("p", el("a", "all runs", href="/"))


def _spaced(parts: Sequence[Html]) -> list[Child]:
    return [each for part in parts for each in (part, " ")]


def _link(path: str, **query: object) -> str:
    return f"{path}?{urlencode(query)}"

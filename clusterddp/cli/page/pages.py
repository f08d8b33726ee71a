"""The pages of report and dash: runs in one file of HTML that asks for nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from clusterddp.cli.page.drawing import (
    Child,
    Html,
    Series,
    chart,
    clock,
    cut,
    document,
    el,
    facts,
    folded,
    join,
    key_order,
    legend,
    section,
    table,
)
from clusterddp.cli.terminal import duration
from clusterddp.cli.text.compare import number_text, result_texts
from clusterddp.cli.text.status import checkpoint_text, measures, short_progress, usage_texts
from clusterddp.ranks.environment import spell_ranks
from clusterddp.system.units import format_count
from clusterddp.view.background import FileDiff
from clusterddp.view.effective import PARTS
from clusterddp.view.ranks import RankStatus
from clusterddp.view.report import Comparison, Difference, RunReport, compare
from clusterddp.view.status import RunSummary

MAX_BYTES = 300_000
"""The size of a page, whatever the length and number of its runs."""
MOST_RUNS = 200
"""Rows of the dashboard's table of runs."""
_CELL = 160
_DIFF = {"+": "ins", "-": "del"}
_USAGE = {"MS/STEP": "ms a step", "CPU": "cores", "MEMORY": "memory", "GPU": "GPU"}
_FOLDED_FROM = 48
"""From this number of ranks on, equal ranks of a host are one row."""


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
    title = f"{cut(', '.join(report.status.run for report in reports), 120)} - clusterddp"
    written = f"Written {clock(reports[0].made)} by clusterddp report; {reports[0].directory}"
    limits = Limits()
    while True:
        page = document(title, *draw_parts(reports, limits), el("p", written, class_="soft"))
        if len(page.encode()) <= MAX_BYTES:
            return page
        limits = limits.halved()


def draw_parts(reports: Sequence[RunReport], limits: Limits | None = None) -> list[Child]:
    """Draw what stands on the page of one run or several."""
    limits = limits or Limits()
    return _one(reports[0], limits) if len(reports) == 1 else _several(reports, limits)


def draw_runs(summaries: Sequence[RunSummary], *, total: int, directory: str, now: float) -> str:
    """Draw the table of the newest runs; of the checked ones a click opens the comparison."""
    head = ("", "run", "name", "state", "launcher", "progress", "values", "submitted", "ran", "why")
    rows = [_row(summary, now) for summary in summaries]
    button = el("p", el("button", "Compare the checked runs", type="submit"))
    runs = table(head, rows, caption=format_count(total, "run")) if rows else el("p", f"No runs in {directory} yet.")
    more = el("p", f"the newest {len(rows)} of {total}", class_="soft") if len(rows) < total else None
    form = el("form", runs, more, button if rows else None, action="/compare", method="get")
    return _live("clusterddp", el("h1", "Runs"), el("p", directory, class_="soft"), form)


def draw_empty() -> str:
    """Draw the page that everybody gets: its script has the key, or says where it is."""
    return _live("clusterddp", el("noscript", "This page needs JavaScript, which sends the key to the dashboard."))


def draw_reports(reports: Sequence[RunReport], *, ranks: Sequence[int]) -> str:
    """Draw the report of one run, with links to the logs of its ranks; or several runs beside each other."""
    up, first = el("p", el("a", "all runs", href="/")), reports[0].status.run
    if len(reports) > 1:
        names = [el("a", each.status.run, href=_link("/run", run=each.status.run)) for each in reports]
        return _live("compared - clusterddp", up, el("p", *_spaced(names)), *draw_parts(reports))
    links = [el("a", f"rank {rank}", href=_link("/log", run=first, rank=rank)) for rank in ranks]
    logs = section("Logs", el("p", *_spaced(links))) if links else None
    return _live(f"{first} - clusterddp", up, *draw_parts(reports), logs)


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


def _one(report: RunReport, limits: Limits) -> list[Child]:
    status = report.status
    return [
        el("h1", status.run, " ", _state(status.state.value)),
        el("p", _where(report), class_="soft"),
        el("p", report.status.variant) if report.status.variant else None,
        el("p", status.reason) if status.state.value != "COMPLETED" and not status.root_cause else None,
        el("p", el("strong", "warning: "), status.warning) if status.warning else None,
        el("p", checkpoint_text(status.checkpoint, finished=status.finished)) if status.checkpoint else None,
        el(
            "ul",
            *(el("li", el("b", text), name) for name, text in result_texts(report.results).items()),
            class_="cards",
        ),
        _cause(report),
        _charts([report], limits),
        section("Values", _curves_table(report, limits.rows)),
        section("Time", _effective_table(report), _attempts_table(report, limits.rows)),
        section("Ranks", _ranks_table(report, limits.rows)),
        section(
            "Made of",
            *_background_parts(report, limits.rows),
            _file_diffs("Changes that were not committed", report.uncommitted, limits.diff_lines),
        ),
    ]


def _several(reports: Sequence[RunReport], limits: Limits) -> list[Child]:
    compared = compare(reports[: limits.runs])
    return [
        el("h1", format_count(len(reports), "run")),
        section("Results", _results_table(reports[: limits.runs]), _more(len(reports), limits.runs)),
        section("What differs", *_differences(compared, limits.rows, limits.diff_lines)),
        _charts(reports, limits),
        section("Each run", *(_detail(report, limits.rows) for report in reports[: limits.details])),
        _more(len(reports), limits.details),
    ]


def _detail(report: RunReport, most: int) -> Html:
    return el(
        "div",
        el("h3", report.status.run, " ", _state(report.status.state.value)),
        el("p", _where(report), class_="soft"),
        _cause(report),
        _attempts_table(report, most),
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
    notes = [note for report in drawn for note in _notes_of(report)]
    notes += [f"{format_count(len(keys) - len(shown), 'more key')} not drawn"] if len(keys) > len(shown) else []
    return section(
        "Curves",
        legend(
            [report.status.run + (f"  {report.status.variant}" if report.status.variant else "") for report in drawn]
        ),
        _more(len(reports), len(drawn)),
        el("div", *(chart(at, key, series[key], points) for at, key in enumerate(shown)), class_="charts"),
        *(el("p", note, class_="soft") for note in notes[:40]),
    )


def _notes_of(report: RunReport) -> list[str]:
    """Write what the curves of a run do not show."""
    curves, run = report.curves, report.status.run
    notes = [
        f"{run}: {curve.key} ({curve.kind}) is not a finite number at step {curve.not_finite:.0f}"
        for curve in curves.curves.values()
        if curve.not_finite is not None
    ]
    if curves.read_rows < curves.total_rows:
        read = f"{curves.read_rows:,} of {curves.total_rows:,} rows"
        notes.insert(0, f"{run}: the curves are drawn from {read}: every evaluation and a sample of the others")
    return notes


def _more(count: int, shown: int) -> Html | None:
    return el("p", f"and {format_count(count - shown, 'run')} more", class_="soft") if count > shown else None


def _where(report: RunReport) -> str:
    status = report.status
    job = f"job {status.job_id}" if status.job_id else ""
    parts = [status.name if status.name != status.run else "", status.launcher, job]
    parts += [format_count(status.world_size, "rank"), f"submitted {clock(status.created)}"]
    until = status.ended or (None if status.state.finished else report.made)
    parts += [f"{duration(until - status.created)} from submit to {'end' if status.ended else 'now'}"] if until else []
    return ", ".join(part for part in parts if part)


def _state(word: str) -> Html:
    """Write a state; the word alone says all."""
    return el("span", word, class_=f"state {word}")


def _effective_table(report: RunReport) -> Html | None:
    """Draw where the time since the first step went: a bar for each part, and what each took after failures."""
    effective = report.status.effective
    if effective is None:
        return None
    rows: list[list[Child]] = [
        [
            name,
            el("progress", value=f"{effective.parts[part]:.1f}", max=f"{effective.seconds:.1f}", aria_label=name),
            f"{effective.parts[part] / effective.seconds:.1%}",
            duration(effective.parts[part]),
            *(f"{each[part]:.1f} s" if part in each else "-" for each in (effective.median_s, effective.worst_s)),
        ]
        for part, name in PARTS.items()
        if effective.parts[part]
    ]
    columns = 6 if effective.faults else 4
    head = ["", "", "share", "time", "after a failure, median", "worst"]
    faults = f", {format_count(effective.faults, 'failure')}" if effective.faults else ""
    whole = f"{effective.ratio:.1%} effective of {duration(effective.seconds)} since the first step{faults}"
    return table(head[:columns], [row[:columns] for row in rows], caption=whole)


def _cause(report: RunReport) -> Html | None:
    """Draw why the run failed, with the end of the log that explains it."""
    root, log = report.status.root_cause, report.log_lines
    if root is None and not log:
        return None
    code = f" (exit code {root.exit_code})" if root and root.exit_code is not None else ""
    return el(
        "div",
        el("p", el("strong", "root cause: "), root.error, code) if root else None,
        el("p", f"the end of {report.log}:", class_="soft") if log else None,
        el("pre", *(join([line, Html("\n")]) for line in log), tabindex="0") if log else None,
        class_="cause",
    )


def _results_table(reports: Sequence[RunReport]) -> Html:
    """Draw a row for each run: its state and what it came to."""
    texts = [result_texts(report.results) for report in reports]
    columns = list(dict.fromkeys(name for of_run in texts for name in of_run))
    variants = any(report.status.variant for report in reports)
    rows: list[list[Child]] = [
        [
            report.status.run,
            *([report.status.variant] if variants else []),
            _state(report.status.state.value),
            *(of_run.get(name, "-") for name in columns),
            cut(report.status.root_cause.error if report.status.root_cause else "", _CELL),
        ]
        for report, of_run in zip(reports, texts, strict=True)
    ]
    return table(["run", *(["variant"] if variants else []), "state", *columns, "why"], rows, caption="Runs")


def _curves_table(report: RunReport, most: int) -> Html | None:
    """Draw the first, last, lowest and highest value of each curve."""
    curves = sorted(report.curves.curves.values(), key=lambda curve: (*key_order(curve.key), curve.kind))
    rows: list[list[Child]] = []
    for curve in [curve for curve in curves if curve.values][:most]:
        low, high = curve.best(highest=False), curve.best(highest=True)
        if low and high:
            ends = [number_text(low[0]), number_text(low[1]), number_text(high[0]), number_text(high[1])]
            last = [number_text(curve.values[-1]), number_text(curve.steps[-1])]
            rows.append([cut(curve.key, 80), curve.kind, *last, *ends])
    head = ["value", "of", "last", "at step", "lowest", "at step", "highest", "at step"]
    return table(head, rows, caption="Each value that was measured or logged") if rows else None


def _attempts_table(report: RunReport, most: int) -> Html | None:
    """Draw a row for each attempt."""
    rows: list[list[Child]] = [
        [
            f"attempt {attempt.number}",
            _state(attempt.outcome),
            clock(attempt.asked),
            duration(attempt.waited_s),
            "-" if attempt.started is None else duration(attempt.ran_s),
            cut(attempt.reason + (" (started again)" if attempt.will_restart else ""), _CELL),
        ]
        for attempt in report.timeline.attempts[-most:]
    ]
    return table(["", "outcome", "asked for", "waited", "ran", "why"], rows, caption="Attempts") if rows else None


def _ranks_table(report: RunReport, most: int) -> Html | None:
    """Draw the ranks of the newest attempt; many ranks are folded by host, state and exit code."""
    ranks = report.status.ranks
    usage = _USAGE if any(rank.usage for rank in ranks) else {}
    folds: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        key = (rank.host, rank.state, rank.exit_code) if len(ranks) >= _FOLDED_FROM else (rank.rank,)
        folds.setdefault(key, []).append(rank)
    rows: list[list[Child]] = [
        [
            cut(spell_ranks(rank.rank for rank in fold), 60),
            fold[0].node_rank,
            fold[0].host,
            _state(fold[0].state),
            "-" if fold[0].exit_code is None else fold[0].exit_code,
            fold[0].interface or "-",
            *(usage_texts(fold)[title] for title in usage),
        ]
        for fold in list(folds.values())[:most]
    ]
    head = ["rank", "node", "host", "state", "exit code", "interface", *usage.values()]
    return table(head, rows, caption="Ranks of the newest attempt") if rows else None


def _background_parts(report: RunReport, most: int) -> list[Html | None]:
    """Draw what a run was made of: code, machine, hosts; configuration and packages folded."""
    ground = report.background
    phases = [(name.replace("_", " "), f"{seconds:.1f} s") for name, seconds in report.status.start_phases.items()]
    beside = [
        facts(ground.code_facts.items(), caption="Code"),
        facts(_cells(ground.places, most), caption="Where it ran"),
        facts(_cells(ground.machine, most), caption="The machine that submitted"),
        facts(phases, caption="Start of the newest attempt"),
    ]
    return [
        el("div", *beside, class_="beside") if any(beside) else None,
        folded("Configuration", facts(_cells(ground.config, most), caption="The spec as resolved")),
        folded(
            f"Packages ({len(ground.packages)})",
            facts(_cells(ground.packages, 2 * most), caption="Packages of the machine that submitted"),
        ),
    ]  # fmt: skip


def _cells(values: Mapping[str, str], most: int) -> list[tuple[str, Child]]:
    return [(cut(name, 80), cut(value, _CELL)) for name, value in list(values.items())[:most]]


def _differences(compared: Comparison, most: int, diff_lines: int) -> list[Html | None]:
    """Draw what differs between runs."""
    names = [report.status.run for report in compared.runs]
    tables = [_difference_table(title.capitalize(), names, rows, most) for title, rows in compared.by_part.items()]
    room = max(10, diff_lines // max(1, len(compared.diffs)))
    diffs = [
        _file_diffs(f"Code of {diff.run} against {names[0]}", diff.files, room) for diff in compared.diffs[:diff_lines]
    ]
    if not tables and not any(diffs):
        return [el("p", "Nothing of what is recorded: the same configuration, code, packages, hosts and machine.")]
    return [*tables, *diffs]


def _difference_table(title: str, names: Sequence[str], rows: Sequence[Difference], most: int) -> Html:
    """Draw keys as rows, or, for more than eight runs, the keys as columns."""
    shown = rows[: max(1, most * 4 // max(4, len(names)))]
    cells: list[list[Child]]
    if len(names) > 8:
        few = shown[:12]
        cells = [[name, *(_value(row, at) for row in few)] for at, name in enumerate(names)]
        return table(["run", *(cut(row.key, 40) for row in few)], cells, caption=title)
    cells = [[cut(row.key, 80), *(_value(row, at) for at in range(len(names)))] for row in shown]
    more = f" (and {len(rows) - len(shown)} more)" if len(rows) > len(shown) else ""
    return table(["", *names], cells, caption=f"{title}{more}")


def _value(row: Difference, at: int) -> str:
    value = row.values[at]
    return "-" if value is None else cut(value, _CELL)


def _file_diffs(title: str, files: Sequence[FileDiff], most: int) -> Html | None:
    """Draw files that differ, with at most so many lines in all."""
    if not files:
        return None
    parts: list[Child] = []
    for file in files:
        lines = file.lines[: max(0, most)]
        most -= len(lines) + 1
        left_out = len(file.lines) - len(lines) + file.left_out_lines
        more = f", {format_count(left_out, 'line')} not shown" if left_out else ""
        parts.append(el("p", el("strong", file.path), f" {file.change}{more}"))
        drawn = (join([el(_DIFF.get(line[:1], "span"), cut(line, _CELL)), Html("\n")]) for line in lines)
        parts.append(el("pre", *drawn, tabindex="0") if lines else None)
        if most <= 0:
            break
    return folded(f"{title}: {format_count(len(files), 'file')}", *parts, is_open=len(files) <= 3)


def _row(summary: RunSummary, now: float) -> tuple[Child, ...]:
    progress = summary.progress
    return (
        el("input", type="checkbox", name="run", value=summary.run, aria_label=f"compare {summary.run}"),
        el("a", summary.run, href=_link("/run", run=summary.run)),
        summary.name + (f" {summary.variant}" if summary.variant else ""),
        _state(summary.state.value),
        summary.launcher,
        short_progress(progress),
        ", ".join(measures(progress)) if progress else "",
        f"{duration(now - summary.created)} ago",
        duration(summary.times.running_s),
        "" if summary.state.value in {"RUNNING", "COMPLETED"} else summary.reason,
    )


def _live(title: str, *body: Child) -> str:
    return document(title, *body, el("p", "", id="live", role="status"), live=True)


def _spaced(parts: Sequence[Html]) -> list[Child]:
    return [each for part in parts for each in (part, " ")]


def _link(path: str, **query: object) -> str:
    return f"{path}?{urlencode(query)}"

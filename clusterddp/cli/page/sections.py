"""The tables of the page: results, values, attempts, ranks, what a run was made of, and what differs between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterddp.cli.page.charts import key_order
from clusterddp.cli.page.html import Child, Html, clock, cut, el, facts, folded, join, table
from clusterddp.cli.terminal import duration, rank_span
from clusterddp.cli.text.compare import number_text, result_texts
from clusterddp.cli.text.rank_table import usage_texts
from clusterddp.look.code import FileDiff
from clusterddp.look.compare import Comparison, Difference
from clusterddp.look.ranks import RankStatus
from clusterddp.look.report import RunReport
from clusterddp.system.units import format_bytes, format_count

_CELL = 160
_FOLDED_FROM = 48
"""From this number of ranks on, equal ranks of a host are one row."""


def state(word: str) -> Html:
    """Write a state; the word alone says all."""
    return el("span", word, class_=f"state {word}")


def cards(report: RunReport) -> Html:
    """Draw the results as large numbers, and what the ratio means."""
    items = [el("li", el("b", text), name) for name, text in result_texts(report.results).items()]
    note = el(
        "p",
        "effective: seconds in optimizer steps by the seconds from the first start of ranks to the last end",
        class_="soft",
    )
    return join([el("ul", *items, class_="cards"), note if report.results.effective is not None else None])


def cause(report: RunReport) -> Html | None:
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


def results_table(reports: Sequence[RunReport]) -> Html:
    """Draw a row for each run: its state and what it came to."""
    texts = [result_texts(report.results) for report in reports]
    columns = list(dict.fromkeys(name for of_run in texts for name in of_run))
    variants = any(report.variant for report in reports)
    rows: list[list[Child]] = [
        [
            report.status.run,
            *([report.variant] if variants else []),
            state(report.status.state.value),
            *(of_run.get(name, "-") for name in columns),
            cut(report.status.root_cause.error if report.status.root_cause else "", _CELL),
        ]
        for report, of_run in zip(reports, texts, strict=True)
    ]
    return table(["run", *(["variant"] if variants else []), "state", *columns, "why"], rows, caption="Runs")


def curves_table(report: RunReport, most: int) -> Html | None:
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


def attempts_table(report: RunReport, most: int) -> Html | None:
    """Draw a row for each attempt."""
    rows: list[list[Child]] = [
        [
            f"attempt {attempt.number}",
            state(attempt.outcome),
            clock(attempt.asked),
            duration(attempt.waited_s),
            "-" if attempt.started is None else duration(attempt.ran_s),
            cut(attempt.reason + (" (started again)" if attempt.will_restart else ""), _CELL),
        ]
        for attempt in report.timeline.attempts[-most:]
    ]
    return table(["", "outcome", "asked for", "waited", "ran", "why"], rows, caption="Attempts") if rows else None


def events_table(report: RunReport, most: int) -> Html | None:
    """Draw the history of the run, folded."""
    rows: list[list[Child]] = [
        [clock(event.time), event.name, cut(", ".join(f"{key} {value}" for key, value in event.facts.items()), _CELL)]
        for event in report.timeline.events[-min(most, 100) :]
    ]
    return folded("Events", table(["time", "event", ""], rows, caption="The newest events")) if rows else None


def ranks_table(report: RunReport, most: int) -> Html | None:
    """Draw the ranks of the newest attempt; many ranks are folded by host, state and exit code."""
    ranks = report.status.ranks
    is_known = any(rank.usage for rank in ranks)
    folds: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        key = (rank.host, rank.state, rank.exit_code) if len(ranks) >= _FOLDED_FROM else (rank.rank,)
        folds.setdefault(key, []).append(rank)
    rows: list[list[Child]] = [
        [
            _numbers([rank.rank for rank in fold]),
            fold[0].node_rank,
            fold[0].host,
            state(fold[0].state),
            "-" if fold[0].exit_code is None else fold[0].exit_code,
            fold[0].interface or "-",
            *(usage_texts(fold) if is_known else ()),
        ]
        for fold in list(folds.values())[:most]
    ]
    head = ["rank", "node", "host", "state", "exit code", "interface"]
    head += ["ms a step", "cores", "memory", "GPU"] if is_known else []
    return table(head, rows, caption="Ranks of the newest attempt") if rows else None


def _numbers(ranks: Sequence[int]) -> str:
    is_span = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    return rank_span(ranks) if is_span or len(ranks) == 1 else cut(", ".join(map(str, ranks)), 60)


def checkpoints_table(report: RunReport) -> Html | None:
    """Draw the newest checkpoints."""
    rows: list[list[Child]] = [
        [
            checkpoint.file,
            "-" if checkpoint.step is None else number_text(checkpoint.step),
            "-" if checkpoint.epoch is None else checkpoint.epoch,
            "-" if checkpoint.num_bytes is None else format_bytes(checkpoint.num_bytes),
            "-" if checkpoint.created is None else clock(checkpoint.created),
        ]
        for checkpoint in reversed(report.checkpoints[-5:])
    ]
    head = ["file", "step", "epoch", "size", "written"]
    return table(head, rows, caption="Newest checkpoints") if rows else None


def background_parts(report: RunReport, most: int) -> list[Html | None]:
    """Draw what a run was made of: code, machine, hosts; configuration and packages folded."""
    ground = report.background
    snapshot = ground.code.name if ground.code else None
    phases = [(name.replace("_", " "), f"{seconds:.1f} s") for name, seconds in report.status.start_phases.items()]
    changes = ("yes" if ground.is_dirty else "no") if ground.commit else None
    code = [("commit", ground.commit), ("branch", ground.branch), ("uncommitted changes", changes)]
    beside = [
        facts([*code, ("snapshot", snapshot and cut(snapshot, 24))], caption="Code"),
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


def differences(compared: Comparison, most: int, diff_lines: int) -> list[Html | None]:
    """Draw what differs between runs."""
    names = [report.status.run for report in compared.runs]
    parts = [
        ("Configuration", compared.spec),
        ("Code", compared.code),
        ("Packages", compared.packages),
        ("Hosts and ranks", compared.places),
        ("The machine that submitted", compared.machine),
    ]
    tables = [_difference_table(title, names, rows, most) for title, rows in parts if rows]
    room = max(10, diff_lines // max(1, len(compared.diffs)))
    diffs = [
        file_diffs(f"Code of {diff.run} against {names[0]}", diff.files, room) for diff in compared.diffs[:diff_lines]
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


def uncommitted(report: RunReport, most: int) -> Html | None:
    """Draw what was changed since the commit."""
    return file_diffs("Changes that were not committed", report.uncommitted, most)


def file_diffs(title: str, files: Sequence[FileDiff], most: int) -> Html | None:
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
        parts.append(el("pre", *map(_diff_line, lines), tabindex="0") if lines else None)
        if most <= 0:
            break
    return folded(f"{title}: {format_count(len(files), 'file')}", *parts, is_open=len(files) <= 3)


def _diff_line(line: str) -> Html:
    kind = {"+": "ins", "-": "del"}.get(line[:1], "span")
    return join([el(kind, cut(line, _CELL)), Html("\n")])

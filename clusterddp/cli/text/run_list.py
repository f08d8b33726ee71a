"""Show many runs as a table, one a line, and sweeps: their plan, and how they go on.

A table has the width of the terminal: the least important columns give way first.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import WITHOUT_REASON, Column, duration, lay_out, state_text, table, wrapped
from clusterddp.cli.text import plan as plan_text
from clusterddp.cli.text.plan import value_text
from clusterddp.cli.text.status import short_progress
from clusterddp.system.units import format_bytes, format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.slurm.launcher import Verdict
    from clusterddp.submission.sweep_plan import SweepPlan
    from clusterddp.view.status import RunSummary, SweepStatus

_LEAST_NAME = 22
"""To so much a name is cut where nothing else gives way; commands take the beginning of a name."""
_RANK_OF_ERROR = re.compile(r"rank \d+ on \S+: ")
_MOST_RUNS_SHOWN = 40
"""In a verbose plan."""
_FEW_RUNS_SHOWN = 8
_SHOWN_FIRST = {state: number for number, state in enumerate(["RUNNING", "FAILED", "LOST", "REQUEUED", "PENDING"])}


def list_lines(summaries: Sequence[RunSummary], *, now: float, columns: int | None, wide: bool = False) -> list[str]:
    """Lay out runs; no line is longer than `columns` when that is given, unless `wide`."""
    room = None if wide else columns
    names = wide or len({summary.name for summary in summaries}) > 1
    launchers = [printable(run.launcher) + (" hold" if run.hold == run.run else "") for run in summaries]
    accuracies = [summary.progress.accuracy if summary.progress else None for summary in summaries]
    table_columns = [
        Column(title="RUN", cells=[printable(run.run) for run in summaries], least=_LEAST_NAME),
        Column(title="VARIANT", cells=[printable(run.variant) or "-" for run in summaries], gives_way=1, least=10),
        Column(title="NAME", cells=[printable(run.name) for run in summaries], gives_way=4, least=8),
        Column(title="STATE", cells=[run.state.value for run in summaries], paint=state_text),
        Column(title="LAUNCHER", cells=launchers, gives_way=8),
        Column(title="PROGRESS", cells=[short_progress(run.progress) for run in summaries], gives_way=3),
        Column(title="ACCURACY", cells=["-" if each is None else f"{each:.1%}" for each in accuracies], gives_way=5),
        Column(title="SUBMITTED", cells=[_when(run.created, now) for run in summaries], gives_way=7),
        Column(title="TIME", cells=[_time(run) for run in summaries], gives_way=2),
        Column(title="SIZE", cells=[format_bytes(run.bytes or 0) for run in summaries]),
        Column(title="WHY", cells=[_reason(run, short=room is not None) for run in summaries], gives_way=6, least=10),
    ]
    left_out = {"VARIANT"} if not any(run.variant for run in summaries) else set()
    left_out |= set() if names else {"NAME"}
    left_out |= {"SIZE"} if all(run.bytes is None for run in summaries) else set()
    return lay_out([column for column in table_columns if column.title not in left_out], room=room)


def _reason(summary: RunSummary, *, short: bool) -> str:
    """Write why a run is in its state, and is not obeyed; `short`: without the rank and host, which `status` has."""
    reason = "" if summary.state.value in WITHOUT_REASON else printable(summary.reason)
    reason = _RANK_OF_ERROR.sub("", reason, count=1) if short else reason
    return "; ".join(filter(None, (summary.mark, reason)))


def _time(summary: RunSummary) -> str:
    """Write how long the ranks ran; of a run that waits for its first start, how long it waits."""
    times = summary.times
    if times.running_s:
        return duration(times.running_s)
    return f"waits {duration(times.queued_s).split()[0]}" if summary.state.value == "PENDING" else "-"


def _when(created: float, now: float) -> str:
    if now - created < 86400:
        return f"{duration(now - created)} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created))


def masked_plan(plan: SweepPlan, verdict: Verdict | None = None) -> dict[str, Any]:
    """Return the plan as JSON data, without secret tokens; `plan` is that of the first run."""
    return {
        "sweep": plan.sweep,
        "launcher": plan.base.launcher,
        "path": str(plan.path),
        "keys": list(plan.keys),
        "throttle": plan.throttle,
        "command": list(plan.command),
        "runs": [
            {"run": run.run, "variant": variant.label, "values": variant.values}
            for run, variant in zip(plan.runs, plan.variants, strict=True)
        ],
        "plan": plan_text.masked_plan(plan.base),
    } | ({"scheduler": dataclasses.asdict(verdict)} if verdict else {})


def plan_lines(plan: SweepPlan, *, verbose: bool, columns: int | None) -> list[str]:
    """Write what a submit of a sweep would do: its runs, what starts them, the plan of the first run."""
    carrier = "one Slurm job array" if plan.job else "started in turn by a queue on this machine"
    lines = [f"sweep {click.style(plan.sweep, bold=True)}: {format_count(len(plan.runs), 'run')}, {carrier}", ""]
    rows = [["RUN", *plan.keys]]
    shown = _MOST_RUNS_SHOWN if verbose else _FEW_RUNS_SHOWN
    for run, variant in zip(plan.runs[:shown], plan.variants[:shown], strict=True):
        values = (
            shlex.join(map(str, each)) if isinstance(each, list | tuple) else each for each in variant.values.values()
        )
        rows.append([run.run, *map(value_text, values)])
    lines += table(rows, indent="  ")
    if len(plan.runs) > shown:
        lines.append(f"  ... and {len(plan.runs) - shown} more, to {plan.runs[-1].run}")
    many = "as many as Slurm starts" if plan.job else "as many as there are GPUs for"
    lines += ["", f"  at a time  {plan.width or many}"]
    if plan.job:
        own = "that of the script"
        lines += [f"  array      {next((word for word in plan.command if word.startswith('--array=')), own)}"]
    elif verbose:
        lines += [f"  queue      {printable(shlex.join(plan.command))}"]
    lines += [f"  directory  {printable(str(plan.path))}", "", "the first run, as an example:", ""]
    commands = (plan.command, *plan.base.commands[1:]) if plan.job else plan.base.commands
    first = dataclasses.replace(plan.base, commands=commands, notes=plan.notes)
    return lines + plan_text.plan_lines(first, verbose=verbose, columns=columns)


def status_lines(status: SweepStatus, *, columns: int | None, rows: int | None = None) -> list[str]:
    """Write a sweep: the states of its runs, what starts them, what their queue waits for, and a table of the runs.

    `rows`: how many lines there may be; runs that run or failed are shown before others.
    """
    where = f"{format_count(len(status.runs), 'run')}, " + (
        carrier_text(status.launcher, status.job_id) if status.job_id else status.launcher
    )
    where += f", {status.throttle} at a time" if status.throttle else ""
    head = f"{click.style(status.sweep, bold=True)}  {counts_text(status)}  {where}"
    lines = wrapped(head, columns, indent=2)
    lines += [each for line in _queue_lines(status) for each in wrapped(f"  {line}", columns, indent=4)]
    runs, room = list(status.runs), None if rows is None else max(1, rows - len(lines) - 2)
    if room is not None and len(runs) > room:
        first = sorted(runs, key=lambda run: _SHOWN_FIRST.get(run.state.value, len(_SHOWN_FIRST)))[:room]
        runs = [run for run in runs if run in first]
    lines += list_lines(runs, now=time.time(), columns=columns)
    left = len(status.runs) - len(runs)
    return [*lines, f"... and {left} more: clusterddp list {status.sweep}"] if left else lines


def counts_text(status: SweepStatus) -> str:
    """Write how many runs are in which state, in colour."""
    return ", ".join(f"{count} {state_text(state)}" for state, count in status.states.items())


def plain_counts(states: dict[str, int]) -> str:
    """Write how many runs are in which state, without colour."""
    return ", ".join(f"{count} {state}" for state, count in states.items())


def carrier_text(launcher: str, job_id: str) -> str:
    """Name what starts the runs: the job array, or the queue."""
    return printable(f"{launcher} job array {job_id}" if launcher == "slurm" else f"{launcher} queue, pid {job_id}")


def _queue_lines(status: SweepStatus) -> list[str]:
    """Write what the queue does; nothing where Slurm starts the runs, or no run is left to start."""
    if status.queue is None:
        return []
    state, host = status.queue.state, status.queue.process.host
    if state == "RUNNING":
        return [f"the queue waits: {printable(status.queue.waits_for)}"] if status.queue.waits_for else []
    if state == "UNKNOWN":
        return [f"the queue is on {printable(host)}, which cannot be asked from here"]
    if "LOST" not in status.states:
        return []
    what = f"has ended: {status.queue.why}" if state == "ENDED" else "is gone"
    return [f"the queue {printable(what)}; continue with: clusterddp resume {status.sweep}"]

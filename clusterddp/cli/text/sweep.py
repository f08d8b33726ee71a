"""Show a sweep as text: its plan, the job array or queue that starts its runs, the number of runs in each state."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import table
from clusterddp.cli.text import plan as plan_text
from clusterddp.cli.text.status import state_text
from clusterddp.look.printable import printable
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.look.sweep import SweepStatus
    from clusterddp.sweep.plan import SweepPlan

_MOST_RUNS_SHOWN = 40


def masked_plan(plan: SweepPlan) -> dict[str, Any]:
    """Return the plan as JSON data, without secret tokens; `plan` is that of the first run."""
    return {
        "sweep": plan.sweep,
        "launcher": plan.base.launcher,
        "path": str(plan.path),
        "keys": list(plan.keys),
        "throttle": plan.throttle,
        "command": list(plan.command),
        "runs": [
            {"run": run.run, "variant": label, "values": values}
            for run, label, values in zip(plan.runs, plan.labels, plan.values, strict=True)
        ],
        "plan": plan_text.masked_plan(plan.base),
    }


def plan_lines(plan: SweepPlan) -> list[str]:
    """Write everything that a submit of a sweep would do: its runs, what starts them, the plan of the first run."""
    carrier = "one Slurm job array" if plan.job else "started in turn by a queue on this machine"
    lines = [f"sweep {click.style(plan.sweep, bold=True)}: {format_count(len(plan.runs), 'run')}, {carrier}", ""]
    rows = [["RUN", *plan.keys]]
    for run, values in zip(plan.runs[:_MOST_RUNS_SHOWN], plan.values[:_MOST_RUNS_SHOWN], strict=True):
        rows.append([run.run, *(_cell(value) for value in values.values())])
    lines += table(rows, indent="  ")
    if len(plan.runs) > _MOST_RUNS_SHOWN:
        lines.append(f"  ... and {len(plan.runs) - _MOST_RUNS_SHOWN} more, to {plan.runs[-1].run}")
    many = "as many as Slurm starts" if plan.job else "as many as there are GPUs for"
    lines += ["", f"  at a time  {plan.width or many}"]
    if plan.job:
        lines += [f"  array      {next(word for word in plan.command if word.startswith('--array='))}"]
    else:
        lines += [f"  queue      {printable(shlex.join(plan.command))}"]
    lines += [f"  directory  {printable(str(plan.path))}", "", "the first run, as an example:", ""]
    commands = (plan.command, *plan.base.commands[1:]) if plan.job else plan.base.commands
    return lines + plan_text.plan_lines(dataclasses.replace(plan.base, commands=commands, notes=plan.notes))


def status_head(status: SweepStatus) -> str:
    """Write the lines above the table of runs: the states, what starts the runs, and what their queue waits for."""
    where = f"{format_count(len(status.runs), 'run')}, " + (
        carrier_text(status.launcher, status.job_id) if status.job_id else status.launcher
    )
    where += f", {status.throttle} at a time" if status.throttle else ""
    head = f"{click.style(status.sweep, bold=True)}  {counts_text(status)}  {where}"
    return "\n".join([head, *(f"  {line}" for line in _queue_lines(status))])


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
    state, host = status.queue.state, status.queue.identity.host
    if state == "RUNNING":
        return [f"the queue waits: {printable(status.queue.waits_for)}"] if status.queue.waits_for else []
    if state == "UNKNOWN":
        return [f"the queue is on {printable(host)}, which cannot be asked from here"]
    if "LOST" not in status.states:
        return []
    what = f"has ended: {status.queue.why}" if state == "ENDED" else "is gone"
    return [f"the queue {printable(what)}; continue with: clusterddp resume {status.sweep}"]


def _cell(value: Any) -> str:
    return printable(value if isinstance(value, str) else _joined(value))


def _joined(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, Sequence) else plan_text.value_text(value)

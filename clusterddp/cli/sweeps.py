"""Sweeps as people see them: the plan, what was submitted, all runs at once, and waiting for them."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli import plan_text
from clusterddp.cli.arguments import default_runs_dir
from clusterddp.cli.status_text import list_lines, state_text
from clusterddp.cli.terminal import Terminal, duration, put, put_json, say, table
from clusterddp.cli.watch import say_note
from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.look.printable import printable
from clusterddp.results.sync import Synchroniser

if TYPE_CHECKING:
    from clusterddp.look.sweep import SweepStatus
    from clusterddp.run.sweep_dir import SweepDir
    from clusterddp.sweep.plan import SweepPlan
    from clusterddp.sweep.queue_control import SubmittedSweep

MOST_RUNS_SHOWN = 40
_POLL_INTERVAL_S = 1.0
_POLL_COST_SHARE = 5.0
"""Reading a thousand runs takes a while: no more than a fifth of the time is spent on it."""
_LINE_INTERVAL_S = 60.0


def show_plan(plan: SweepPlan, terminal: Terminal, *, output: str) -> int:
    """Show the plan of a sweep and what the scheduler says of it; return the exit code."""
    verdict = None
    if plan.job:
        from clusterddp.launchers.slurm.ask import ask_scheduler

        verdict = ask_scheduler(plan.job, terminal.environ)
    if output == "json":
        put_json(masked_plan(plan) | ({"scheduler": dataclasses.asdict(verdict)} if verdict else {}))
    else:
        put("\n".join([*plan_lines(plan), *plan_text.verdict_lines(verdict)]))
    return PreflightError.exit_code if verdict and verdict.accepted is False else 0


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
    """Tell everything that a submit of a sweep would do: the variants, what starts them, the plan of the first run."""
    carrier = "one Slurm job array" if plan.job else "started in turn by a queue on this machine"
    lines = [f"sweep {click.style(plan.sweep, bold=True)}: {_count(len(plan.runs))}, {carrier}", ""]
    rows = [["RUN", *plan.keys]]
    for run, values in zip(plan.runs[:MOST_RUNS_SHOWN], plan.values[:MOST_RUNS_SHOWN], strict=True):
        rows.append([run.run, *(_cell(value) for value in values.values())])
    lines += table(rows, indent="  ")
    if len(plan.runs) > MOST_RUNS_SHOWN:
        lines.append(f"  ... and {len(plan.runs) - MOST_RUNS_SHOWN} more, to {plan.runs[-1].run}")
    many = "as many as Slurm starts" if plan.job else "as many as there are GPUs for"
    lines += ["", f"  at a time  {plan.width or many}"]
    if plan.job:
        lines += [f"  array      {next(word for word in plan.command if word.startswith('--array='))}"]
    else:
        lines += [f"  queue      {printable(shlex.join(plan.command))}"]
    lines += [f"  directory  {printable(str(plan.path))}", "", "the first run, which stands for all:", ""]
    commands = (plan.command, *plan.base.commands[1:]) if plan.job else plan.base.commands
    return lines + plan_text.plan_lines(dataclasses.replace(plan.base, commands=commands))


def say_submitted(
    submitted: SubmittedSweep, terminal: Terminal, *, verb: str = "submitted", output: str, waits: bool
) -> None:
    """Tell which sweep was submitted, and what to type next."""
    carrier = _carrier(submitted.launcher, submitted.job_id)
    say(f"{verb} {click.style(submitted.sweep, bold=True)}: {_count(len(submitted.runs))}  ({carrier})")
    if output == "json":
        put_json(
            {
                "sweep": submitted.sweep,
                "launcher": submitted.launcher,
                "job_id": submitted.job_id,
                "runs": list(submitted.runs),
            },
            indent=None,
        )
    elif not sys.stdout.isatty():
        put(submitted.sweep)
    if not waits:
        in_usual_place = submitted.path.parent.resolve() == default_runs_dir(terminal).resolve()
        where = submitted.sweep if in_usual_place else shlex.quote(str(submitted.path.resolve()))
        say(f"  status  clusterddp status {where}")
        say(f"  wait    clusterddp wait {where}")
        say(f"  cancel  clusterddp cancel {where}")


def show_sweep(sweep: SweepDir, terminal: Terminal, *, output: str) -> None:
    """Show all runs of a sweep."""
    from clusterddp.look.sweep import read_sweep_status

    with Synchroniser(sweep.runs(), terminal.environ, say=say_note) as sync:
        sync.update()
    status = read_sweep_status(sweep)
    if output == "json":
        put_json(status.to_json())
        return
    put(f"{click.style(status.sweep, bold=True)}  {counts_text(status)}  {_where(status)}")
    if status.queue:
        put("\n".join(f"  {line}" for line in _queue_lines(status)))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    put("\n".join(list_lines(status.runs, now=time.time(), columns=columns)))


def wait_for_all(sweep: SweepDir, terminal: Terminal, *, timeout_s: float | None = None) -> int:
    """Wait until every run of a sweep has ended; return 5 if one failed, else 6 if one was cancelled, else 0.

    Raises: ClusterddpError: not all have ended after `timeout_s` seconds.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with Synchroniser(sweep.runs(), terminal.environ, say=say_note) as sync:
            status = _poll(sweep, sync, deadline)
            if status.finished:
                sync.download()
    except KeyboardInterrupt:
        say(f"\ndetached; the sweep goes on. cancel: clusterddp cancel {sweep.name}")
        raise
    if not status.finished:
        raise ClusterddpError(f"{sweep.name} has not ended after {timeout_s:g} s: {_plain_counts(status.states)}")
    say(f"{sweep.name}  {counts_text(status)}  after {duration(time.time() - status.created)}")
    failed = [run for run in status.runs if run.state.value in {"FAILED", "LOST"}]
    for run in failed[:8]:
        say(f"  {run.run}  {printable(run.variant)}  {printable(run.reason)}")
    if len(failed) > 8:
        say(f"  ... and {len(failed) - 8} more: clusterddp list --state FAILED {sweep.name}")
    if status.queue and any(run.state.value == "LOST" for run in status.runs):
        say(f"  go on   clusterddp resume {sweep.name}")
    return 5 if failed else 6 if "CANCELLED" in status.states else 0


def counts_text(status: SweepStatus) -> str:
    """Tell how many runs are in which state."""
    return ", ".join(f"{count} {state_text(state)}" for state, count in status.states.items())


def _poll(sweep: SweepDir, sync: Synchroniser, deadline: float | None) -> SweepStatus:
    """Look until all runs have ended or the time is up, and tell when something has changed."""
    from clusterddp.look.sweep import read_sweep_status

    said: tuple[str, str] = ("", "")
    said_at = 0.0
    while True:
        begun = time.monotonic()
        sync.update()
        status = read_sweep_status(sweep)
        now = time.monotonic()
        if status.finished or (deadline is not None and now >= deadline):
            return status
        waits_for = status.queue.waits_for if status.queue else ""
        news = (_plain_counts(status.states), waits_for)
        if news != said or now - said_at > _LINE_INTERVAL_S:
            said, said_at = news, now
            say(f"{sweep.name}  {news[0]}" + (f"; waits: {printable(waits_for)}" if waits_for else ""))
        time.sleep(max(_POLL_INTERVAL_S, _POLL_COST_SHARE * (now - begun)))


def _plain_counts(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _where(status: SweepStatus) -> str:
    job = _carrier(status.launcher, status.job_id) if status.job_id else status.launcher
    return f"{_count(len(status.runs))}, {job}" + (f", {status.throttle} at a time" if status.throttle else "")


def _carrier(launcher: str, job_id: str) -> str:
    return printable(f"{launcher} job array {job_id}" if launcher == "slurm" else f"{launcher} queue, pid {job_id}")


def _queue_lines(status: SweepStatus) -> list[str]:
    """Tell what the queue is about, unless it has nothing to do any more."""
    assert status.queue is not None
    state, host = status.queue.state, status.queue.identity.host
    if state == "RUNNING":
        return [f"the queue waits: {printable(status.queue.waits_for)}"] if status.queue.waits_for else []
    if state == "UNKNOWN":
        return [f"the queue is on {printable(host)}, which cannot be asked from here"]
    if "LOST" not in status.states:
        return []
    what = f"has ended: {status.queue.why}" if state == "ENDED" else "is gone"
    return [f"the queue {printable(what)}; what is left goes on with: clusterddp resume {status.sweep}"]


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _cell(value: Any) -> str:
    return printable(value if isinstance(value, str) else _joined(value))


def _joined(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, Sequence) else plan_text.value_text(value)

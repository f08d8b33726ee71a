"""The command stacks: it asks the head where each rank of a run is, and shows those first that the others wait for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import command, output_option, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, duration, put, put_json
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.registry import launcher_named
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import read_run
from clusterddp.run.seal import demand_sealed
from clusterddp.run.stacks import StackReport, newest_report, read_report
from clusterddp.run.state import RunState
from clusterddp.run.steps import is_batch_script, shown_step
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.run.stacks import Folded, RankStack


ANSWER_S = 20.0
"""How long the head may take: it looks twice a second, and waits 7 s for its nodes."""
_POLL_S = 0.1
_FETCH_S = 0.5
_NOW_S = 60.0
"""Stacks of so many seconds ago are shown without their age."""


def collect_stacks(run: RunDir, environ: Mapping[str, str], *, timeout_s: float) -> StackReport:
    """Return where the ranks of a run are now; of a run that has ended, the newest stacks that it has.

    Raises: UsageError: it has no ranks, and no stacks. ClusterddpError: no answer in time.
    """
    run = RunDir(run.path.absolute())
    with Synchroniser([run], environ, interval_s=_FETCH_S) as sync:
        sync.update()
        view, record = read_state(run), read_run(run)
        if view.attempt is None or view.state is not RunState.RUNNING:
            kept = newest_report(run)
            if kept is None:
                raise UsageError(f"{run.name} has no ranks to ask: it is {view.state.value}")
            return kept
        demand_sealed(run)
        run = shown_step(run, view.attempt)
        attempt = run.attempt(view.attempt)
        if is_batch_script(run) and (not attempt.gang.exists() or attempt.end.exists()):
            raise UsageError(f"{run.name} has no ranks to ask: no step of its script runs")
        wanted = launcher_named(record.launcher, environ).request_stacks(run, attempt, sync)
        deadline = time.monotonic() + timeout_s
        while (report := read_report(attempt, wanted)) is None:
            if time.monotonic() >= deadline:
                raise ClusterddpError(
                    f"{run.name}: its supervisors have not reported stacks within {timeout_s:g} s",
                    hint=f"clusterddp status {run.name} says whether the run has ended meanwhile",
                )
            time.sleep(_POLL_S)
            sync.update()
        return report


@command("stacks")
@works_at_login
@run_argument()
@click.option("--raw", is_flag=True, help="Also the stacks of all threads of each rank.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="S",
    default=ANSWER_S,
    show_default=True,
    help="Wait at most S seconds for the run.",
)
@output_option
@runs_option
@click.pass_obj
def stacks(terminal: Terminal, *, name: str, raw: bool, timeout_s: float, output: str, runs_dir: Path) -> None:
    """Show where the ranks of a run are, equal ones together, those first that the others wait for.

    It works for every script and changes nothing in the run. Of a run that has ended, the stacks of its last hang.
    """
    from clusterddp.run.stacks import fold

    run = find_run(runs_dir, name)
    report = collect_stacks(run, terminal.environ, timeout_s=timeout_s)
    folded = fold(report)
    if output == "json":
        groups = [dataclasses.asdict(group) for group in folded.groups]
        found = {"verdict": folded.verdict, "suspects": folded.suspects, "groups": groups, "hint": folded.hint}
        put_json(found | report.to_json())
        return
    age_s = time.time() - report.time
    age = f", {duration(age_s)} ago" if age_s > _NOW_S else ""
    lines = [f"{click.style(printable(run.name), bold=True)}  attempt {report.attempt}{age}"]
    lines += [f"  {printable(line)}" for line in text_lines(report, folded)]
    if raw:
        lines += [line for each in report.ranks for line in _raw_lines(each)]
    put("\n".join(lines))


def text_lines(report: StackReport, folded: Folded) -> list[str]:
    """Write one line for each group of ranks, and one for each node that did not answer."""
    lines = []
    for group in folded.groups:
        which = f": {spell_ranks(group.ranks)}" if len(group.ranks) > 1 and not group.suspect else ""
        lines.append(f"{group.text}{which}")
    lines += [f"{node} did not answer" for node in report.missing]
    return [*lines, f"hint: {folded.hint}"] if folded.hint else lines


COMMANDS = {"stacks": stacks}


def _raw_lines(each: RankStack) -> list[str]:
    cores = "" if each.cpu is None else f", {each.cpu:.2f} cores"
    head = f"rank {each.rank} on {each.host}  pid {each.pid}, state {each.state or 'ended'}{cores}"
    lines = each.raw.rstrip().split("\n") if each.raw else [each.missing]
    return ["", click.style(printable(head), bold=True), *(f"  {printable(line)}" for line in (*lines, *each.children))]

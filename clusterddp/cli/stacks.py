"""The command stacks: where each rank of a run is, those first that the others wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import command, output_option, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, duration, put, put_json
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.find import find_run
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.run.stacks import Folded, RankStack, StackReport

_NOW_S = 60.0


@command("stacks")
@works_at_login
@run_argument()
@click.option("--raw", is_flag=True, help="Also the stacks of all threads of each rank.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="S",
    default=20.0,
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
    from clusterddp.submit.stacks import collect_stacks

    run = find_run(runs_dir, name)
    report = collect_stacks(run, terminal.environ, timeout_s=timeout_s)
    folded = fold(report)
    if output == "json":
        put_json(_to_json(report, folded))
        return
    lines = [f"{click.style(printable(run.name), bold=True)}  attempt {report.attempt}{_age(report)}"]
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


def _to_json(report: StackReport, folded: Folded) -> dict[str, object]:
    groups = [
        {
            "ranks": group.ranks,
            "hosts": group.hosts,
            "doing": group.doing,
            "place": group.place,
            "suspect": group.suspect,
        }
        for group in folded.groups
    ]
    found = {"verdict": folded.verdict, "suspects": folded.suspects, "groups": groups, "hint": folded.hint}
    return {**found, **report.to_json()}


def _age(report: StackReport) -> str:
    age_s = time.time() - report.time
    return f", {duration(age_s)} ago" if age_s > _NOW_S else ""


def _raw_lines(each: RankStack) -> list[str]:
    cores = "" if each.cpu is None else f", {each.cpu:.2f} cores"
    head = f"rank {each.rank} on {each.host}  pid {each.pid}, state {each.state or 'ended'}{cores}"
    lines = each.raw.rstrip().split("\n") if each.raw else [each.missing]
    return ["", click.style(printable(head), bold=True), *(f"  {printable(line)}" for line in (*lines, *each.children))]

"""Show a plan as text or JSON, for `submit --dry-run`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import rank_span, table
from clusterddp.cli.text.plan_summary import NOTE_LINES, cut_lines, few, note_lines, summary_lines, value_text, words
from clusterddp.look.printable import printable
from clusterddp.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from clusterddp.launchers.slurm.ask import Verdict
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.ssh.plan import SshNode

_MASK = "********"
_COMMAND_SHOWN = 78
"""Characters of the constant command that are shown."""


def masked_plan(plan: Plan, verdict: Verdict | None = None) -> Any:
    """Return the plan as JSON data without the run's secret token.

    `scheduler` is Slurm's answer to `sbatch --test-only`, for a plan for Slurm.
    """
    scheduler = {"scheduler": dataclasses.asdict(verdict)} if verdict else {}
    if plan.ssh:
        from clusterddp.planning.plan import plan_on_hosts

        plan = plan_on_hosts(plan)
    return json.loads(json.dumps(plan.to_json() | scheduler).replace(plan.token, _MASK))


def verdict_lines(verdict: Verdict | None, *, verbose: bool, columns: int | None) -> list[str]:
    """Write the scheduler's answer to a plan; of a refusal, all of it."""
    if verdict is None:
        return []
    answers = {True: ("accepts it", "green"), False: ("refuses it", "red"), None: ("was not asked", "yellow")}
    text, colour = answers[verdict.accepted]
    answer = f"{click.style('scheduler', bold=True)} {click.style(text, fg=colour)}: {printable(verdict.words)}"
    lines = ["", *cut_lines(answer, columns, NOTE_LINES if verdict.accepted is None and not verbose else None)]
    if verdict.accepted is False:
        from clusterddp.slurm.explain import advise_refusal

        lines += [f"  hint: {advice}" for advice in (advise_refusal(verdict.words),) if advice]
    return lines


def plan_lines(plan: Plan, *, verbose: bool, columns: int | None = None) -> list[str]:
    """Write what a submit would do: on one screen, or with all values, variables, files and commands."""
    if plan.ssh:
        from clusterddp.planning.plan import plan_on_hosts

        plan = plan_on_hosts(plan)
    more = "" if verbose else "; -v shows all of it"
    lines = [f"plan for {click.style(plan.name, bold=True)}  (nothing is started{more})", ""]
    lines += summary_lines(plan, columns=columns, verbose=verbose)
    lines += _details(plan) if verbose else []
    notes = note_lines(plan, columns=columns, verbose=verbose)
    return [*lines, "", *notes] if notes else lines


def _details(plan: Plan) -> list[str]:
    variables = "those under env and secrets of the spec; no variable of this shell is sent" if plan.ssh else None
    if plan.slurm:
        variables = ", ".join(plan.slurm.variables) or "none"
    lines = [f"  variables {printable(variables)}"] if variables else []
    lines += ["", *_node_table(plan)]
    for title, rows in (
        ("what differs from the defaults", _change_rows(plan)),
        ("variables of rank 0", _variable_rows(plan)),
    ):
        if rows[1:]:
            lines += ["", click.style(title, bold=True), *table(rows, indent="  ")]
    lines += ["", click.style("files", bold=True), *(f"  {printable(path)}" for path in plan.files)]
    return lines + (ssh_lines(plan) if plan.ssh else _command_lines(plan))


def _command_lines(plan: Plan) -> list[str]:
    return ["", click.style("commands", bold=True), *(f"  {printable(shlex.join(argv))}" for argv in plan.commands)]


def _node_table(plan: Plan) -> list[str]:
    if plan.ssh:
        return ssh_table(plan)
    rows = [["NODE", "HOST", "RANKS", "GPUS"]]
    rows += [
        [
            str(node.node_rank),
            printable(node.host),
            rank_span(plan.gang.carried_by(node.ranks)),
            ",".join(node.gpus) or "-",
        ]
        for node in plan.gang.nodes
    ]
    return table(rows, indent="  ")


def _change_rows(plan: Plan) -> list[list[str]]:
    rows = [["KEY", "VALUE", "DEFAULT", "FROM"]]
    for change in plan.changes:
        value, default = value_text(change["value"]), value_text(change["default"])
        rows.append([change["key"], value, default, printable(change["origin"])])
    return rows


def _variable_rows(plan: Plan) -> list[list[str]]:
    rows = [["NAME", "VALUE", "FROM"]]
    for name, variable in sorted(plan.rank0.items()):
        value = variable["value"].replace(plan.token, _MASK)
        rows.append([name, printable(value) or '""', printable(variable["origin"])])
    return rows


def ssh_table(plan: Plan) -> list[str]:
    """Lay out the hosts, in the order of the node ranks."""
    assert plan.ssh is not None
    rows = [["NODE", "HOST", "RANKS", "GPUS", "PYTHON"]]
    for node, host in zip(plan.gang.nodes, plan.ssh.hosts, strict=True):
        gpus = f"any {host.gpus}" if host.gpus else "-"
        ranks = rank_span(plan.gang.carried_by(node.ranks))
        rows.append([str(node.node_rank), printable(node.host), ranks, gpus, printable(_python(host))])
    return table(rows, indent="  ")


def ssh_lines(plan: Plan) -> list[str]:
    """Write which files are made and which commands run on the hosts."""
    from clusterddp.planning.details import files_on_hosts

    assert plan.ssh is not None
    names = [node.host for node in plan.ssh.hosts]
    (command,), *supervisors = plan.commands[:-1]
    lines = ["", click.style("files on every host", bold=True)]
    lines += [
        f"  {printable(path)}" for path in files_on_hosts(plan.ssh, plan.dir_on_hosts, with_code=bool(plan.snapshot))
    ]
    for send in plan.ssh.send:
        files = format_count(send.files, "file")
        lines.append(f"  {printable(send.target)}  <- {printable(send.source)} ({files}, {format_bytes(send.bytes)})")
    lines += ["", click.style("commands on the hosts", bold=True)]
    lines.append("  on each, over SSH, one constant command; all else goes to its standard input as data:")
    shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}... ({len(command)} characters)"
    lines.append(f"    {printable(shown)}")
    lines.append("  then on each, detached from SSH, its supervisor:")
    for argv, group in itertools.groupby(zip(names, supervisors, strict=True), key=lambda pair: pair[1]):
        lines.append(f"    {printable(few([name for name, _ in group]))}: {printable(words(argv))}")
    lines.append("  which starts each of its ranks:")
    lines.append(f"    {printable(words(plan.commands[-1]))}")
    return lines


def _python(host: SshNode) -> str:
    words = [f"module load {' '.join(host.modules)};"] if host.modules else []
    words.append(host.python_words)
    if host.conda and not host.conda.startswith(("/", "~/")):
        words.append(f"(conda environment {host.conda})")
    elif host.python and (host.venv or host.conda):
        words.append(f"(in {host.venv or host.conda})")
    return " ".join(words)

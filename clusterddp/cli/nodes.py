"""The command nodes: which nodes later runs leave out, why, and until when."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import click

from clusterddp.cli.arguments import command, output_option, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Column, columns_of, lay_out, put, put_json, say
from clusterddp.errors import UsageError
from clusterddp.run.find import list_runs
from clusterddp.run.node_marks import clear, learn, read_marks
from clusterddp.run.seal import is_ours
from clusterddp.view.printable import printable

_NEWEST = 20
"""So many runs are asked, whose end no other command may have read."""


@command("nodes")
@works_at_login
@click.argument("chosen", metavar="[NAME]...", nargs=-1)
@click.option("--clear", "clears", is_flag=True, help="Let these nodes in again, by default all.")
@runs_option
@output_option
def nodes(*, chosen: tuple[str, ...], clears: bool, runs_dir: Path, output: str) -> int:
    """List the nodes that your later runs leave out, each with the reason, the run that met it, and until when.

    A node that was lost, failed the check before a start, or whose GPU is broken, is left out for a day; one that was
    slow, or lost a rank that nobody is known to have killed, for two hours; a run that completes on it ends that.
    """
    for run in list_runs(runs_dir)[-_NEWEST:]:
        if is_ours(run):
            learn(run)
    known = {mark.node for mark in read_marks()}
    if unknown := [name for name in chosen if name not in known]:
        marked = f"{', '.join(sorted(known))} are" if len(known) > 1 else f"{', '.join(known) or 'no node'} is"
        raise UsageError(f"{unknown[0]}: no run leaves it out", hint=f"{marked} left out")
    cleared = clear(chosen) if clears else []
    marks = [mark for mark in read_marks() if not chosen or mark.node in chosen]
    if output == "json":
        put_json({"nodes": [dataclasses.asdict(mark) for mark in marks], "cleared": cleared})
        return 0
    for name in cleared:
        put(f"{printable(name)} is let in again")
    if marks:
        columns = [
            Column(title="NODE", cells=[printable(mark.node) for mark in marks]),
            Column(title="LAUNCHER", cells=[mark.launcher for mark in marks], gives_way=3),
            Column(title="WHY", cells=[printable(mark.why) for mark in marks], least=20),
            Column(title="RUN", cells=[printable(mark.run) for mark in marks], gives_way=1),
            Column(title="SINCE", cells=[_moment(mark.since) for mark in marks], gives_way=2),
            Column(title="UNTIL", cells=[_moment(mark.until) for mark in marks]),
        ]
        put("\n".join(lay_out(columns, room=columns_of(sys.stdout))))
    elif not cleared:
        say("no node is left out")
    return 0


COMMANDS = {"nodes": nodes}


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

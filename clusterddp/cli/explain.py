"""The command explain, which shows where the variables of a rank come from."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import command, output_option, spec_arguments
from clusterddp.cli.terminal import Terminal, put, put_json

if TYPE_CHECKING:
    from clusterddp.planning.explain import Origin

_COLUMNS = 110
_NOTE = (
    "Under another launcher, variables that are set already are kept; numbers that contradict each other are an error."
)


@command("explain")
@spec_arguments
@click.option("--under", metavar="LAUNCHER", help="One launcher only: local, ssh, slurm, torchrun, srun, mpirun, ...")
@output_option
@click.pass_obj
def explain(
    terminal: Terminal, *, spec: Path | str, overrides: tuple[str, ...], under: str | None, output: str
) -> None:
    """Show where each variable of a rank comes from, under each launcher.

    \b
    clusterddp explain job.yaml
    clusterddp explain job.yaml --under mpirun
    clusterddp explain job.yaml -o json | jq '.srun.RANK'
    """
    from clusterddp.planning import explain as origins
    from clusterddp.spec.load import load_spec

    job = load_spec(spec, overrides, environ=terminal.environ).job
    titles = [title for title, _ in origins.COLUMNS]
    if under is not None:
        titles = [title for title in titles if title.lower().startswith(under.lower())]
        if not titles:
            raise click.BadParameter(f"{under}: one of {', '.join(title for title, _ in origins.COLUMNS)} is expected")
    rows = [row for row in origins.explain(job) if row.launcher in titles]
    if output == "json":
        put_json({title: {row.variable: row.origin for row in rows if row.launcher == title} for title in titles})
    else:
        put("\n".join(_lines(rows)))
        if set(titles) - {"local", "ssh", "slurm"}:
            put(f"\n{_NOTE}")


def _lines(rows: list[Origin]) -> list[str]:
    """Lay out the variables by launcher and origin, those of one origin together."""
    lines: list[str] = []
    for launcher, group in itertools.groupby(rows, key=lambda row: row.launcher):
        lines += [*([""] if lines else []), click.style(launcher, bold=True)]
        by_origin: dict[str, list[str]] = {}
        for row in group:
            by_origin.setdefault(row.origin, []).append(row.variable)
        for origin, names in by_origin.items():
            text = textwrap.wrap(", ".join(sorted(names)), 44)
            why = textwrap.wrap(origin, _COLUMNS - 50)
            for left, right in itertools.zip_longest(text, why, fillvalue=""):
                lines.append(f"  {left:<46}{right}".rstrip())
    return lines


COMMANDS = {"explain": explain}

"""The command doctor: check machines before a run is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import KeyValue, Place, command, output_option, place_options, runs_option
from clusterddp.cli.login import find_node, profile_option, start_at_login
from clusterddp.cli.terminal import Terminal, put, put_json, say, table
from clusterddp.errors import PreflightError, UsageError
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.facts.checks import Check

_COLOURS = {"red": "red", "note": "yellow", "ok": "green"}


@command("doctor")
@click.argument("spec", required=False, type=click.Path(dir_okay=False))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option("--job", "with_job", is_flag=True, help="Also look at nodes of the cluster, in a job of one minute.")
@click.option(
    "--timeout", "timeout_s", metavar="S", type=click.FloatRange(min=1), default=120.0, show_default=True,
    help="How long the job of --job, or the run of --deep, may wait for its start.",
)  # fmt: skip
@click.option(
    "--deep", is_flag=True,
    help="In place of these checks let all ranks of SPEC measure what a training depends on; for every launcher "
    "(minutes).",
)  # fmt: skip
@place_options
@output_option
@profile_option
@runs_option
@click.pass_obj
def doctor(
    terminal: Terminal,
    *,
    spec: str | None,
    overrides: tuple[str, ...],
    with_job: bool,
    timeout_s: float,
    deep: bool,
    profile: str | None,
    place: Place,
    output: str,
    runs_dir: Path,
) -> int:
    """Check this machine, the cluster, the hosts of SPEC or the nodes (--job), before a run is started.

    With SPEC it checks what that spec needs. Exit code 3 when anything is red: a run would fail.

    \b
    clusterddp doctor                      this machine
    clusterddp doctor job.yaml             and what the spec needs
    clusterddp doctor job.yaml --job       and the nodes: Python, torch, storage, network, clocks
    clusterddp doctor job.yaml --hosts gpu01,gpu02         over SSH: the hosts, and the network between them
    clusterddp doctor job.yaml --deep      what the ranks of the spec can do there, on any launcher
    """
    from clusterddp.facts.checks import is_healthy, to_json

    flags, hosts = place.flags, place.read_hosts()
    if spec is None and (flags or hosts):
        raise UsageError("these options are about a spec, and there is none", hint="clusterddp doctor SPEC ...")
    resolved = None
    if spec is not None:
        from clusterddp.spec.load import load_spec

        environ = terminal.environ
        resolved = load_spec(Path(spec), overrides, profile=profile, environ=environ, flags=flags, hosts=hosts)
    if deep and resolved is None:
        raise UsageError("--deep lets the ranks of a spec measure: give a SPEC", hint="clusterddp doctor SPEC --deep")
    if with_job and not deep and resolved is not None and resolved.job.launcher == "ssh":
        raise UsageError(
            "--job looks at nodes of a Slurm cluster, and this spec runs over SSH",
            hint="without --job doctor looks at its hosts; --deep lets its ranks measure",
        )
    if (resolved is None or resolved.job.launcher == "slurm") and (node := find_node(profile, terminal.environ)):
        return start_at_login(node, resolved, runs_dir=runs_dir, discard=True)
    more: dict[str, Any] = {}
    if resolved is not None and deep:
        from clusterddp.doctor.ranks import measure_ranks

        checks, more = measure_ranks(resolved, runs_dir, terminal.environ, timeout_s=timeout_s, report=say)
    elif resolved is not None and resolved.job.launcher == "ssh":
        from clusterddp.doctor.hosts import check_hosts

        checks, more["ways"] = check_hosts(resolved, runs_dir, terminal.environ)
    else:
        from clusterddp.doctor.cluster import check_cluster

        checks = check_cluster(resolved, runs_dir, terminal.environ, with_job=with_job, timeout_s=timeout_s, report=say)
    if output == "json":
        put_json({"healthy": is_healthy(checks), "checks": to_json(checks), **more})
    else:
        put("\n".join(check_lines(checks)))
    return 0 if is_healthy(checks) else PreflightError.exit_code


COMMANDS = {"doctor": doctor}


def check_lines(checks: list[Check]) -> list[str]:
    """Lay out checks as one table, red ones first; the fix is below each row."""
    from clusterddp.facts.checks import rows

    found = rows(checks)
    cells = [["", "CHECK", "HOST", "FOUND"]]
    for row in found:
        level = row.result.level
        shown = click.style(level, fg=_COLOURS[level], bold=level == "red" or None)
        cells.append([shown, row.check, ", ".join(row.hosts), printable(row.result.found)])
    heading, *lines = table(cells)
    result = [heading]
    for row, line in zip(found, lines, strict=True):
        result.append(line)
        if row.result.fix and row.result.level != "ok":
            result.append(f"      {click.style('fix:', bold=True)} {printable(row.result.fix)}")
    return result

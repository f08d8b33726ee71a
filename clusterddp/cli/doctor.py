"""The command doctor: look before a run is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import command, output_option, runs_option
from clusterddp.cli.login import find_node, profile_option, start_at_login
from clusterddp.cli.place import named_hosts, place_flags, place_options
from clusterddp.cli.terminal import Terminal, put, put_json, say, table
from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.look.printable import printable

if TYPE_CHECKING:
    from clusterddp.check.job import JobRequest
    from clusterddp.facts.checks import Check, Level, Result
    from clusterddp.facts.judge import Needs
    from clusterddp.facts.machine import Machine
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.overrides import Override

_NUM_NODES = 2
_COLOURS = {"red": "red", "note": "yellow", "ok": "green"}


@command("doctor")
@click.argument("spec", required=False, type=click.Path(dir_okay=False))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--job", "with_job", is_flag=True, help="Also look at nodes of the cluster, in a job of half a minute.")
@click.option(
    "--timeout", "timeout_s", metavar="S", type=click.FloatRange(min=1), default=120.0, show_default=True,
    help="With --job: how long it may wait for its start.",
)  # fmt: skip
@click.option(
    "--deep", is_flag=True,
    help="For ssh: let each host compute, and each talk to another one with torch (20 s). With --job, for every "
    "launcher: let all ranks of SPEC measure what a training depends on (minutes).",
)  # fmt: skip
@click.option(
    "--report", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="With --job --deep: write what was found to FILE.json, and as a page to FILE.html.",
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
    profile: str | None,
    with_job: bool,
    timeout_s: float,
    deep: bool,
    report: Path | None,
    launcher: str | None,
    cpu: bool,
    hosts: str | None,
    hostfile: Path | None,
    output: str,
    runs_dir: Path,
) -> int:
    """Look at this machine, the cluster, the hosts of SPEC or the nodes (--job), before a run is started.

    With SPEC it asks for what that spec needs. Exit code 3 when anything is red: a run would fail.

    \b
    clusterddp doctor                      this machine
    clusterddp doctor job.yaml             and what the spec needs
    clusterddp doctor job.yaml --job       and the nodes: Python, torch, storage, network, clocks
    clusterddp doctor job.yaml --job --deep                and what the spec's ranks can do there, on any launcher
    clusterddp doctor job.yaml --hosts gpu01,gpu02         over SSH: the hosts, and the network between them
    clusterddp doctor job.yaml --hosts gpu01,gpu02 --deep  and how fast they compute and talk to each other
    """
    flags = place_flags(launcher, cpu=cpu, over_ssh=bool(hosts is not None or hostfile))
    named = named_hosts(launcher, hosts, hostfile)
    resolved = _load(spec, overrides, profile, terminal, flags=flags, hosts=named)
    over_ssh = resolved is not None and resolved.job.launcher == "ssh"
    if deep not in (with_job, over_ssh):
        raise UsageError(
            "--job is for Slurm and this machine, --deep for a spec with launcher ssh, both together for all",
            hint="clusterddp doctor SPEC --launcher ssh, or --hosts H,H",
        )
    if (deep and with_job and resolved is None) or (report is not None and not (deep and with_job)):
        raise UsageError("--job --deep has the ranks of a spec measure, and --report keeps that: give a SPEC")
    if (resolved is None or resolved.job.launcher == "slurm") and (node := find_node(profile, terminal)):
        return start_at_login(node, resolved, runs_dir=runs_dir, discard=True)
    if resolved is not None and deep and with_job:
        from clusterddp.cli.doctor_ranks import measure_ranks

        checks, measured = measure_ranks(resolved, runs_dir, terminal, timeout_s=timeout_s, tell=say)
        if report is not None:
            _write_report(report, measured)
        return _show(checks, output, findings=measured["findings"])
    if resolved is not None and over_ssh:
        from clusterddp.cli.doctor_hosts import look_at_hosts

        checks, ways = look_at_hosts(resolved, runs_dir, terminal.environ, deep=deep, tell=say)
        return _show(checks, output, ways=ways)
    return _show(_look_from_here(resolved, runs_dir, with_job=with_job, timeout_s=timeout_s, terminal=terminal), output)


COMMANDS = {"doctor": doctor}


def _look_from_here(
    resolved: ResolvedSpec | None, runs_dir: Path, *, with_job: bool, timeout_s: float, terminal: Terminal
) -> list[Check]:
    """Look at this machine, and at the cluster that it belongs to."""
    from clusterddp.facts.checks import Check

    job = resolved.job if resolved else None
    here, needs, checks = _look_here(job, runs_dir, terminal)
    if resolved is not None:
        checks += [
            Check(name=name, results={here.host: result}) for name, result in _plan(resolved, runs_dir, terminal)
        ]
    if with_job:
        try:
            request = _request(job, terminal)
            checks += _look_at_nodes(here, needs, request, runs_dir=runs_dir, timeout_s=timeout_s, terminal=terminal)
        except PreflightError as error:
            checks.append(Check(name="job", results={here.host: _refused(error)}))
    return checks


def _show(checks: list[Check], output: str, **more: Any) -> int:
    """Print the checks, and return the exit code."""
    from clusterddp.facts.checks import is_healthy, to_json

    if output == "json":
        put_json({"healthy": is_healthy(checks), "checks": to_json(checks), **more})
    else:
        put("\n".join(check_lines(checks)))
    return 0 if is_healthy(checks) else PreflightError.exit_code


def _write_report(path: Path, measured: dict[str, Any]) -> None:
    import json

    from clusterddp.check.page import render_page

    path.with_name(f"{path.name}.json").write_text(json.dumps(measured, indent=1) + "\n")
    path.with_name(f"{path.name}.html").write_text(render_page(measured, title="clusterddp doctor --job --deep"))
    say(f"written: {path}.json and {path}.html")


def check_lines(checks: list[Check]) -> list[str]:
    """Lay out checks as one table, what is red first; below each row what mends it."""
    from clusterddp.facts.checks import rows

    found = rows(checks)
    cells = [["", "CHECK", "HOST", "FOUND"]]
    for row in found:
        cells.append([_level_text(row.result.level), row.check, ", ".join(row.hosts), printable(row.result.found)])
    heading, *lines = table(cells)
    result = [heading]
    for row, line in zip(found, lines, strict=True):
        result.append(line)
        if row.result.fix and row.result.level != "ok":
            result.append(f"      {click.style('fix:', bold=True)} {printable(row.result.fix)}")
    return result


def _load(
    spec: str | None,
    overrides: tuple[str, ...],
    profile: str | None,
    terminal: Terminal,
    *,
    flags: dict[str, str],
    hosts: Override | None,
) -> ResolvedSpec | None:
    if spec is None:
        if flags or hosts:
            raise UsageError("these options are about a spec, and there is none", hint="clusterddp doctor SPEC ...")
        return None
    from clusterddp.spec.load import load_spec

    return load_spec(Path(spec), overrides, profile=profile, environ=terminal.environ, flags=flags, hosts=hosts)


def _look_here(job: JobSpec | None, runs_dir: Path, terminal: Terminal) -> tuple[Machine, Needs, list[Check]]:
    import dataclasses

    from clusterddp.check.login import judge_login
    from clusterddp.facts.checks import Check
    from clusterddp.facts.judge import Needs, judge_here, judge_machine
    from clusterddp.facts.machine import read_machine
    from clusterddp.facts.torch import import_torch

    on_slurm = job is not None and job.launcher == "slurm"
    on_cpu = job is not None and job.device == "cpu"
    needs = Needs(
        trainer=job is not None and job.entry is None,
        gpus=not on_cpu,
        gpus_per_node=(job.resources.gpus_per_node or 0) if job and not on_cpu else 0,
    )
    here = dataclasses.replace(read_machine(runs_dir, terminal.environ), torch=import_torch())
    # Of a Slurm run nothing but the submit happens here.
    found = [
        *judge_here(here),
        *judge_machine(here, Needs() if on_slurm or job is None else needs),
        *judge_login(terminal.environ, job if on_slurm else None),
    ]
    return here, needs, [Check(name=name, results={here.host: result}) for name, result in found]


def _plan(resolved: ResolvedSpec, runs_dir: Path, terminal: Terminal) -> Iterator[tuple[str, Result]]:
    """Plan the submit of the spec, and ask Slurm about that very plan."""
    from clusterddp.facts.checks import note, ok, red
    from clusterddp.planning.plan import plan_run

    try:
        plan = plan_run(resolved, runs_dir=runs_dir, working_dir=Path.cwd(), environ=terminal.environ)
    except ClusterddpError as error:
        yield "plan", red(error.message, error.hint or "clusterddp submit -n shows the plan")
        return
    yield "plan", ok(f"{len(plan.gang.nodes)} x {len(plan.gang.nodes[0].ranks)} ranks, {plan.gang.backend}")
    if plan.slurm is not None:
        from clusterddp.launchers.slurm.launcher import SlurmLauncher

        try:
            SlurmLauncher().check(plan)
        except PreflightError as error:
            yield "data", red(error.message, error.hint or "train.data_dir names where they are")
        from clusterddp.launchers.slurm.ask import ask_scheduler
        from clusterddp.slurm.explain import advise_refusal

        verdict = ask_scheduler(plan.slurm, terminal.environ)
        if verdict.accepted is None:
            yield "sbatch --test-only", note(f"not asked: {verdict.words}")
        elif verdict.accepted:
            when = f"accepted; it would start at {verdict.start} on {verdict.nodes}" if verdict.start else "accepted"
            yield "sbatch --test-only", ok(when)
        else:
            fix = advise_refusal(verdict.words) or "the spec's slurm and resources; sinfo, sacctmgr show assoc"
            yield "sbatch --test-only", red(verdict.words, fix)


def _request(job: JobSpec | None, terminal: Terminal) -> JobRequest:
    from clusterddp.check.job import JobRequest
    from clusterddp.planning.environment import process_environment

    environment = process_environment("", terminal.environ)
    return JobRequest(
        num_nodes=job.resources.nodes if job else _NUM_NODES,
        gpus_per_node=(job.resources.gpus_per_node or 0) if job else 0,
        options=dict(job.slurm) if job else {},
        python=sys.executable,
        paths=(environment.get("PYTHONPATH", ""), environment.get("LD_LIBRARY_PATH", "")),
    )


def _look_at_nodes(
    here: Machine, needs: Needs, request: JobRequest, *, runs_dir: Path, timeout_s: float, terminal: Terminal
) -> list[Check]:
    from clusterddp.check.job import run_job
    from clusterddp.check.nodes import judge_nodes

    answer = run_job(request, runs_dir=runs_dir.absolute(), environ=terminal.environ, timeout_s=timeout_s, say=say)
    return judge_nodes(answer, here, needs)


def _refused(error: PreflightError) -> Result:
    from clusterddp.facts.checks import red

    return red(error.message, error.hint or "sbatch says why it refuses")


def _level_text(level: Level) -> str:
    return click.style(level, fg=_COLOURS[level], bold=level == "red" or None)

"""Commands that start ranks: submit, rerun, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import RunName, address, command, output_option, runs_option
from clusterddp.cli.login import find_node, profile_option, start_at_login, works_at_login
from clusterddp.cli.place import named_hosts, place_flags, place_options
from clusterddp.cli.terminal import Terminal, put, put_json, say
from clusterddp.cli.watch import detaching, say_ending, say_note, watch_until_ended, write_logs
from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.look.printable import printable
from clusterddp.results.sync import Synchroniser
from clusterddp.run.directory import RunDir, find_run
from clusterddp.run.sweep_dir import SweepDir, find_sweep
from clusterddp.system.files import read_json

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.run.attempts import Closeable
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.submission.submit import Submitted
    from clusterddp.sweep.plan import SweepPlan

_F = TypeVar("_F", bound=Callable[..., Any])
_FOLLOWS_ONE = "--follow shows one run, and this is a sweep of many; --wait waits for all of them"


def _plan_options(function: _F) -> _F:
    """Declare the options of commands that make a plan."""
    for option in (
        click.option("--attach", is_flag=True, help="ssh: stay; the run ends when this command does, by Ctrl-C, too."),
        click.option("-n", "--dry-run", is_flag=True, help="Show the plan; start and write nothing."),
    ):
        function = option(function)
    return place_options(function)


def _stay_options(function: _F) -> _F:
    """Declare the options of commands that start a run and may stay with it."""
    for option in (
        output_option,
        click.option("-f", "--follow", is_flag=True, help="Wait, and show what rank 0 writes."),
        click.option("--wait", is_flag=True, help="Wait until the run has ended; exit code 0, 5 failed, 6 cancelled."),
    ):
        function = option(function)
    return function


@command("submit")
@click.argument("spec", type=click.Path(allow_dash=True, dir_okay=False))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@_plan_options
@_stay_options
@click.option(
    "--smoke-test",
    is_flag=True,
    help="Start all ranks on this machine, or where --launcher says, for one step and one checkpoint, and wait.",
)
@click.option("--sweep", is_flag=True, help="KEY=A,B makes a run of each value; several keys: of each combination.")
@profile_option
@runs_option
@click.pass_obj
def submit(
    terminal: Terminal,
    *,
    spec: str,
    overrides: tuple[str, ...],
    launcher: str | None,
    cpu: bool,
    hosts: str | None,
    hostfile: Path | None,
    attach: bool,
    dry_run: bool,
    wait: bool,
    follow: bool,
    output: str,
    smoke_test: bool,
    sweep: bool,
    profile: str | None,
    runs_dir: Path,
) -> int:
    """Start what a spec describes; - reads the spec from stdin.

    Ctrl-C while it waits or follows leaves the run alone.

    \b
    clusterddp submit job.yaml                                run it, come back at once
    clusterddp submit job.yaml train.lr=0.2 train.epochs=3    with other values
    clusterddp submit job.yaml train.lr=0.1,0.2 --sweep       a run of each: a queue, or a Slurm job array
    clusterddp submit job.yaml --cpu -n                       what would happen
    clusterddp submit job.yaml --smoke-test                   all ranks here, for one step
    clusterddp submit job.yaml --hosts gpu01,gpu02            on two machines that ssh reaches
    run=$(clusterddp submit job.yaml)                         stdout carries the run's name
    """
    from clusterddp.planning.plan import plan_run
    from clusterddp.spec.sweep import load_sweep

    over_ssh = bool(hosts is not None or hostfile)
    if smoke_test and launcher is None and not over_ssh:
        launcher = "local"
    read = load_sweep(
        "-" if spec == "-" else Path(spec),
        overrides,
        sweep=sweep,
        profile=profile,
        environ=terminal.environ,
        flags=place_flags(launcher, cpu=cpu, over_ssh=over_ssh),
        hosts=named_hosts(launcher, hosts, hostfile),
    )
    if smoke_test and read.keys:
        raise click.UsageError("--smoke-test is for one run, and this is a sweep of many: give one value for each key")
    resolved = read.variants[0].resolved
    if resolved.job.launcher == "slurm" and (node := find_node(profile, terminal)):
        return start_at_login(node, resolved, runs_dir=runs_dir, discard=dry_run)
    if read.keys:
        from clusterddp.sweep.plan import plan_sweep

        if attach:
            raise click.UsageError("--attach is for one run, and this is a sweep of many, which its queue starts")
        many = plan_sweep(read, runs_dir=runs_dir, working_dir=Path.cwd(), environ=terminal.environ)
        return _carry_out_sweep(many, terminal, dry_run=dry_run, wait=wait, follow=follow, output=output)
    plan_it = partial(
        plan_run,
        runs_dir=runs_dir,
        working_dir=Path.cwd(),
        environ=terminal.environ,
        attached=attach,
        trial="smoke test" if smoke_test else None,
    )
    try:
        plan = plan_it(resolved)
    except PreflightError as error:
        # A smoke test of a job for GPUs is for the machine that has none.
        if not smoke_test or resolved.job.launcher != "local" or resolved.job.device == "cpu":
            raise
        say(f"note: {printable(error.message)}: the smoke test is on the CPU")
        plan = plan_it(_on_cpu(resolved))
    return carry_out(plan, terminal, dry_run=dry_run, wait=wait, follow=follow or smoke_test, output=output)


@command("rerun")
@works_at_login
@click.argument("name", metavar="RUN", type=RunName())
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@_plan_options
@_stay_options
@runs_option
@click.pass_obj
def rerun(
    terminal: Terminal,
    *,
    name: str,
    overrides: tuple[str, ...],
    launcher: str | None,
    cpu: bool,
    hosts: str | None,
    hostfile: Path | None,
    attach: bool,
    dry_run: bool,
    wait: bool,
    follow: bool,
    output: str,
    runs_dir: Path,
) -> int:
    """Start the spec of an earlier run again, as a new run, with other values if given.

    It starts where the earlier one was started, with the code that lies there now.
    """
    from clusterddp.planning.plan import plan_run
    from clusterddp.spec.load import load_spec

    parent = find_run(runs_dir, name)
    resolved = load_spec(
        parent.spec,
        overrides,
        environ=terminal.environ,
        flags=place_flags(launcher, cpu=cpu, over_ssh=bool(hosts is not None or hostfile)),
        hosts=named_hosts(launcher, hosts, hostfile),
    )
    working_dir = Path((read_json(parent.plan) or {}).get("working_dir", "."))
    plan = plan_run(
        resolved,
        runs_dir=runs_dir,
        working_dir=working_dir if working_dir.is_dir() else Path.cwd(),
        environ=terminal.environ,
        parent=parent.name,
        attached=attach,
    )
    return carry_out(plan, terminal, dry_run=dry_run, wait=wait, follow=follow, output=output)


@command("resume")
@works_at_login
@click.argument("name", metavar="RUN", type=RunName())
@_stay_options
@runs_option
@click.pass_obj
def resume(terminal: Terminal, *, name: str, wait: bool, follow: bool, output: str, runs_dir: Path) -> int:
    """Go on from a run's newest checkpoint: the next attempt of the same run.

    With the name of a sweep: with what is left of it, in its queue.
    """
    from clusterddp.submission.submit import resume as resume_run

    sweep = find_sweep(runs_dir, name)
    if sweep:
        return _resume_sweep(sweep, terminal, wait=wait, follow=follow, output=output)
    submitted = resume_run(find_run(runs_dir, name), tell=say)
    return stay_with(submitted, terminal, verb="resumed", wait=wait, follow=follow, output=output)


COMMANDS = {"submit": submit, "rerun": rerun, "resume": resume}


def carry_out(plan: Plan, terminal: Terminal, *, dry_run: bool, wait: bool, follow: bool, output: str) -> int:
    """Show the plan, or submit it and stay with the run as long as was asked for; return the exit code."""
    if dry_run:
        return _show(plan, terminal, output)
    from clusterddp.submission.submit import submit as submit_plan

    for note in plan.notes:
        say(f"note: {printable(note)}")
    submitted = submit_plan(plan, tell=say)
    return stay_with(submitted, terminal, verb="submitted", wait=wait, follow=follow, output=output)


def _on_cpu(resolved: ResolvedSpec) -> ResolvedSpec:
    """Return the spec with its ranks on the CPU, as --cpu has it."""
    network = resolved.job.network.model_copy(update={"backend": "auto"})
    job = resolved.job.model_copy(update={"device": "cpu", "network": network})
    return dataclasses.replace(resolved, job=job, origins=resolved.origins | {"device": "--smoke-test"})


def _show(plan: Plan, terminal: Terminal, output: str) -> int:
    """Show the plan and what the scheduler says of it; return the exit code."""
    from clusterddp.cli.plan_text import masked_plan, plan_lines, verdict_lines

    verdict = None
    if plan.slurm:
        from clusterddp.launchers.slurm.ask import ask_scheduler

        verdict = ask_scheduler(plan.slurm, terminal.environ)
    if output == "json":
        put_json(masked_plan(plan, verdict))
    else:
        put("\n".join([*plan_lines(plan), *verdict_lines(verdict)]))
    return PreflightError.exit_code if verdict and verdict.accepted is False else 0


def _carry_out_sweep(
    plan: SweepPlan, terminal: Terminal, *, dry_run: bool, wait: bool, follow: bool, output: str
) -> int:
    """Show the plan of a sweep, or submit it and wait for all of its runs if that was asked for."""
    from clusterddp.cli import sweeps

    if follow:
        raise click.UsageError(_FOLLOWS_ONE)
    if dry_run:
        return sweeps.show_plan(plan, terminal, output=output)
    from clusterddp.sweep.submit import submit_sweep

    for note in plan.base.notes:
        say(f"note: {printable(note)}")
    submitted = submit_sweep(plan)
    sweeps.say_submitted(submitted, terminal, output=output, waits=wait)
    return sweeps.wait_for_all(SweepDir(submitted.path), terminal) if wait else 0


def _resume_sweep(sweep: SweepDir, terminal: Terminal, *, wait: bool, follow: bool, output: str) -> int:
    from clusterddp.cli import sweeps
    from clusterddp.sweep.queue_control import resume_sweep

    if follow:
        raise click.UsageError(_FOLLOWS_ONE)
    submitted = resume_sweep(sweep)
    sweeps.say_submitted(submitted, terminal, verb="resumed", output=output, waits=wait)
    return sweeps.wait_for_all(SweepDir(submitted.path), terminal) if wait else 0


def stay_with(submitted: Submitted, terminal: Terminal, *, verb: str, wait: bool, follow: bool, output: str) -> int:
    """Tell what was started and stay with it as long as was asked for; return the exit code."""
    if submitted.tie:
        with _ending(RunDir(Path(submitted.run_dir)), submitted.tie):
            return _tell_and_stay(submitted, terminal, verb=verb, stay=True, follow=follow, output=output)
    return _tell_and_stay(submitted, terminal, verb=verb, stay=wait or follow, follow=follow, output=output)


def _tell_and_stay(
    submitted: Submitted, terminal: Terminal, *, verb: str, stay: bool, follow: bool, output: str
) -> int:
    run = RunDir(Path(submitted.run_dir))
    where = address(run, terminal)
    say(f"{verb} {click.style(submitted.run, bold=True)}  ({submitted.launcher} job {submitted.job_id})")
    if output == "json":
        put_json(_as_json(submitted), indent=None)
    elif not sys.stdout.isatty():  # the person at the terminal has just read it
        put(submitted.run)
    if not stay:
        say(f"  follow  clusterddp logs -f {where}")
        say(f"  status  clusterddp status {where}")
        say(f"  cancel  clusterddp cancel {where}")
        return 0
    with Synchroniser([run], terminal.environ, say=say_note) as sync:
        with contextlib.nullcontext() if submitted.tie else detaching(run, terminal):
            if follow:
                write_logs(run, "0", sync, follow=True, stream=sys.stderr if output == "json" else sys.stdout)
            view = watch_until_ended(run, terminal, sync)
        return say_ending(run, view, terminal, sync)


@contextlib.contextmanager
def _ending(run: RunDir, tie: Closeable) -> Iterator[None]:
    """Let the run end with the watching, however that ends."""
    from clusterddp.submission.submit import cancel

    try:
        yield
    except KeyboardInterrupt:
        say(f"\n{run.name} is attached to this command, and ends with it")
        try:
            say(f"{run.name} {cancel(run)}")
        except ClusterddpError as error:
            say(f"{error.message}; its hosts end it as soon as they miss this command")
        raise
    finally:
        tie.close()


def _as_json(submitted: Submitted) -> dict[str, str | None]:
    return {
        "run": submitted.run,
        "launcher": submitted.launcher,
        "job_id": submitted.job_id,
        "run_dir": str(submitted.run_dir),
    }

"""Commands that start ranks, or keep machines for them: submit, resume, hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import (
    END_OF_OPTIONS,
    PLANNED_NAME,
    KeyValue,
    Place,
    RunName,
    SpecOrRun,
    SpecPath,
    StartOptions,
    WithArguments,
    collected,
    command,
    hold_option,
    output_option,
    place_options,
    plan_options,
    runs_option,
    start_options,
)
from clusterddp.cli.login import (
    find_node,
    node_of_all,
    profile_option,
    run_same,
    start_at_login,
    works_at_login,
)
from clusterddp.cli.terminal import COLUMNS, Terminal, columns_of, confirm, put, put_json, say, say_note
from clusterddp.cli.text import plan as plan_text
from clusterddp.cli.text import run_list
from clusterddp.cli.watch import stay_with, stay_with_sweep
from clusterddp.errors import PreflightError, RunNotFoundError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, is_run
from clusterddp.run.gang import Gang
from clusterddp.run.record import read_run
from clusterddp.run.seal import mark_of
from clusterddp.run.steps import is_batch_script, read_batch_script
from clusterddp.run.sweep import find_sweep
from clusterddp.spec.tree import near_file
from clusterddp.system.files import build_record, read_json
from clusterddp.system.units import UNIT_S
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.program import Trial
    from clusterddp.planning.slurm import SlurmPlan
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.sweep import SweepSpec
    from clusterddp.submission.sweep_plan import SweepPlan


@command("submit", WithArguments)
@click.argument("spec", metavar="SPEC|SCRIPT|RUN", type=SpecOrRun())
@click.argument("overrides", metavar="[KEY=VALUE]... [-- ARG...]", nargs=-1, type=KeyValue())
@place_options
@plan_options
@start_options
@hold_option
@click.option(
    "--smoke-test",
    is_flag=True,
    help="Start all ranks on this machine, or by --launcher, for one step and one checkpoint, and wait.",
)
@click.option("--sweep", is_flag=True, help="KEY=A,B makes a run of each value; several keys: of each combination.")
@click.option(
    "--from",
    "source",
    type=click.Choice(["slurm"]),
    help="The file is a batch script for sbatch, also without #SBATCH lines.",
)
@profile_option
@click.pass_obj
def submit(
    terminal: Terminal,
    *,
    spec: Path | str,
    overrides: tuple[str, ...],
    place: Place,
    options: StartOptions,
    smoke_test: bool,
    sweep: bool,
    source: str | None,
    profile: str | None,
) -> int:
    """Start what a spec describes; - reads it from stdin. Ctrl-C while it waits does not stop the run.

    A batch script for sbatch is submitted as it is; slurm.KEY=VALUE overrides its #SBATCH lines, and what follows -- is
    its arguments. With the name of an earlier run: its spec again, as a new run, started where that one was, with the
    code that is there now.

    \b
    clusterddp submit job.yaml                                run it, return at once
    clusterddp submit job.yaml train.lr=0.2 train.epochs=3    with other values
    clusterddp submit job.yaml train.lr=0.1,0.2 --sweep       a run of each: a queue, or a Slurm job array
    clusterddp submit train.slurm slurm.time=10 -- --lr 0.1   a batch script, unchanged
    clusterddp submit brisk-otter-3 train.lr=0.2              an earlier run's spec again
    clusterddp submit job.yaml --cpu -n                       what would happen
    clusterddp submit job.yaml --smoke-test                   all ranks here, for one step
    clusterddp submit job.yaml --hosts gpu01,gpu02            on two machines that ssh reaches
    clusterddp submit job.yaml --in calm-fox-7                on the machines that clusterddp hold keeps
    run=$(clusterddp submit job.yaml)                         stdout carries the run's name
    """
    from clusterddp.spec.sweep import load_sweep

    place = _placed_in_hold(place, options, smoke_test=smoke_test) if options.hold else place

    if is_run(spec, options.runs_dir):
        if smoke_test or sweep:
            raise UsageError(f"{spec}: --{'sweep' if sweep else 'smoke-test'} takes the file of a spec, not a run")
        if there := node_of_all([str(spec)], options.runs_dir, profile, terminal.environ):
            return run_same(there[0], click.get_current_context(), {"spec": there[1][0]})
        return _submit_again(terminal, str(spec), overrides, place, options)
    if smoke_test and not place.flags.get("launcher"):
        place = dataclasses.replace(place, launcher="local")
    if _is_batch_script(spec, given=source is not None):
        _refuse_for_script(Path(spec), place, sweep=sweep, profile=profile, environ=terminal.environ)
        if smoke_test:
            place, options = dataclasses.replace(place, cpu=True), dataclasses.replace(options, wait=True)
        return _submit_script(terminal, Path(spec), overrides, place, options)
    words, args = _parted(overrides)
    overrides, flags, hosts = (*words, *(args or ())), place.flags, place.read_hosts()
    read = load_sweep(
        *(spec, overrides), sweep=sweep, profile=profile, environ=terminal.environ, flags=flags, hosts=hosts,
        working_dir=Path.cwd(),
    )  # fmt: skip
    if smoke_test and read.keys:
        raise click.UsageError("--smoke-test is for one run, and this is a sweep of many: give one value for each key")
    resolved = read.variants[0].resolved
    if resolved.job.launcher == "slurm" and (node := find_node(profile, terminal.environ)):
        return start_at_login(node, resolved, runs_dir=options.runs_dir, discard=options.dry_run)
    return _start(read, terminal, options, smoke_test=smoke_test)


def _placed_in_hold(place: Place, options: StartOptions, *, smoke_test: bool) -> Place:
    """Return where a run in a hold is started: by the launcher of the hold, whatever its spec says."""
    if smoke_test:
        raise click.UsageError("--smoke-test starts all ranks on this machine, and --in names a hold")
    if place.flags.get("launcher"):
        return place
    launcher = "slurm"  # of a hold that a login node knows
    with contextlib.suppress(RunNotFoundError):
        launcher = read_run(find_run(options.runs_dir, options.hold or "")).launcher
    return dataclasses.replace(place, launcher=launcher)


def _start(read: SweepSpec, terminal: Terminal, options: StartOptions, *, smoke_test: bool) -> int:
    """Start what was read, from this machine."""
    resolved = read.variants[0].resolved
    if read.keys:
        from clusterddp.submission.sweep_plan import plan_sweep

        name, runs_dir = PLANNED_NAME if options.dry_run else None, options.runs_dir
        sweep = plan_sweep(read, runs_dir=runs_dir, working_dir=Path.cwd(), environ=terminal.environ, name=name)
        return _carry_out_sweep(sweep, terminal, options)
    if smoke_test:
        return _try_out(resolved, terminal, dataclasses.replace(options, follow=True))
    with _starting():
        plan = _plan(resolved, terminal, options)
    return _carry_out(plan, terminal, options)


def _parted(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the overrides, and the words behind `--`; None: there is no `--`."""
    at = words.index(END_OF_OPTIONS) if END_OF_OPTIONS in words else None
    return (words, None) if at is None else (words[:at], words[at + 1 :])


def _with_plain_options(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides in which values of slurm are the text for sbatch, also with a comma or a bracket."""

    def plain(word: str) -> str:
        key, _, value = word.partition("=")
        is_odd = value[:1] in ("[", "{") or ("," in value and value[:1] not in ("'", '"'))
        return f"{key}={json.dumps(value, ensure_ascii=False)}" if key.startswith("slurm.") and is_odd else word

    return tuple(map(plain, words))


def _is_batch_script(spec: Path | str, *, given: bool) -> bool:
    """Return whether a file is a batch script; `given`: the user says so."""
    from clusterddp.spec.batch_script import is_batch_script
    from clusterddp.spec.tree import read_bytes

    if given and str(spec) == "-":
        raise UsageError("--from slurm takes a file, not the standard input")
    return given or (str(spec) != "-" and is_batch_script(Path(spec), read_bytes(Path(spec))))


def _refuse_for_script(
    script: Path, place: Place, *, sweep: bool, profile: str | None, environ: Mapping[str, str]
) -> None:
    """Raises: UsageError: an option is for specs, or the script belongs on another machine."""
    if sweep or profile:
        raise UsageError(
            f"{script}: --{'sweep' if sweep else 'profile'} is for a spec, and this is a batch script",
            hint="slurm.array=0-9 makes a run of each task; slurm.KEY=VALUE overrides its #SBATCH lines",
        )
    if place.launcher in (None, "slurm") and (node := find_node(None, environ)):
        raise UsageError(
            f"{script}: profile {node.profile} submits on {node.login.host}, where a batch script has its directory",
            hint=f"ssh {node.login.host}, and clusterddp submit it there; --launcher local tries it here",
        )


def _submit_script(
    terminal: Terminal, script: Path, words: tuple[str, ...], place: Place, options: StartOptions
) -> int:
    """Submit a batch script as it is; the values of shared files and profiles are for specs."""
    from clusterddp.spec.batch_script import spec_of
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import spec_yaml

    overrides, args = _parted(words)
    overrides, text = _with_plain_options(overrides), spec_yaml(spec_of(script, args or ()))
    flags, hosts = place.flags, place.read_hosts()
    resolved = load_spec(text, overrides, environ=terminal.environ, flags=flags, hosts=hosts, whole=True)
    with _starting():
        plan = _plan(resolved, terminal, options)
    return _carry_out_script(plan, resolved, terminal, options)


def _carry_out_script(plan: Plan, resolved: ResolvedSpec, terminal: Terminal, options: StartOptions) -> int:
    """Show the plan of a batch script, or submit it; each task of a job array is a run."""
    from clusterddp.submission.sweep_plan import plan_array

    array = plan_array(plan, resolved, terminal.environ)
    return _carry_out_sweep(array, terminal, options) if array else _carry_out(plan, terminal, options)


def _submit_again(terminal: Terminal, name: str, words: tuple[str, ...], place: Place, options: StartOptions) -> int:
    """Start the spec of an earlier run again. A spec's name is none: a file of it may be meant, without its ending."""
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import flow_yaml

    try:
        parent = find_run(options.runs_dir, name)
    except RunNotFoundError as error:
        near = "" if "Did you mean" in error.message else near_file(Path(name))
        raise UsageError(f"{name}: no such file, and {error.message}{near}", hint=error.hint) from None
    if name != "@last" and os.sep not in name and not parent.name.startswith(name):
        hint = f"its newest run is {parent.name}"
        raise UsageError(f"{name} is the name of a spec, not of a file or a run", hint=hint)
    if (mark := mark_of(parent)) and not options.dry_run:
        hint = f"submit {parent.name} -n shows what it starts; if you want that: clusterddp submit {parent.spec}"
        raise UsageError(f"{parent.name} is {mark}: nothing of it is started", hint=hint)
    overrides, args = _parted(words)
    if is_batch_script(parent):
        given = [] if args is None else [f"entry.args={flow_yaml(list(args))}"]
        overrides = (*_with_plain_options(overrides), *given)
    else:
        overrides = (*overrides, *(args or ()))
    flags, hosts = place.flags, place.read_hosts()
    resolved = load_spec(parent.spec, overrides, environ=terminal.environ, flags=flags, hosts=hosts, whole=True)
    earlier = read_json(parent.plan) or {}
    working_dir = Path(earlier.get("working_dir", "."))
    working_dir = working_dir if working_dir.is_dir() else Path.cwd()
    script, copy = resolved.job.entry and resolved.job.entry.batch_script, None
    if script and not Path(script).exists():
        say_note(f"{script} is gone: the copy of {parent.name} is submitted")
        copy = read_batch_script(parent)
    with _starting():
        plan = _plan(resolved, terminal, options, working_dir=working_dir, parent=parent.name, submission=copy)
    now, then = plan.gang.python.executable, earlier.get("gang", {}).get("python", {}).get("executable")
    if now and then and now != then:
        say_note(f"the ranks of {parent.name} ran in {then}, these run in {now}; python={then} takes that one again")
    return _carry_out_script(plan, resolved, terminal, options) if script else _carry_out(plan, terminal, options)


@command("hold")
@click.argument("spec", metavar="SPEC", type=SpecPath())
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option(
    "--for", "time", metavar="TIME", help="How long: 90m, 2h, 1d, or as resources.time, whose place it takes."
)
@place_options
@plan_options
@output_option
@runs_option
@collected("options", StartOptions)
@profile_option
@click.pass_obj
def hold(
    terminal: Terminal,
    *,
    spec: Path | str,
    overrides: tuple[str, ...],
    time: str | None,
    place: Place,
    options: StartOptions,
    profile: str | None,
) -> int:
    """Keep the machines of a spec, on which submit --in starts runs in seconds.

    On Slurm it is a job in which runs come one after another; elsewhere a run that finds too few GPUs free in it is
    refused. A run has the time that is left to the hold, and is asked to stop before its end. cancel RUN leaves the
    hold as it is; cancel HOLD ends both, with --save at a checkpoint of the run.

    \b
    clusterddp hold job.yaml --for 2h              prints the name of the hold
    clusterddp submit job.yaml --in calm-fox-7     again and again
    clusterddp cancel calm-fox-7
    """
    from clusterddp.planning.hold import as_hold
    from clusterddp.spec.load import load_spec

    if time and (unit := re.fullmatch("([1-9][0-9]{0,4})([mhd])", time)):
        time = f"{int(unit[1]) * UNIT_S[unit[2]] // 3600}:{int(unit[1]) * UNIT_S[unit[2]] // 60 % 60:02}:00"
    overrides = (*overrides, *([f'resources.time="{time}"'] if time else []))
    flags, hosts = place.flags, place.read_hosts()
    resolved = load_spec(spec, overrides, profile=profile, environ=terminal.environ, flags=flags, hosts=hosts)
    if resolved.job.launcher == "slurm" and (node := find_node(profile, terminal.environ)):
        return start_at_login(node, resolved, runs_dir=options.runs_dir, discard=options.dry_run)
    job = resolved.job.model_copy(update={"restarts": 0, "sweep": None, "notify": None})
    with _starting():
        plan = as_hold(_plan(dataclasses.replace(resolved, job=job), terminal, options))
    return _carry_out(plan, terminal, options)


@command("resume")
@works_at_login
@click.argument("name", metavar="RUN", type=RunName())
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option("--from-start", is_flag=True, help="Do not ask where no checkpoint of the program is found.")
@click.option(
    "--trust", is_flag=True, help="Show what an unsealed run starts, and seal it: from now on it is your own."
)
@hold_option
@start_options
@click.pass_obj
def resume(
    terminal: Terminal, *, name: str, overrides: tuple[str, ...], from_start: bool, trust: bool, options: StartOptions
) -> int:
    """Continue a run from its newest checkpoint, with other values if given: the next attempt of the same run.

    With the name of a sweep: continue what is left of it, in its queue.
    """
    from clusterddp.submission.submit import resume as resume_run
    from clusterddp.view.status import may_have_saved

    sweep = find_sweep(options.runs_dir, name)
    if sweep and overrides:
        raise UsageError(f"{sweep.name}: a sweep is resumed as it is", hint="clusterddp resume RUN KEY=VALUE takes one")
    if sweep:
        from clusterddp.submission.sweep_queue import resume_sweep

        _refuse_for_sweep(options)
        for run in sweep.runs() if trust else ():
            _trust(run)
        return stay_with_sweep(resume_sweep(sweep), terminal, options, verb="resumed")
    run = find_run(options.runs_dir, name)
    if trust:
        _trust(run)
    check = None if from_start or is_batch_script(run) or may_have_saved(run) else partial(_confirm_start_over, run)
    with _starting():
        place = find_run(options.runs_dir, options.hold) if options.hold else None
        submitted = resume_run(run, report=say, overrides=overrides, check=check, hold=place)
    return stay_with(submitted, terminal, options, verb="resumed")


def _trust(run: RunDir) -> None:
    """Seal a run that is not this user's own, after showing what it starts."""
    from clusterddp.run.seal import is_ours, trust

    def show(plan: dict[str, Any]) -> None:
        gang = build_record(Gang, plan["gang"], str(run.plan))
        say(f"{run.name} gets your seal; {printable(str(run.plan))} has all that it starts:")
        facts = {
            "launcher": [plan.get("launcher")],
            "runs": [plan_text.entry_text(gang.entry)],
            "hosts": [host.get("host") for host in (plan.get("ssh") or {}).get("hosts", ())],
            "secrets": plan.get("secrets") or (),
            "notifies": (gang.notify.channels if gang.notify else ()),
        }
        for name, values in facts.items():
            say(f"  {name:<9} {printable(', '.join(map(str, values)) or 'none')}")

    if not is_ours(run):
        trust(run, show)


def _confirm_start_over(run: RunDir) -> None:
    """Warn that a program starts from its beginning again; on a terminal, ask.

    Raises: UsageError: the user does not want that.
    """
    say(f"{run.name}: no checkpoint is known: the output directory is empty, the program never asked whether to stop")
    if not sys.stdin.isatty():
        say("it starts from its beginning, unless it finds a checkpoint of its own")
    elif not confirm("Start it from its beginning?", hint="", refused="nothing was started"):
        raise UsageError("nothing was started")


COMMANDS = {"submit": submit, "hold": hold, "resume": resume}


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Let Ctrl-C before the start print that nothing was started; a start that it interrupts has its own message."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or "interrupted: nothing was started") from None


def _plan(
    resolved: ResolvedSpec,
    terminal: Terminal,
    options: StartOptions,
    *,
    working_dir: Path | None = None,
    parent: str | None = None,
    trial: Trial | None = None,
    submission: bytes | None = None,
) -> Plan:
    from clusterddp.planning.hold import in_hold, read_hold
    from clusterddp.planning.placement import Request
    from clusterddp.planning.plan import plan_run
    from clusterddp.submission.submit import plan_ahead

    hold = find_run(options.runs_dir, options.hold) if options.hold else None
    request = Request(
        hold=read_hold(hold) if hold else None,
        runs_dir=options.runs_dir,
        working_dir=working_dir or Path.cwd(),
        environ=terminal.environ,
        parent=parent,
        trial=trial,
        submission=submission,
        run=PLANNED_NAME if options.dry_run else None,
    )
    if hold:  # its nodes are chosen already
        return in_hold(plan_run(resolved, request), hold)
    return plan_ahead(resolved, request)


def _try_out(resolved: ResolvedSpec, terminal: Terminal, options: StartOptions) -> int:
    """Start a smoke test; where this machine has no GPUs for the job's ranks, on the CPU."""
    try:
        plan = _plan(resolved, terminal, options, trial="smoke test")
    except PreflightError as error:
        if resolved.job.launcher != "local" or resolved.job.device == "cpu":
            raise
        say_note(f"{error.message}: the smoke test is on the CPU")
        network = resolved.job.network.model_copy(update={"backend": "auto"})
        job = resolved.job.model_copy(update={"device": "cpu", "network": network})
        on_cpu = dataclasses.replace(resolved, job=job, origins=resolved.origins | {"device": "--smoke-test"})
        plan = _plan(on_cpu, terminal, options, trial="smoke test")
    return _carry_out(plan, terminal, options)


def _carry_out_sweep(plan: SweepPlan, terminal: Terminal, options: StartOptions) -> int:
    """Show the plan of a sweep, or submit it and wait for its runs if the options say so; return the exit code."""
    from clusterddp.submission.sweep_array import submit_sweep

    _refuse_for_sweep(options)
    if options.dry_run:
        return _show(plan, plan.job, run_list, terminal, options)
    for note in plan.notes:
        say_note(note)
    return stay_with_sweep(submit_sweep(plan), terminal, options, verb="submitted")


def _refuse_for_sweep(options: StartOptions) -> None:
    if options.follow:
        raise click.UsageError("--follow shows one run, and this is a sweep of many; --wait waits for all of them")
    if options.hold:
        raise click.UsageError("--in starts one run, and this is a sweep of many, which has jobs of its own")


def _carry_out(plan: Plan, terminal: Terminal, options: StartOptions) -> int:
    """Show the plan, or submit it and stay with the run as long as the options say; return the exit code."""
    if options.dry_run:
        return _show(plan, None if plan.in_hold else plan.slurm, plan_text, terminal, options)
    from clusterddp.submission.submit import submit as submit_plan

    for note in plan.notes:
        say_note(note)
    with _starting():
        submitted = submit_plan(plan, report=say)
    return stay_with(submitted, terminal, options, verb="submitted")


def _show(plan: Any, job: SlurmPlan | None, text: ModuleType, terminal: Terminal, options: StartOptions) -> int:
    """Show the plan of a run or of a sweep, and the scheduler's answer to its job; return the exit code.

    `text`: the module that writes such a plan.
    """
    verdict = None
    if job:
        from clusterddp.places.slurm.launcher import ask_scheduler

        verdict = ask_scheduler(job, terminal.environ)
    if options.output == "json":
        put_json(text.masked_plan(plan, verdict))
    else:
        columns = columns_of(sys.stdout) or COLUMNS
        lines = text.plan_lines(plan, verbose=options.verbose, columns=columns)
        put("\n".join([*lines, *plan_text.verdict_lines(verdict, verbose=options.verbose, columns=columns)]))
    return PreflightError.exit_code if verdict and verdict.accepted is False else 0

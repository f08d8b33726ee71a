"""A step of a batch script that has run as a spec: what its ranks executed, and the sizes that Slurm gave it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from clusterddp.errors import UsageError
from clusterddp.importing.files import PASSED_ON, Findings, set_variable
from clusterddp.importing.job import SUBMIT_THERE, set_program, set_sizes, translate_options
from clusterddp.planning.python import find_activated, kind_of
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import read_gang, read_run
from clusterddp.run.steps import StepRecord, is_batch_script, read_step, steps_of
from clusterddp.spec.launch_options import SRUN, Option, Word, take_options
from clusterddp.spec.load import load_spec
from clusterddp.spec.sbatch_lines import SIZES, Given, GivenOptions, read_sbatch_lines, read_sizes
from clusterddp.spec.secret_values import hide_in_text, hide_secret_arguments
from clusterddp.spec.tree import decode

_OF_OTHERS = (
    *("SLURM_", "SBATCH_", "SRUN_", "BASH_", "CLUSTERDDP_", "SHLVL", "OLDPWD", "PWD", "PS1", "_"),
    *("VIRTUAL_ENV", "CONDA_", "MAMBA_", "LOADEDMODULES", "MODULEPATH", "MODULES", "LMOD_"),
)
"""Beginnings of names that a shell, Slurm, clusterddp, an activated environment or its modules set for themselves."""
_OF_MODULES = "the modules in setup: may set it; add to setup: what the script itself has put there"


def read_step_of(run: RunDir, number: str | None, findings: Findings) -> None:
    """Read a step of a run into `findings`; `number`: of the step, needed where several have started ranks.

    Raises: UsageError: there is no such step, or its ranks cannot be those of a spec.
    """
    step, record, gang = _choose(run, number)
    attempt = step.newest_attempt().number
    program = [gang.entry.target, *gang.entry.words]
    if hide_secret_arguments({"args": program})["args"] != program:
        raise UsageError(f"{run.name}: an argument of step {step.step} is a secret, which clusterddp does not store")
    per_node = {len(node.ranks) for node in gang.nodes}
    if len(per_node) > 1:
        raise UsageError(f"{run.name}: the nodes of step {step.step} have different numbers of ranks, a spec has one")
    findings.set("launcher", "slurm")
    findings.set("name", read_run(run).name)
    given = read_sbatch_lines(decode(run.batch_script.read_bytes(), findings.source), findings.source, findings.lose)
    for name, value in load_spec(run.spec, environ={}).job.slurm.items():
        given[name] = Given(option=Option(name=name, value=Word(str(value)), text=f"slurm.{name}={value}"), line=0)
    outer = RunDir(run.path, step=record.inside) if record.inside else None
    for each in (read_step(outer.attempt(attempt)) if outer else None, record):
        given |= _sizes_of_srun(each)
    sizes = dataclasses.replace(read_sizes(given, lambda *_: None), nodes=len(gang.nodes))
    translate_options(given, findings)
    set_sizes(given, sizes, per_node.pop(), findings, findings.lose)
    _set_environment(record.environment, findings)
    set_program("command", program, findings)
    findings.lose(f"cd {shlex.quote(record.working_dir)}", SUBMIT_THERE, fate="before")
    findings.lose(shlex.join(record.command), "clusterddp starts the ranks", record.line, fate="ours")


def _set_environment(environment: Mapping[str, str], findings: Findings) -> None:
    """Write what a script has changed: modules and an environment as keys, other parts of lists as setup lines."""
    setup = [
        shlex.join(["module", command, *added])
        for name, command in (("MODULEPATH", "use"), ("LOADEDMODULES", "load"))
        if (added := [each for each in environment.get(name, "").split(":") if each not in ("", f"${name}")])
    ]
    has_modules, active = bool(setup), find_activated(environment)
    kind = kind_of(active) if active else ""
    if kind:
        findings.set(kind, str(active))
    for name, value in environment.items():
        if name.startswith(_OF_OTHERS) or name.endswith(("_modshare", "_CONDA_BACKUP")) or not name.isidentifier():
            continue
        at_start = f"${name}"
        of_key = f"{active}/bin" if kind else None
        parts = [each for each in value.split(":") if each != of_key and not each.endswith("/condabin")]
        line = ":".join(f'"{each}"' if each == at_start else shlex.quote(each) for each in parts)
        extends = at_start in parts and hide_in_text(value) == value
        if has_modules and (extends or PASSED_ON.fullmatch(name)) and parts != [at_start]:
            findings.lose(f"export {name}={line}", _OF_MODULES)
        elif not extends and not set_variable(name, Word(value, computed=True), findings, None):
            set_variable(name, Word(value), findings, None)
        elif extends and parts != [at_start]:
            setup.append(f"export {name}={line}")
    if setup:
        findings.set("setup", setup)


def _choose(run: RunDir, number: str | None) -> tuple[RunDir, StepRecord, Gang]:
    """Choose a step that has started ranks; of one that torchrun has started again, the last round."""
    if not is_batch_script(run):
        raise UsageError(f"{run.name} is not a run of a batch script", hint="clusterddp submit RUN runs its spec again")
    found: dict[str, tuple[RunDir, StepRecord, Gang]] = {}
    attempts = RunDir(run.path).attempts()
    for step in steps_of(run, attempts[-1].number) if attempts else ():
        attempt = step.attempt(attempts[-1].number)
        if step.step and attempt.gang.is_file() and (record := read_step(attempt)):
            found[step.step.partition(".")[0]] = step, record, read_gang(step)
    if number is not None and number in found:
        return found[number]
    listed = "; ".join(f"{name}: {shlex.join(record.program)[:60]}" for name, (_, record, _) in found.items())
    if number is not None or not found:
        which = f"step {number}" if number is not None else "step"
        raise UsageError(f"{run.name}: no {which} of its newest attempt has started ranks", hint=listed or None)
    if len(found) > 1:
        raise UsageError(f"{run.name}: {len(found)} steps have started ranks, and a spec is one of them: {listed}",
                         hint=f"--step {next(reversed(found))} takes the last one")  # fmt: skip
    return next(iter(found.values()))


def _sizes_of_srun(record: StepRecord | None) -> GivenOptions:
    given = GivenOptions()
    if record and record.command and record.command[0].rpartition("/")[2] == "srun":
        options: list[Option] = take_options([Word(word) for word in record.command[1:]], SRUN)[0]
        for option in options:
            if option.name in SIZES:
                given[option.name] = Given(option=option, line=record.line or 0, of="srun")
    return given

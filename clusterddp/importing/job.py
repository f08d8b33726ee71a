"""The options of a batch script's job as the sections of a spec: its sizes, and what else it asks Slurm for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterddp.importing.files import Findings
from clusterddp.spec.sbatch_lines import GPU_OPTIONS, SIZES, Given, GivenOptions, Lose, Sizes
from clusterddp.spec.secret_values import hide_in_text
from clusterddp.spec.slurm_options import MEMORY_OPTIONS, OWNED

_CORES = ("cpus_per_task", "cpus_per_gpu", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "ntasks")
SUBMIT_THERE = "submit from there: ranks run in the directory that you submit from"
_OF_THE_JOB = {
    "requeue": "restarts: N starts the run again, and sets --requeue itself",
    "array": "the spec runs one task of it; a sweep runs many: sweep: {values: {env.SLURM_ARRAY_TASK_ID: [0, 1]}}",
    "signal": "stop.lead sets the time before the end; the program gets no signal from Slurm: it asks "
    "clusterddp.should_stop(), or entry.stop_signal names one; restarts: N requeues",
}
"""Options that have another form in a spec, which depends on the program."""


def set_sizes(given: GivenOptions, sizes: Sizes, ranks_per_node: int, findings: Findings, say: Lose) -> None:
    """Write the sizes into the spec, for so many ranks on each node; `say`: is called where they do not fit."""
    findings.set("resources.nodes", sizes.nodes)
    gpus = sizes.gpus_per_node
    fits = gpus is not None and (gpus == 0 or ranks_per_node <= gpus)
    if fits:
        findings.set("resources.gpus_per_node", gpus)
    elif gpus is not None:
        why = f"{ranks_per_node} ranks on a node share {gpus} GPUs, and a spec has one GPU for each rank"
        given.lose(next(name for name in GPU_OPTIONS if name in given), why, say)
    if ranks_per_node != (gpus or 1):
        findings.set("resources.procs_per_node", ranks_per_node)
    if sizes.cpus_per_task is not None or ranks_per_node < sizes.tasks_per_node:
        on_node = (sizes.cpus_per_task or 1) * sizes.tasks_per_node  # Slurm gives each task one core at least
        each, rest = divmod(on_node, ranks_per_node)
        findings.set("resources.cpus_per_task", max(1, each))
        if rest or not each:
            why = f"{on_node} cores on a node for {ranks_per_node} ranks: {max(1, each)} for each"
            given.lose(next(name for name in _CORES if name in given), why, say)
    for name in GPU_OPTIONS:
        value = given.value(name)
        kind, colon, _ = value.rpartition(":")
        if name in {"gres", "gpus"} and value:
            findings.set(f"slurm.{name}", value)
        elif value and (colon or not fits):  # else resources.gpus_per_node requests the same
            findings.set("slurm.gpus_per_node", f"{kind}{colon}{gpus}")


def set_program(kind: str, program: Sequence[str], findings: Findings) -> None:
    """Write the program; in an argument of an entry `{{name}}` stands for `{name}`."""
    escaped = [re.sub(r"\{([a-z][a-z0-9_]*)\}", r"{{\1}}", word) for word in program]
    findings.set(f"entry.{kind}", escaped if kind == "command" else escaped[0])
    if kind != "command" and escaped[1:]:
        findings.set("entry.args", escaped[1:])


def translate_options(given: GivenOptions, findings: Findings) -> None:
    """Translate the options of sbatch other than sizes; those that clusterddp sets are listed."""
    for name, entry in given.items():
        value = entry.option.value.text if entry.option.value else None
        memory = re.fullmatch(r"0*([1-9][0-9]{0,6})([kmgt]?)b?", value or "", re.IGNORECASE)
        if name in SIZES or name == "job_name":
            continue
        if hide_in_text(value or "") != (value or ""):
            findings.lose(entry.text, "it looks like a secret", entry.line)
        elif name == "time" and value:
            _set_time(value, entry, findings)
        elif name == "mem" and memory and memory[2] in {"g", "G"}:
            findings.set("resources.memory_gb", int(memory[1]))
        elif name in MEMORY_OPTIONS and memory:
            findings.set(f"slurm.{name}", memory[1] + memory[2].upper())
        elif not _list_option(name, value, entry, findings):
            findings.set(f"slurm.{name}", True if value is None else value)


def _set_time(value: str, entry: Given, findings: Findings) -> None:
    if value.lower() in {"unlimited", "infinite", "-1", "0"}:
        findings.lose(entry.text, "a spec without resources.time has no limit of its own", entry.line)
    elif re.fullmatch("[0-9]{1,7}", value):
        minutes = int(value)
        findings.set("resources.time", f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}")
    else:
        findings.set("resources.time", value)


def _list_option(name: str, value: str | None, entry: Given, findings: Findings) -> bool:
    """List an option that a spec has in another form, or not at all; False: it stays an option of sbatch."""
    if name == "export" and value:
        why = "ranks get the variables of env and secrets, and those of known kinds of the shell that submits"
        findings.lose(entry.text, why, entry.line, fate="ours" if value == "ALL" else "lost")
    elif name in _OF_THE_JOB:
        findings.lose(entry.text, _OF_THE_JOB[name], entry.line)
    elif name == "dependency" and value == "singleton":
        findings.lose(entry.text, "each run has a name of its own; after: [RUN] waits for a run", entry.line)
    elif name == "chdir":
        findings.lose(entry.text, SUBMIT_THERE, entry.line, fate="before")
    elif name.startswith("container_"):
        findings.refuse(entry.text, "the keys of a spec's container are others", entry.line)
    elif name in OWNED:
        findings.lose(entry.text, OWNED[name], entry.line, fate="ours")
    elif len(name) == 1:
        findings.lose(entry.text, "no option of sbatch that is known here", entry.line)
    else:
        return False
    return True

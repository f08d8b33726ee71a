"""How many nodes, ranks, cores and GPUs a job asks for: Slurm's options as a spec's resources that ask for the same."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.importing.findings import Findings
from clusterddp.importing.sbatch import Given
from clusterddp.network.hostlist import MAX_HOSTS, count

SIZES = frozenset(
    {
        "nodes", "ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "cpus_per_task", "cpus_per_gpu",
        "gpus", "gpus_per_node", "gpus_per_task", "gres",
    }
)  # fmt: skip
"""Options that decide the sizes, or follow from them."""
GPU_SIZES = frozenset({"gres", "gpus", "gpus_per_node", "gpus_per_task"})
_NUMBERS = ("ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "cpus_per_task", "cpus_per_gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the job has, as far as its options say it."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int | None

    @property
    def as_variables(self) -> dict[str, str]:
        """Return what Slurm would tell the script of it."""
        facts: dict[str, int | None] = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": self.nodes * self.tasks_per_node,
            "SLURM_NPROCS": self.nodes * self.tasks_per_node,
            "SLURM_NTASKS_PER_NODE": self.tasks_per_node,
            "SLURM_TASKS_PER_NODE": self.tasks_per_node,
            "SLURM_CPUS_PER_TASK": self.cpus_per_task,
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_GPUS_PER_NODE": self.gpus_per_node,
        }
        return {name: str(number) for name, number in facts.items() if number is not None}


def read_sizes(given: Mapping[str, Given], findings: Findings) -> Sizes:
    """Work out what the job has; what cannot be told, or goes unused, is said."""
    _refuse_odd_numbers(given, findings)
    tasks = _number(given, "ntasks_per_node") or _number(given, "tasks_per_node")
    total = _number(given, "ntasks")
    nodes = _nodes(given, findings)
    if nodes is None:
        nodes = math.ceil(total / tasks) if total and tasks else 1
        if total and total > 1 and not tasks:
            _say(
                given, "ntasks", "without --nodes Slurm chooses how many; the spec has one (resources.nodes)", findings
            )
    gpus = _gpus_per_node(given, nodes)
    per_gpu = _number(given, "ntasks_per_gpu")
    if tasks is None:
        tasks = math.ceil(total / nodes) if total else per_gpu * gpus if per_gpu and gpus else 1
    if per_gpu and per_gpu * (gpus or 0) != tasks:
        _say(given, "ntasks_per_gpu", f"there are {tasks} tasks on each node", findings)
    if total and total != nodes * tasks:
        _say(given, "ntasks", f"every node has the same number of ranks: {nodes} x {tasks}", findings)
    per_task = _count_of(given, "gpus_per_task")
    if gpus is None and per_task is not None:
        gpus = per_task * tasks
    return Sizes(
        nodes=nodes, tasks_per_node=tasks, cpus_per_task=_cores(given, gpus, tasks, findings), gpus_per_node=gpus
    )


def set_sizes(given: Mapping[str, Given], sizes: Sizes, ranks_per_node: int, findings: Findings) -> None:
    """Write the sizes into the spec, for so many ranks on each node."""
    findings.set("resources.nodes", sizes.nodes)
    fits = sizes.gpus_per_node is not None and ranks_per_node <= sizes.gpus_per_node
    if sizes.gpus_per_node is not None and (fits or sizes.gpus_per_node == 0):
        findings.set("resources.gpus_per_node", sizes.gpus_per_node)
    elif sizes.gpus_per_node is not None:
        why = f"{ranks_per_node} ranks on a node share {sizes.gpus_per_node} GPUs: none is a rank's own"
        findings.lose(_gpu_text(given), why, _gpu_line(given))
    if ranks_per_node != (sizes.gpus_per_node or 1):
        findings.set("resources.procs_per_node", ranks_per_node)
    if sizes.cpus_per_task is not None:
        _set_cores(given, sizes, ranks_per_node, findings)
    _set_gpu_options(given, sizes, ranks_per_node, findings, counted=fits)


def _set_cores(given: Mapping[str, Given], sizes: Sizes, ranks_per_node: int, findings: Findings) -> None:
    assert sizes.cpus_per_task is not None
    on_node = sizes.cpus_per_task * sizes.tasks_per_node
    each, rest = divmod(on_node, ranks_per_node)
    findings.set("resources.cpus_per_task", max(1, each))
    if rest or not each:
        entry = given.get("cpus_per_task") or given["cpus_per_gpu"]
        why = f"{on_node} cores on a node for {ranks_per_node} ranks: {max(1, each)} for each"
        findings.lose(entry.option.text, why, entry.line)


def _set_gpu_options(
    given: Mapping[str, Given], sizes: Sizes, ranks_per_node: int, findings: Findings, *, counted: bool
) -> None:
    """Keep the way in which the job asks for GPUs, but where the number of tasks changes its meaning."""
    for name in ("gres", "gpus", "gpus_per_node", "gpus_per_task"):
        value = _value(given, name)
        if not value:
            continue
        if name == "gpus_per_node" and value.isdigit() and counted:
            continue  # resources.gpus_per_node asks Slurm in the same words
        if name == "gpus_per_task" and ranks_per_node != sizes.tasks_per_node:
            kind, colon, _ = value.rpartition(":")
            if colon or not counted:
                findings.set("slurm.gpus_per_node", f"{kind}{colon}{sizes.gpus_per_node}")
            continue
        findings.set(f"slurm.{name}", value)


def _cores(given: Mapping[str, Given], gpus: int | None, tasks: int, findings: Findings) -> int | None:
    cores, per_gpu = _number(given, "cpus_per_task"), _number(given, "cpus_per_gpu")
    if per_gpu and (cores is not None or not gpus):
        why = "--cpus-per-task says it, too" if cores is not None else "the script does not say how many GPUs there are"
        _say(given, "cpus_per_gpu", why, findings)
    return max(1, per_gpu * gpus // tasks) if cores is None and per_gpu and gpus else cores


def _refuse_odd_numbers(given: Mapping[str, Given], findings: Findings) -> None:
    """List the sizes that are no number from 1."""
    for name in _NUMBERS:
        if name in given and not re.fullmatch("0*[1-9][0-9]{0,5}", _value(given, name)):
            _say(given, name, "expected a number from 1", findings)
    if "gres" in given and not _value(given, "gres"):
        _say(given, "gres", "has no value", findings)


def _say(given: Mapping[str, Given], name: str, why: str, findings: Findings) -> None:
    findings.lose(given[name].text, why, given[name].line)


def _nodes(given: Mapping[str, Given], findings: Findings) -> int | None:
    value = _value(given, "nodes")
    if not value:
        return _count_named(given)
    number = re.fullmatch("0*([1-9][0-9]{0,5})(-.*)?", value)
    if number is None or number[2]:
        why = "a spec has one number of nodes" + (": the smallest is taken" if number else ", from 1: 1 is taken")
        _say(given, "nodes", why, findings)
    return int(number[1]) if number else 1


def _count_named(given: Mapping[str, Given]) -> int | None:
    """Count the hosts of --nodelist, all of which a job gets that does not say how many nodes it wants."""
    try:
        return count(_value(given, "nodelist"), limit=MAX_HOSTS) or None
    except ClusterddpError:  # the path of a file with the hosts
        return None


def _gpus_per_node(given: Mapping[str, Given], nodes: int | None) -> int | None:
    per_node = _count_of(given, "gpus_per_node")
    if per_node is not None:
        return per_node
    for resource in _value(given, "gres").split(","):
        match = re.fullmatch(r"(?:gres[:/])?gpu(?:[:=][A-Za-z_][^:=(]*)?(?:[:=]([0-9]+))?(?:\(.*\))?", resource)
        if match:
            return int(match[1] or 1)
    total = _count_of(given, "gpus")
    return math.ceil(total / (nodes or 1)) if total is not None else None


def _count_of(given: Mapping[str, Given], name: str) -> int | None:
    """Count GPUs in `4`, `a100:4`, `a100:2,v100:2`; None where the option is not given."""
    counts = [part.rpartition(":")[2] for part in _value(given, name).split(",")]
    numbers = [int(count) for count in counts if re.fullmatch("[0-9]{1,6}", count)]
    return sum(numbers) if numbers else None


def _number(given: Mapping[str, Given], name: str) -> int | None:
    value = _value(given, name)
    return int(value) if re.fullmatch("0*[1-9][0-9]{0,5}", value) else None


def _value(given: Mapping[str, Given], name: str) -> str:
    entry = given.get(name)
    return entry.option.value.text if entry and entry.option.value else ""


def _gpu_entry(given: Mapping[str, Given]) -> Given | None:
    return next((given[name] for name in ("gres", "gpus", "gpus_per_node", "gpus_per_task") if name in given), None)


def _gpu_text(given: Mapping[str, Given]) -> str:
    entry = _gpu_entry(given)
    return entry.option.text if entry else ""


def _gpu_line(given: Mapping[str, Given]) -> int | None:
    entry = _gpu_entry(given)
    return entry.line if entry else None

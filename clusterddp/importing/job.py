"""The size of a batch script's job as resources of a spec."""

from __future__ import annotations

from clusterddp.importing.files import Findings
from clusterddp.spec.sbatch_lines import GPU_OPTIONS, GivenOptions, Sizes


def set_sizes(given: GivenOptions, sizes: Sizes, ranks_per_node: int, findings: Findings) -> None:
    """Write the sizes into the spec, for so many ranks on each node."""
    findings.set("resources.nodes", sizes.nodes)
    fits = sizes.gpus_per_node is not None and ranks_per_node <= sizes.gpus_per_node
    if sizes.gpus_per_node is not None and (fits or sizes.gpus_per_node == 0):
        findings.set("resources.gpus_per_node", sizes.gpus_per_node)
    elif sizes.gpus_per_node is not None:
        why = f"{ranks_per_node} ranks on a node share {sizes.gpus_per_node} GPUs, and a spec has one GPU for each rank"
        entry = next(given[name] for name in GPU_OPTIONS if name in given)
        findings.lose(entry.option.text, why, entry.line)
    if ranks_per_node != (sizes.gpus_per_node or 1):
        findings.set("resources.procs_per_node", ranks_per_node)
    if sizes.cpus_per_task is not None or ranks_per_node < sizes.tasks_per_node:
        _set_cores(given, sizes, ranks_per_node, findings)
    _set_gpu_options(given, sizes, ranks_per_node, findings, counted=fits)


def _set_cores(given: GivenOptions, sizes: Sizes, ranks_per_node: int, findings: Findings) -> None:
    on_node = (sizes.cpus_per_task or 1) * sizes.tasks_per_node  # Slurm gives each task one core at least
    each, rest = divmod(on_node, ranks_per_node)
    findings.set("resources.cpus_per_task", max(1, each))
    if rest or not each:
        names = ("cpus_per_task", "cpus_per_gpu", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "ntasks")
        entry = next(given[name] for name in names if name in given)
        why = f"{on_node} cores on a node for {ranks_per_node} ranks: {max(1, each)} for each"
        findings.lose(entry.option.text, why, entry.line)


def _set_gpu_options(
    given: GivenOptions, sizes: Sizes, ranks_per_node: int, findings: Findings, *, counted: bool
) -> None:
    """Keep the options by which the job requests GPUs, unless the number of tasks changes their meaning."""
    for name in GPU_OPTIONS:
        value = given.value(name)
        if not value:
            continue
        if name == "gpus_per_node" and value.isdigit() and counted:
            continue  # resources.gpus_per_node requests the same
        if name == "gpus_per_task" and ranks_per_node != sizes.tasks_per_node:
            kind, colon, _ = value.rpartition(":")
            if colon or not counted:
                findings.set("slurm.gpus_per_node", f"{kind}{colon}{sizes.gpus_per_node}")
            continue
        findings.set(f"slurm.{name}", value)

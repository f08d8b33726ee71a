"""The plan of a run on Slurm: its nodes, for which Slurm chooses hosts, and its job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError, UsageError
from clusterddp.planning.placement import Placement, Request
from clusterddp.planning.prerequisites import data_notes, storage_notes
from clusterddp.planning.program import directories_used, filled_in
from clusterddp.planning.slurm.after import find_dependency
from clusterddp.planning.slurm.job import plan_slurm
from clusterddp.planning.slurm.options import choose_options
from clusterddp.run.gang import Node
from clusterddp.system.storage import check_shared

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


def place(job: JobSpec, request: Request) -> Placement:
    """Place the ranks on nodes and plan the job.

    Raises: UsageError, PreflightError: Slurm could not run the job, or not from this directory.
    """
    refuse_odd_path(request.runs_dir)
    dependency, waiting = find_dependency(job.after, request.runs_dir)
    options = choose_options(job, request.environ, dependency)
    placement = plan_slurm_placement(job, gpus=options.gpus)
    shared = check_shared(
        request.runs_dir, "runs", "--runs DIR or CLUSTERDDP_RUNS names a directory that all nodes share"
    )
    if job.entry:
        check_shared(request.working_dir, "what ranks work in", "submit from a directory that all nodes share")
    data = data_notes(filled_in(job)["train"])
    notes = (*placement.notes, *options.notes, *waiting, *shared, *storage_notes(), *data)
    slurm = plan_slurm(
        options,
        container=job.container.model_dump(mode="json") | {"gpus": options.gpus} if job.container else None,
        mounts=directories_used(filled_in(job), request.working_dir),
        environ=request.environ,
    )
    return dataclasses.replace(placement, notes=notes, slurm=slurm)


def plan_slurm_placement(job: JobSpec, *, gpus: bool) -> Placement:
    """Place the ranks on the nodes of a job; Slurm chooses hosts and GPUs at its start. `gpus`: the job asks for GPUs.

    Raises: PreflightError: the spec asks for nccl and for no GPUs.
    """
    per_node = job.resources.ranks_per_node
    gpus = gpus and job.device != "cpu"
    nodes = tuple(
        Node(
            node_rank=node_rank,
            host=f"(node {node_rank} of the job)",
            ranks=tuple(range(node_rank * per_node, (node_rank + 1) * per_node)),
        )
        for node_rank in range(job.resources.nodes)
    )
    if job.network.backend == "nccl" and not gpus:
        raise PreflightError(
            f"{job.name}: network.backend nccl needs GPUs, and the job asks Slurm for none",
            hint="resources.gpus_per_node asks for them; network.backend=auto takes gloo on the CPU",
        )
    notes = []
    if job.device == "auto" and not gpus and job.resources.gpus_per_node is None:
        notes.append("resources.gpus_per_node is not set: the job asks for no GPU, its ranks compute on the CPU")
    if job.resources.cpus_per_task is None:
        notes.append("resources.cpus_per_task is not set: one core for each rank")
    return Placement.elsewhere(job, nodes, gpus=gpus, notes=tuple(notes))


def refuse_odd_path(runs_dir: Path) -> None:
    """Refuse a path that Slurm would change."""
    reasons = {
        "%": "Slurm replaces % in the path of a log by the job's ids",
        "\\": "Slurm removes it from paths",
    }
    for char in str(runs_dir):
        reason = reasons.get(char) or ("" if char.isprintable() else "Slurm stores a path on one line")
        if reason:
            raise UsageError(
                f"{str(runs_dir)!r}: has {char!r}; {reason}",
                hint="use another directory with --runs DIR or CLUSTERDDP_RUNS",
            )

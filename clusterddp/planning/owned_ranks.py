"""What is started once on each node, with all that it has: torchrun, a program that owns its ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from clusterddp.planning.placement import Placement

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


def tasks_per_node(job: JobSpec) -> int:
    """Return how many processes are started on each node."""
    once = job.start == "torchrun" or (job.entry is not None and job.entry.owns_ranks)
    return 1 if once else job.resources.ranks_per_node


def cores_per_task(job: JobSpec) -> int:
    """Return how many cores each process that is started needs: a program with ranks of its own, those of all."""
    return (job.resources.cpus_per_task or 1) * (job.resources.ranks_per_node // tasks_per_node(job))


def with_one_process_each(job: JobSpec, placement: Placement) -> tuple[Placement, tuple[int, ...]]:
    """Return the placement of the processes that are started, and how many ranks each starts; none: they are ranks."""
    if job.entry is None or not job.entry.owns_ranks:
        return placement, ()
    nodes = tuple(dataclasses.replace(node, ranks=(node.node_rank,)) for node in placement.nodes)
    return dataclasses.replace(placement, nodes=nodes), tuple(len(node.ranks) for node in placement.nodes)

"""The placement of a run over SSH: its nodes are the hosts of the spec."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError
from clusterddp.planning.placement import Placed, Placement, Request
from clusterddp.planning.ssh.plan import plan_ssh
from clusterddp.run.gang import Node

if TYPE_CHECKING:
    from clusterddp.spec.hosts import Share
    from clusterddp.spec.model import JobSpec


def place(job: JobSpec, request: Request) -> Placed:
    """Distribute the ranks over the hosts of the spec.

    Raises: PreflightError: see `plan_ssh_placement`. UsageError: see `plan_ssh`.
    """
    from clusterddp.spec.hosts import share_out, unused_hosts

    shares = share_out(job)
    placement = plan_ssh_placement(job, shares, unused_hosts(job))
    return Placed(placement=placement, ssh=dataclasses.replace(plan_ssh(job, shares), attached=request.attached))


def plan_ssh_placement(job: JobSpec, shares: Sequence[Share], unused: Sequence[str] = ()) -> Placement:
    """Place the nodes on hosts; the start leases their GPUs and chooses their interfaces.

    `unused`: further hosts of the spec.

    Raises: PreflightError: the spec asks for nccl and for no GPUs.
    """
    firsts = itertools.accumulate((share.ranks for share in shares), initial=0)
    nodes = tuple(
        Node(node_rank=node_rank, host=share.host.host, ranks=tuple(range(first, first + share.ranks)))
        for node_rank, (share, first) in enumerate(zip(shares, firsts, strict=False))
    )
    gpus = any(share.gpus for share in shares)
    if job.network.backend == "nccl" and not gpus:
        raise PreflightError(
            f"{job.name}: network.backend nccl needs GPUs, and none are asked for",
            hint="resources.gpus_per_node or a host's gpus asks for them; network.backend=auto takes gloo on the CPU",
        )
    return Placement.elsewhere(job, nodes, gpus=gpus, notes=tuple(_ssh_notes(job, unused, gpus=gpus)))


def _ssh_notes(job: JobSpec, unused: Sequence[str], *, gpus: bool) -> Iterator[str]:
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        few = f"{names} {'is' if len(unused) == 1 else 'are'}"
        yield f"resources.nodes is {job.resources.nodes}: {few} not used; ~resources.nodes takes all"
    if job.device == "auto" and not gpus and job.resources.gpus_per_node is None:
        yield "no GPUs are asked for (resources.gpus_per_node, or gpus of a host): the ranks compute on the CPU"
    if job.resources.cpus_per_task is None:
        yield "resources.cpus_per_task is not set: one thread for each rank"
    if job.resources.memory_gb:
        yield "resources.memory_gb is not enforced on hosts over SSH"
    for name in ("container", "after"):
        if getattr(job, name):
            yield f"{name} is for the slurm launcher and has no effect here"

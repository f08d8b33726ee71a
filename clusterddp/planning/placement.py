"""The placement: each rank's node and GPUs, the threads per rank, and the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.run.gang import Node

if TYPE_CHECKING:
    from clusterddp.planning.entry import Trial
    from clusterddp.planning.slurm.job import SlurmPlan
    from clusterddp.planning.ssh.plan import SshPlan
    from clusterddp.spec.model import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where and on which devices the ranks run."""

    nodes: tuple[Node, ...]
    threads_per_rank: int
    backend: Literal["gloo", "nccl"]
    on_cpu: bool
    """True: no rank has a GPU."""
    interface: str | None
    """None: each node chooses its own at the start."""
    notes: tuple[str, ...]

    @classmethod
    def elsewhere(cls, job: JobSpec, nodes: tuple[Node, ...], *, gpus: bool, notes: tuple[str, ...]) -> Placement:
        """Return the placement on machines whose cores and interfaces this one does not know."""
        return cls(
            nodes=nodes,
            threads_per_rank=job.resources.cpus_per_task or 1,
            backend="nccl" if gpus and job.network.backend != "gloo" else "gloo",
            on_cpu=not gpus,
            interface=None if job.network.interface == "auto" else job.network.interface,
            notes=notes,
        )


def with_one_process_each(job: JobSpec, placement: Placement) -> tuple[Placement, tuple[int, ...]]:
    """Return the placement of the started processes, and how many ranks each starts; empty if they are the ranks."""
    if job.entry is None or not job.entry.owns_ranks:
        return placement, ()
    nodes = tuple(dataclasses.replace(node, ranks=(node.node_rank,)) for node in placement.nodes)
    return dataclasses.replace(placement, nodes=nodes), tuple(len(node.ranks) for node in placement.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Where and how a run is submitted."""

    runs_dir: Path
    working_dir: Path
    environ: Mapping[str, str]
    parent: str | None = None
    """The run that this one repeats."""
    attached: bool = False
    """True: a run over SSH ends when the process that starts it ends."""
    queued: bool = False
    """True: the run waits for its GPUs, so they may be in use now."""
    trial: Trial | None = None
    """What the ranks execute in place of the entry."""
    run: str | None = None
    """The run's name; None: one that is free is chosen."""
    placed: Placed | None = None
    """Where the ranks run, if that is decided already; None: the launcher of the spec places them."""

    def with_absolute_paths(self) -> Request:
        return dataclasses.replace(self, runs_dir=self.runs_dir.absolute(), working_dir=self.working_dir.absolute())


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The placement by one launcher, with its own part of the plan."""

    placement: Placement
    slurm: SlurmPlan | None = None
    ssh: SshPlan | None = None

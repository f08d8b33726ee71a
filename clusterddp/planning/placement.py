"""The placement: which ranks sit on which node, with which GPUs, how many threads, and over which backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import UsageError
from clusterddp.run.gang import Node

if TYPE_CHECKING:
    from clusterddp.planning.slurm.job import SlurmPlan
    from clusterddp.planning.ssh import SshPlan

_UNSUPPORTED_BY_SUBMITIT = ("%j", "%t", "%A", "%a")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the ranks go."""

    nodes: tuple[Node, ...]
    threads_per_rank: int
    backend: Literal["gloo", "nccl"]
    on_cpu: bool
    """True: no rank has a GPU."""
    interface: str | None
    """None: each node finds its own at the start."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Where and how a run is submitted."""

    runs_dir: Path
    working_dir: Path
    environ: Mapping[str, str]
    attached: bool = False
    """The run is to end with the process that starts it."""
    queued: bool = False
    """The run waits for its GPUs, so it does not matter who uses them now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """What a launcher's part of the planning gives."""

    placement: Placement
    slurm: SlurmPlan | None = None
    ssh: SshPlan | None = None


def refuse_submitit_tags(runs_dir: Path) -> None:
    """Refuse a path that submitit, which starts local runs and jobs on Slurm, would not take as it is written.

    Raises: UsageError.
    """
    tags = [tag for tag in _UNSUPPORTED_BY_SUBMITIT if tag in str(runs_dir)]
    if tags:
        raise UsageError(f"{runs_dir}: submitit, which starts the run, takes {tags[0]} in a path for a job's number")

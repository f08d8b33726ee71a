"""The order that a supervisor is started with; its form is in supervisor.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Node


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOrder:
    """What a supervisor knows of the job that it belongs to."""

    job_id: str
    restart_count: int
    """How often Slurm has started the job before."""
    used_restarts: int
    """How many of the run's restarts were used up before this start of the job."""
    job_tag: str | None
    heads: tuple[str, ...]
    """Where the head may be, as names or addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the supervisor was started for."""

    run: RunDir
    gang: Gang
    node: Node
    attempt: int
    link: tuple[str, int] | None
    parent_bound: bool
    slurm: SlurmOrder | None = None
    tasks: int | None = None
    """The descriptor of the socket that the node's tasks connect to; None: ranks are children of the supervisor."""
    over_ssh: bool = False
    """True when what started this is an agent at the end of the launcher's connection."""
    hold: tuple[int, ...] = ()
    """Descriptors that supervisor and guard have open until the node's processes are gone: the leases on its GPUs."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Order:
        gang = Gang.from_json(data["gang"])
        slurm = data.get("slurm")
        if slurm is not None:
            slurm = SlurmOrder(**slurm | {"heads": tuple(dict.fromkeys(filter(None, slurm["heads"])))})
        return cls(
            run=RunDir(Path(data["run_dir"])),
            gang=gang,
            node=next(node for node in gang.nodes if node.node_rank == data["node_rank"]),
            attempt=data["attempt"],
            link=(data["link"]["host"], data["link"]["port"]) if data["link"] else None,
            parent_bound=data["parent_bound"],
            slurm=slurm,
            tasks=data.get("tasks"),
            over_ssh=data.get("over_ssh", False),
            hold=tuple(data.get("hold", ())),
        )

    @property
    def is_head(self) -> bool:
        return self.node.node_rank == 0

    @property
    def spans_hosts(self) -> bool:
        """True when the nodes are on several hosts, any of which may fall silent."""
        return len({node.host for node in self.gang.nodes}) > 1

    @property
    def first_restart(self) -> int:
        """How many restarts lie behind the run when this order's first attempt begins."""
        return self.slurm.used_restarts if self.slurm is not None else 0

    def restarts_left_after(self, attempt: int) -> bool:
        """Say whether the run may begin yet another attempt after this one."""
        return self.first_restart + attempt - self.attempt < self.gang.restarts

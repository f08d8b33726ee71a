"""What a rack looks like, and how its Slurm is set up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD = "head"
USER = "ana"
"""A user without privileges who exists on every host, besides root."""
USER_ID = 61_234


@dataclass(frozen=True, kw_only=True)
class RackPlan:
    """The hosts of a rack and the parameters of its Slurm."""

    nodes: Sequence[str] = ("node1", "node2", "node3", "node4")
    cores_per_host: int = 32
    memory_mb: int = 256_000
    gpus_per_host: int = 8
    debian_hosts: bool = True
    """/etc/hosts of each host gives its own name 127.0.1.1, as Debian's installer does."""
    job_requeue: bool = True
    kill_wait_s: int = 5
    min_job_age_s: int = 300
    slurmd_timeout_s: int = 10
    requeue_wait_s: int = 5
    """For how long a requeued job is not started again; Slurm takes no less than 5, and 120 by default."""
    preempt_grace_s: int = 0
    accounting: bool = False
    """slurmdbd and mariadb on the head, so that sacct answers; needs the packages of the same names."""

    def address(self, host: str) -> str:
        """Give the address of a host on the rack's own network."""
        return "10.77.0.1" if host == HEAD else f"10.77.0.{11 + list(self.nodes).index(host)}"

    def port(self, node: str) -> str:
        """Name the head's end of a node's cable."""
        return f"port{1 + list(self.nodes).index(node)}"

    @property
    def hosts(self) -> list[str]:
        """List the head and the nodes."""
        return [HEAD, *self.nodes]

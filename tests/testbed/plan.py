"""What a rack looks like, and how its Slurm is set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEAD = "head"
USER = "ana"
"""A user without privileges who exists on every host, besides root."""
USER_ID = 61_234

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BARE = Path("/opt/bare")
"""Where a private host has its Python: `/opt/bare/bin/python`."""
TOOLS = Path("/opt/rack/bin")
"""Where a private host has what a test adds to its PATH."""


@dataclass(frozen=True, kw_only=True)
class RackPlan:
    """The hosts of a rack and the parameters of its Slurm."""

    nodes: Sequence[str] = ("node1", "node2", "node3", "node4")
    cores_per_host: int = 32
    memory_mb: int = 256_000
    gpus_per_host: int = 8
    gpus_of: Mapping[str, int] = field(default_factory=dict)
    """Nodes that have another number of GPUs -> that number."""
    debian_hosts: bool = True
    """/etc/hosts of each host gives its own name 127.0.1.1, as Debian's installer does."""
    job_requeue: bool = True
    kill_wait_s: int = 5
    min_job_age_s: int = 300
    first_job_id: int = 1
    slurmd_timeout_s: int = 10
    requeue_wait_s: int = 5
    """For how long a requeued job is not started again; Slurm takes no less than 5, and 120 by default."""
    preempt_grace_s: int = 0
    tracking: str = "cgroup"
    """How Slurm knows a step's processes. As on most sites `cgroup`, where this machine has the freezer of cgroup v1:
    a signal to the job reaches no child of a task. Else, and where a test asks for it, `linuxproc`: it reaches all."""
    confine: bool = False
    """As sites have it: task/cgroup and task/affinity hold a job to its memory, its GPUs and, where this machine has
    so many, its cores; PrologFlags=Contain; a /tmp of the job's own. Takes the controllers of cgroup v1."""
    configless: bool = False
    """Nodes have no slurm.conf: their daemon fetches it from the controller."""
    accounting: bool = False
    """slurmdbd and mariadb on the head, so that sacct answers; needs the packages of the same names."""
    slurm: bool = True
    docker: bool = True
    """Every host has a docker0, with the same address."""
    private_hosts: bool = False
    """Each node has a disk of its own and does not see this checkout; goes without Slurm only."""
    shares: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Directory -> the private hosts that have it in common."""
    python_packages: Sequence[str] = ("torch",)
    """What can be imported on private hosts, with what it requires."""
    bare_on_path: bool = True
    """`python` on a private host is the one that has torch, as with a `.bashrc` that says so."""

    def __post_init__(self) -> None:
        if self.private_hosts and self.slurm:
            raise ValueError("private hosts share no directory with Slurm: RackPlan(private_hosts=True, slurm=False)")

    def address(self, host: str) -> str:
        """Give the address of a host on the rack's own network."""
        return "10.77.0.1" if host == HEAD else f"10.77.0.{11 + list(self.nodes).index(host)}"

    def port(self, node: str) -> str:
        """Name the head's end of a node's cable."""
        return f"port{1 + list(self.nodes).index(node)}"

    def path(self, host: str) -> str:
        """Give the PATH of a user who logs in to a host."""
        if host == HEAD or not self.private_hosts:
            return SYSTEM_PATH
        return f"{BARE / 'bin'}:{TOOLS}:{SYSTEM_PATH}" if self.bare_on_path else f"{TOOLS}:{SYSTEM_PATH}"

    @property
    def hosts(self) -> list[str]:
        """List the head and the nodes."""
        return [HEAD, *self.nodes]

"""What a cell of the table in docs/launchers.md is made of: who types what, and the gang that comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

COLUMNS = {
    "local": "local: two nodes of one rank, on one machine",
    "ssh": "ssh: two hosts that share nothing",
    "slurm": "slurm: two nodes",
    "bare": "bare: clusterddp starts no rank",
}
COMMON = """\
name: job
device: cpu
resources: {nodes: 2, procs_per_node: 1}
ssh: {hosts: [node1, node2]}
"""
"""With what a row adds, the job.yaml of that row in all columns."""
FILES = {
    "hostfile": "node1 slots=1\nnode2 slots=1\n",
    ".deepspeed_env": "BONUS=1\n",
    "data/slope.json": "3.0\n",
    "train.slurm": """\
#!/bin/bash
#SBATCH --job-name=train --partition=low
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=10
export BONUS=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint "$head_node:29500" train.py
""",
    "ddp.yaml": """\
DDP_CONFIG:
  AUTO_RANK_MATCH: True
  WORLD_SIZE: 2
  WORLD_RANK: 0
  DIST_URL: 'tcp://10.77.0.11:23456'
  WOLRD_URLS: ['10.77.0.11', '10.77.0.12']
  GPU_WORLD_SIZE: 2
  DIST_BACKEND: 'gloo'
  DISTRIBUTED: True
""",
}
"""What people bring along, besides their scripts (tests/entries)."""


class Where(Enum):
    """Who types a command."""

    HERE = "here"
    """On the machine of the tests."""
    LAPTOP = "laptop"
    """At a laptop that reaches two hosts by SSH; they share nothing with it."""
    MACHINES = "machines"
    """On each of these two hosts; two commands: one each."""
    LOGIN = "login"
    """On the login node of a Slurm cluster of two nodes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is typed, and the gang that comes of it."""

    column: str
    where: Where
    commands: tuple[str, ...]
    nodes: int = 2
    ranks_per_node: int = 1
    bonus: int = 0
    """What each rank adds to its part of the sum: the value that a file or an argument of the person's has carried."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way of starting DDP; `cells` are those that can exist, `none` says why the others cannot."""

    key: str
    title: str
    spec: str = ""
    """What job.yaml has besides COMMON."""
    cells: tuple[Cell, ...]
    none: dict[str, str]
    says: str = ""
    """What its ranks say besides."""
    knows_place: bool = True
    """Its ranks know their local rank and node."""
    result: str = ""
    """A file that rank 0 writes into {output_dir}, with the world size that it has found."""
    trains: bool = False
    """Its ranks are the built-in trainer's, which writes a summary."""

    @cached_property
    def cases(self) -> dict[str, Cell]:
        return {f"{self.key}-{cell.column}-{number}": cell for number, cell in enumerate(self.cells)}


def local(command: str, **more: int) -> Cell:
    return Cell(column="local", where=Where.HERE, commands=(command,), **more)


def ssh(command: str, **more: int) -> Cell:
    return Cell(column="ssh", where=Where.LAPTOP, commands=(command,), **more)


def slurm(command: str, **more: int) -> Cell:
    return Cell(column="slurm", where=Where.LOGIN, commands=(command,), **more)


def bare(command: str, *, where: Where = Where.HERE, nodes: int = 1, ranks_per_node: int = 2) -> Cell:
    return Cell(column="bare", where=where, commands=(command,), nodes=nodes, ranks_per_node=ranks_per_node)


def machines(*commands: str, ranks_per_node: int = 1, bonus: int = 0) -> Cell:
    return Cell(column="bare", where=Where.MACHINES, commands=commands, ranks_per_node=ranks_per_node, bonus=bonus)


def submitted(*, ssh_more: str = "", **more: int) -> tuple[Cell, Cell, Cell]:
    """The same job.yaml by each of our launchers."""
    return (
        local("clusterddp submit job.yaml --launcher local --wait", **more),
        ssh(f"clusterddp submit job.yaml --launcher ssh --wait{ssh_more}", **more),
        slurm("clusterddp submit job.yaml --launcher slurm --wait", **more),
    )

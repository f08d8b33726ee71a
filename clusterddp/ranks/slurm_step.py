"""Reads the place of a task in its Slurm step from srun's variables; the step's counts come before the job's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError
from clusterddp.network.hostlist import expand

MAX_TASKS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """A task's place in its step, and the step as a whole: which ranks are on which host."""

    job_id: str
    step_id: str
    restart_count: int
    """How often Slurm has restarted this job."""
    hosts: tuple[str, ...]
    """By node rank."""
    ranks: tuple[tuple[int, ...], ...]
    """By node rank, in the order of their local ranks."""
    rank: int
    local_rank: int
    node_rank: int

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def host(self) -> str:
        return self.hosts[self.node_rank]

    @property
    def nodes(self) -> list[dict[str, object]]:
        """The nodes of the gang, as its JSON has them."""
        return [
            {"node_rank": node_rank, "host": host, "ranks": list(ranks), "slurm_chooses_gpus": True}
            for node_rank, (host, ranks) in enumerate(zip(self.hosts, self.ranks, strict=True))
        ]


def read_place(environ: Mapping[str, str]) -> StepPlace:
    """Read a task's place: the tasks are in blocks, or dealt out to the nodes in turn (`srun --distribution=cyclic`).

    Raises: ClusterddpError: a variable is missing or invalid, or two contradict each other.
    """
    hosts = expand(_one_of(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    counts = expand_counts(_one_of(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    place = StepPlace(
        job_id=_one_of(environ, "SLURM_JOB_ID", "SLURM_JOBID"),
        step_id=_one_of(environ, "SLURM_STEP_ID", "SLURM_STEPID"),
        restart_count=_number(environ, "SLURM_RESTART_COUNT") if environ.get("SLURM_RESTART_COUNT") else 0,
        hosts=hosts,
        ranks=_lay_out(counts, environ),
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        node_rank=_number(environ, "SLURM_NODEID"),
    )
    _check(place, _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    return place


def _lay_out(counts: Sequence[int], environ: Mapping[str, str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node. Source: _task_layout_block and _cyclic, src/common/slurm_step_layout.c."""
    kind = environ.get("SLURM_DISTRIBUTION", "").partition(":")[0].partition(",")[0].lower()
    if kind in {"arbitrary", "plane"}:
        raise ClusterddpError(f"srun --distribution={kind}: which task is on which node is not known")
    size = 1 if kind == "cyclic" else max(counts)
    ranks: list[list[int]] = [[] for _ in counts]
    number = 0
    while number < sum(counts):
        for own, count in zip(ranks, counts, strict=True):
            taken = min(size, count - len(own))
            own.extend(range(number, number + taken))
            number += taken
    return tuple(map(tuple, ranks))


def expand_counts(text: str) -> tuple[int, ...]:
    """Read Slurm's counts per node: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or int(match[1]) * times > MAX_TASKS or len(counts) + times > MAX_TASKS:
            raise ClusterddpError(f"tasks per node {text!r}: a count such as 2 or 2(x3) is expected, not {part!r}")
        counts += [int(match[1])] * times
    return tuple(counts)


def _check(place: StepPlace, num_tasks: int) -> None:
    if len(place.hosts) != len(place.ranks):
        raise ClusterddpError(
            f"Slurm's variables contradict each other: the step's {len(place.hosts)} hosts are "
            f"{', '.join(place.hosts)}, but tasks per node are given for {len(place.ranks)}"
        )
    if place.world_size != num_tasks:
        raise ClusterddpError(
            f"Slurm's variables contradict each other: {place.world_size} tasks on the nodes, {num_tasks} in the step"
        )
    if place.node_rank >= len(place.ranks):
        raise ClusterddpError(
            f"Slurm's variables contradict each other: node {place.node_rank} of a step with {len(place.hosts)} hosts"
        )
    own = place.ranks[place.node_rank]
    if place.local_rank >= len(own) or own[place.local_rank] != place.rank:
        raise ClusterddpError(
            f"task {place.rank} is number {place.local_rank} on node {place.node_rank}, whose tasks are "
            f"{', '.join(map(str, own))}",
            hint="srun needs --distribution=block",
        )


def _one_of(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise ClusterddpError(f"{names[0]} is not set", hint="srun starts the tasks of a Slurm run")


def _number(environ: Mapping[str, str], *names: str) -> int:
    text = _one_of(environ, *names)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ClusterddpError(f"{names[0]} is {text!r}, a number is expected")
    return int(text)

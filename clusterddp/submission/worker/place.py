"""The nodes, devices, threads and interfaces of a run, from the introductions of its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import PreflightError
from clusterddp.network.interface import interface_towards, is_loopback, loopback, named_interface
from clusterddp.network.socket_links import faster_networks
from clusterddp.planning.program import TRAINER
from clusterddp.rendezvous.rank_messages import RankHello, RanksMet
from clusterddp.run.directory import MAX_ATTEMPTS, is_run_name, is_token
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


_MAX_TEXT = 1024
"""Of a host's name or address, or of the identity of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What rank 0 decides and sends to all ranks."""

    run: str
    token: str
    attempt: int
    identity: str
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """By node rank: the host and its ranks, in the order of their local ranks."""
    gpus: bool
    """True: each rank computes on a GPU."""
    backend: str
    master_addr: str
    master_port: int
    reached: str
    """The address by which the others reach rank 0's host."""
    networks: tuple[str, ...] = ()
    """Those that NCCL's sockets use instead of the one by which rank 0 is reached."""

    @classmethod
    def from_json(cls, data: dict[str, Any], world_size: int) -> Decided:
        """Check the answer of rank 0 to `world_size` ranks: without a key, any process at its port may have sent it.

        Raises: PreflightError: rank 0 cannot have sent it.
        """
        try:
            decided: Decided = build(cls, data, "rank 0's answer")
        except ValueError as error:
            raise PreflightError(f"another process answers as rank 0: {error}") from error
        ranks = sorted(rank for _, of_host in decided.nodes for rank in of_host)
        fits = 0 < decided.master_port < 65536 and 0 <= decided.attempt < MAX_ATTEMPTS
        if not (is_run_name(decided.run) and is_token(decided.token) and fits):
            raise PreflightError(f"another process answers as rank 0: it names the run {decided.run!r:.60}")
        if ranks != list(range(world_size)):
            raise PreflightError(f"another process answers as rank 0: its ranks are not 0 to {world_size - 1}")
        texts = (decided.identity, decided.master_addr, decided.reached, *(host for host, _ in decided.nodes))
        if not all(text.isprintable() and len(text) < _MAX_TEXT for text in texts):
            raise PreflightError("another process answers as rank 0: it sends a name that no host has")
        return decided


def nodes_of(hellos: tuple[RankHello, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Group the ranks into nodes by their place, in the order of their first ranks."""
    places: dict[tuple[str, str], list[RankHello]] = {}
    for hello in hellos:
        places.setdefault(hello.place, []).append(hello)
    return tuple(
        (host, tuple(hello.rank for hello in sorted(ranks, key=lambda each: (each.local_rank or 0, each.rank))))
        for (host, _), ranks in places.items()
    )


def gang_of(decided: Decided, job: JobSpec, *, rank: int, working_dir: Path) -> Gang:
    """Return the gang as it is on this rank's host; its entry is the trainer until the run's plan names another one."""
    nodes = tuple(
        Node(node_rank=node_rank, host=host, ranks=ranks, slurm_chooses_gpus=True)
        for node_rank, (host, ranks) in enumerate(decided.nodes)
    )
    own = next(ranks for _, ranks in decided.nodes if rank in ranks)
    return Gang(
        run=decided.run,
        token=decided.token,
        nodes=nodes,
        entry=Entry(kind="module", target=TRAINER, args=(), working_dir=str(working_dir), import_paths=()),
        threads_per_rank=job.resources.cpus_per_task or count_threads(len(own)),
        backend="nccl" if decided.backend == "nccl" else "gloo",
        on_cpu=not decided.gpus,
        master_addr=decided.master_addr,
        master_port=decided.master_port,
        env=dict(job.env),
        restarts=job.restarts,
    )


def decide_gpus(job: JobSpec, hellos: tuple[RankHello, ...]) -> bool:
    """Decide whether the ranks compute on GPUs: when each has one and the spec does not choose the CPU.

    Raises: PreflightError: the spec demands GPUs, and a rank has none.
    """
    if job.device == "cpu" or job.resources.gpus_per_node == 0:
        return False
    sizes = {host: len(ranks) for host, ranks in nodes_of(hellos)}
    without = [hello for hello in hellos if hello.gpus < sizes[hello.host] and hello.gpus != 1] + [
        hello for hello in hellos if hello.gpus == 0
    ]
    demanded = job.device == "cuda" or bool(job.resources.gpus_per_node) or job.network.backend == "nccl"
    if without and demanded:
        raise PreflightError(
            f"{without[0].name} sees {without[0].gpus} GPUs, and {sizes[without[0].host]} ranks are there",
            hint="device=cpu starts the same ranks on the CPU with gloo",
        )
    return not without


def count_gpus(job: JobSpec, environ: Mapping[str, str]) -> int:
    """Count the GPUs that this rank sees; 0 where the spec wants none."""
    from clusterddp.system.devices import visible_gpus

    return 0 if job.device == "cpu" or job.resources.gpus_per_node == 0 else len(visible_gpus(environ))


def count_threads(num_ranks: int) -> int:
    """Return a rank's share of this host's cores, or the cores to which its launcher has bound it."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, mine if mine < (os.cpu_count() or 1) else mine // num_ranks)


def decide_networks(job: JobSpec, met: RanksMet) -> tuple[str, ...]:
    """Decide which networks NCCL's sockets use; none: the one by which rank 0 is reached."""
    hosts = {hello.place: hello.links for hello in reversed(met.hellos)}
    if job.network.interface != "auto" or len(hosts) == 1:
        return ()
    first = hosts.pop(met.hellos[0].place)
    return faster_networks([first, *hosts.values()], met.reached)


def choose_interface(job: JobSpec, decided: Decided) -> str | None:
    """Choose the interface of this host that carries the gang's traffic.

    Raises: ClusterddpError: there is no route to rank 0, or this host lacks the interface that the spec names.
    """
    if job.network.interface != "auto":
        return named_interface(job.network.interface).name
    if len(decided.nodes) == 1 and is_loopback(decided.reached):
        return loopback().name
    return interface_towards(decided.reached).name

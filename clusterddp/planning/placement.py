"""The placement: each rank's node and GPUs, the threads per rank, and the backend; here, on this machine."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from clusterddp.errors import PreflightError, UsageError
from clusterddp.run.gang import Node, RankPython
from clusterddp.spec.batch_script import options_of
from clusterddp.spec.sbatch_lines import read_sizes
from clusterddp.system.devices import list_gpus, loopback_interface, visible_gpus
from clusterddp.system.gpu_lease import ENDING_S, busy_gpus, spell_busy
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.program import Trial
    from clusterddp.planning.slurm import SlurmPlan
    from clusterddp.planning.ssh import SshPlan
    from clusterddp.spec.model import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where and on which devices the ranks run."""

    nodes: tuple[Node, ...]
    threads_per_rank: int | None
    backend: Literal["gloo", "nccl"]
    on_cpu: bool
    """True: no rank has a GPU."""
    interface: str | None
    """None: each node chooses its own at the start."""
    notes: tuple[str, ...]
    slurm: SlurmPlan | None = None
    """The job, for the slurm launcher."""
    ssh: SshPlan | None = None
    """The hosts, for the ssh launcher."""

    @classmethod
    def elsewhere(cls, job: JobSpec, nodes: tuple[Node, ...], *, gpus: bool, notes: tuple[str, ...]) -> Placement:
        """Return the placement on machines whose cores and interfaces this one does not know.

        Raises: PreflightError: the spec asks for nccl and for no GPUs.
        """
        if job.network.backend == "nccl" and not gpus:
            raise PreflightError(
                f"{job.name}: network.backend nccl needs GPUs, and none are asked for",
                hint="resources.gpus_per_node, or gpus of a host, asks for them; network.backend=auto takes gloo",
            )
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
    queued: bool = False
    """True: the run waits for its GPUs, so they may be in use now."""
    trial: Trial | None = None
    """What the ranks execute in place of the entry."""
    hold: Plan | None = None
    """The plan of the hold that it is started in."""
    run: str | None = None
    """The run's name; None: one that is free is chosen."""
    placed: Placement | None = None
    """Where the ranks run, if that is decided already; None: the launcher of the spec places them."""
    keeps_hosts: bool = False
    """True: a run goes on where its checkpoints are, also on a host that is marked."""
    python: RankPython | None = None
    """The Python of the ranks, if that is decided already."""
    submission: bytes | None = None
    """A function from Python, pickled; empty: the run has it; None: there is none, or it is that of `parent`.

    Of a batch script: its text; None: the file of the spec has it."""


_T = TypeVar("_T")
_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")
MAX_PRETENDED_NODES = 254
"""The nodes of a batch script that runs without Slurm have addresses from 127.0.0.1."""
_CROWD = 4
"""More ranks than this per core are worth a note."""
CPU_HINT = "--cpu starts the same ranks on the CPU with gloo; or submit it to Slurm"


class GpusInUseError(PreflightError):
    """Too few of the GPUs are free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine offers."""

    host: str
    num_cores: int
    """Cores that this process may use; a container may have fewer than the machine."""
    gpus: tuple[str, ...]
    interfaces: tuple[str, ...]
    loopback: str
    busy: Mapping[str, str] = field(default_factory=dict)
    """Those of `gpus` that are in use -> a text that names the user."""
    cards: Mapping[str, str] = field(default_factory=dict)
    """Those of `gpus` that are slices (MIG) -> the GPU that they belong to."""

    def idle(self) -> Machine:
        """Return the machine with all of its GPUs free."""
        return dataclasses.replace(self, busy={})


def read_machine(environ: Mapping[str, str], hold: str | None = None) -> Machine:
    """Read what this machine offers to a process with this environment, in a hold those GPUs that it has.

    GPUs that CUDA_VISIBLE_DEVICES names are busy only if another run leases them; other programs on them do not count.
    """
    listed = list_gpus(environ)
    gpus = visible_gpus(environ, listed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        host=socket.gethostname(),
        num_cores=cores,
        gpus=gpus,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        loopback=loopback_interface(),
        cards={name: gpu.uuid for gpu in listed for name in gpu.slices if name in gpus},
        busy=busy_gpus(environ, gpus=gpus, listed=listed, foreign="CUDA_VISIBLE_DEVICES" not in environ, hold=hold),
    )


def place_here(place: Callable[[Machine], _T], environ: Mapping[str, str], *, hold: str | None = None) -> _T:
    """Call `place` with this machine, or with what a hold has; while too few GPUs are free, retry for 3 s.

    Runs may end meanwhile.
    """
    deadline = time.monotonic() + ENDING_S
    while True:
        try:
            return place(read_machine(environ, hold))
        except GpusInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def place_local(job: JobSpec, request: Request) -> Placement:
    """Place the ranks on this machine; for a queued run all GPUs count as free.

    Raises: PreflightError: see `plan_placement`. UsageError: the path of the runs directory has a tag of submitit.
    """
    if tag := next((tag for tag in _SUBMITIT_TAGS if tag in str(request.runs_dir)), None):
        raise UsageError(
            f"{request.runs_dir}: submitit, which starts the run, replaces {tag} in a path by the job's id"
        )
    queued = request.queued
    notes: tuple[str, ...] = ()
    if job.entry and job.entry.batch_script:
        job, notes = _pretend_nodes(job, request.submission or b"")
    placement = place_here(
        lambda machine: plan_placement(job, machine.idle() if queued else machine),
        request.environ,
        hold=request.hold.run if request.hold else None,
    )
    if job.resources.memory_gb:
        note = "resources.memory_gb is not enforced on this machine"
        notes = (*notes, note)
    return dataclasses.replace(placement, notes=(*placement.notes, *notes))


def _pretend_nodes(job: JobSpec, script: bytes) -> tuple[JobSpec, tuple[str, ...]]:
    """Return a batch script's job with the GPUs of all nodes that it asks Slurm for, and what differs here."""
    unknown: list[str] = []
    given = options_of(script, job.slurm, unknown)
    sizes = read_sizes(given, lambda *_: None)
    if sizes.nodes > MAX_PRETENDED_NODES:
        raise UsageError(
            f"{job.name} asks for {sizes.nodes} nodes; without Slurm there are at most {MAX_PRETENDED_NODES}",
            hint="slurm.nodes=2 asks for two",
        )
    gpus = sizes.nodes * (sizes.gpus_per_node or 0)
    size = f"{format_count(sizes.nodes, 'node')} with {format_count(sizes.tasks_per_node, 'task')}"
    note = (
        f"without Slurm: {size}{'' if sizes.nodes == 1 else ' on each'}, as processes of this machine; the names of "
        f"nodes are 127.0.0.1 and so on, and `hostname` prints {socket.gethostname()}"
    )
    resources = job.resources.model_copy(update={"gpus_per_node": gpus})
    notes = (
        note,
        *(f"{line}: has an option that is not known to be sbatch's: Slurm may refuse it" for line in unknown),
    )
    return job.model_copy(update={"resources": resources}), notes


def plan_placement(job: JobSpec, machine: Machine) -> Placement:
    """Place all nodes of the spec on one machine, each with its own GPUs."""
    per_node = job.resources.ranks_per_node
    gpus_per_node, device_notes = _gpus_per_node(job, machine)
    num_nodes = job.resources.nodes
    gpus = free_gpus(job.name, (num_nodes + job.num_spares) * gpus_per_node, machine)
    backend = _backend(job, gpus_per_node, len(machine.gpus))
    if backend == "nccl" and job.resources.world_size > 1:
        _refuse_shared_cards(job.name, gpus, machine)
    threads, thread_notes = _threads_per_rank(job, machine)
    nodes = tuple(
        Node(
            node_rank=node_rank,
            host=machine.host,
            ranks=tuple(range(node_rank * per_node, (node_rank + 1) * per_node)) if node_rank < num_nodes else (),
            spare=0 if node_rank < num_nodes else per_node,
            gpus=gpus[node_rank * gpus_per_node : (node_rank + 1) * gpus_per_node],
        )
        for node_rank in range(num_nodes + job.num_spares)
    )
    return Placement(
        nodes=nodes,
        threads_per_rank=threads,
        backend=backend,
        on_cpu=not gpus_per_node,
        interface=_interface(job, machine),
        notes=(*device_notes, *thread_notes),
    )


def assign_gpus(name: str, nodes: tuple[Node, ...], machine: Machine) -> tuple[Node, ...]:
    """Assign the GPUs of now to planned nodes; they keep their GPUs if those are free."""
    wanted: Sequence[str] = [gpu for node in nodes for gpu in node.gpus]
    if not set(wanted) <= set(machine.gpus) - set(machine.busy):
        if len(wanted) > len(machine.gpus):
            raise PreflightError(
                f"{name} runs on {len(wanted)} GPUs; this machine shows {len(machine.gpus)}",
                hint=f"clusterddp submit {name} --cpu starts it on the CPU",
            )
        wanted = free_gpus(name, len(wanted), machine)
    free = iter(wanted)
    return tuple(
        Node(
            node_rank=node.node_rank,
            host=machine.host,
            ranks=node.ranks,
            spare=node.spare,
            gpus=tuple(next(free) for _ in node.gpus),
        )
        for node in nodes
    )


def _gpus_per_node(job: JobSpec, machine: Machine) -> tuple[int, list[str]]:
    """Decide how many GPUs each node gets; 0 means that the run stays on the CPU.

    A spec with gpus_per_node or device cuda requires GPUs. A spec with neither uses GPUs if there are enough.
    """
    resources = job.resources
    if job.device == "cpu" or resources.gpus_per_node == 0:
        return 0, []
    wanted = resources.gpus_per_node or resources.ranks_per_node
    total = (resources.nodes + job.num_spares) * wanted
    if total <= len(machine.gpus):
        return wanted, []
    if job.device == "auto" and resources.gpus_per_node is None:
        few = f"{format_count(total, 'rank')} on the CPU: this machine shows {format_count(len(machine.gpus), 'GPU')}"
        return 0, [few] if machine.gpus else []
    nodes = format_count(resources.nodes + job.num_spares, "node")
    asked = f"{nodes} x {format_count(wanted, 'GPU')} = {format_count(total, 'GPU')}"
    raise PreflightError(
        f"{job.name} asks for {asked} on one machine; this machine shows {len(machine.gpus)}",
        hint=CPU_HINT,
    )


def free_gpus(name: str, wanted: int, machine: Machine) -> tuple[str, ...]:
    """Choose free GPUs."""
    free = tuple(gpu for gpu in machine.gpus if gpu not in machine.busy)
    if len(free) < wanted:
        raise GpusInUseError(
            f"{name} needs {format_count(wanted, 'GPU')}, and {len(free)} of {len(machine.gpus)} on this machine "
            f"{'is' if len(free) == 1 else 'are'} free: {spell_busy(machine.busy)}",
            hint=f"submit it when they are free; {CPU_HINT}",
        )
    seen: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for gpu in free:  # slices of different GPUs first
        turns[gpu] = seen[machine.cards.get(gpu, gpu)]
        seen[machine.cards.get(gpu, gpu)] += 1
    return tuple(sorted(free, key=turns.__getitem__))[:wanted]


def _refuse_shared_cards(name: str, gpus: Sequence[str], machine: Machine) -> None:
    """Refuse several slices of one GPU to ranks with NCCL, which allows one rank on each GPU."""
    first: dict[str, str] = {}
    for gpu in gpus:
        other = first.setdefault(machine.cards.get(gpu, gpu), gpu)
        if other != gpu:
            raise PreflightError(
                f"{name}: {other} and {gpu} are slices of one GPU, and NCCL allows one rank on each GPU",
                hint="network.backend=gloo works on slices too; resources.gpus_per_node=1 takes one",
            )


def _threads_per_rank(job: JobSpec, machine: Machine) -> tuple[int, list[str]]:
    """Distribute the cores: more threads than cores make every rank slower."""
    world_size = job.resources.world_size
    share = max(1, machine.num_cores // world_size)
    asked = job.resources.cpus_per_task
    ranks, cores = format_count(world_size, "rank"), format_count(machine.num_cores, "core")
    if asked is None or asked <= share:
        crowded = world_size > _CROWD * machine.num_cores
        return asked or share, [f"{ranks} share {cores} here: each step waits for all of them"] if crowded else []
    return share, [
        f"resources.cpus_per_task is {asked}, and {ranks} share {cores} here: {format_count(share, 'thread')} each"
    ]


def _backend(job: JobSpec, gpus_per_node: int, num_visible: int) -> Literal["gloo", "nccl"]:
    if job.network.backend == "gloo" or (job.network.backend == "auto" and not gpus_per_node):
        return "gloo"
    if not gpus_per_node:
        raise PreflightError(
            f"{job.name}: network.backend nccl needs GPUs; this machine shows {num_visible} for "
            f"{format_count(job.resources.world_size, 'rank')}",
            hint="network.backend=auto takes gloo on the CPU",
        )
    return "nccl"


def _interface(job: JobSpec, machine: Machine) -> str:
    """Choose the interface: all nodes are on this machine, so loopback, unless the spec names another one."""
    if job.network.interface == "auto":
        return machine.loopback
    if job.network.interface not in machine.interfaces:
        raise PreflightError(
            f"network.interface {job.network.interface}: this machine has {', '.join(machine.interfaces)}",
            hint="network.interface=auto takes the loopback when all nodes are on one machine",
        )
    return job.network.interface

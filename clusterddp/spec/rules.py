"""The rules between the keys of a spec: they find values that are valid by themselves and conflict."""

from __future__ import annotations

from collections.abc import Iterator

from clusterddp.spec.entry_section import entry_conflicts
from clusterddp.spec.model import JobSpec
from clusterddp.spec.notify_section import notify_conflicts
from clusterddp.spec.section import MAX_RANKS, Conflict
from clusterddp.spec.slurm_options import GPU_OPTIONS, MEMORY_OPTIONS, asks_for_gpus, option_problem
from clusterddp.spec.ssh_section import ssh_conflicts
from clusterddp.spec.train_section import train_conflicts
from clusterddp.system.timeouts import HOST_SILENCE_S


def conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find the values of `job` that conflict."""
    if job.train is not None and job.entry is not None:
        yield Conflict(
            keys=("entry", "train"),
            message="a spec has either train or entry, this one has both",
            hint="~train or ~entry on the command line drops one of them",
        )
    if job.entry is not None:
        yield from entry_conflicts(job.entry)
    if job.train is not None:
        yield from train_conflicts(job.train, job)
    yield from _start_conflicts(job)
    yield from _size_conflicts(job)
    yield from _network_conflicts(job)
    yield from _device_conflicts(job)
    yield from _name_conflicts(job)
    yield from _slurm_conflicts(job)
    yield from ssh_conflicts(job)
    yield from notify_conflicts(job)


def _start_conflicts(job: JobSpec) -> Iterator[Conflict]:
    if job.start == "torchrun" and job.entry is not None and job.entry.owns_ranks:
        yield Conflict(
            keys=("start", "entry.owns_ranks"),
            message="torchrun starts the ranks, and so does a program that owns its ranks",
            hint="~start, or entry.owns_ranks=false",
        )


def _size_conflicts(job: JobSpec) -> Iterator[Conflict]:
    resources = job.resources
    if resources.world_size > MAX_RANKS and job.launcher != "ssh":  # of ssh, see ssh_section
        yield Conflict(
            keys=("resources.nodes", "resources.procs_per_node", "resources.gpus_per_node"),
            message=f"{resources.nodes} nodes x {resources.ranks_per_node} = {resources.world_size} ranks, "
            f"expected at most {MAX_RANKS}",
        )
    gpus = resources.gpus_per_node
    if gpus and job.device != "cpu" and resources.ranks_per_node > gpus:
        yield Conflict(
            keys=("resources.procs_per_node", "resources.gpus_per_node"),
            message=f"{resources.ranks_per_node} ranks on each node share {gpus} GPUs, expected one rank per GPU",
            hint="leave procs_per_node out: it follows gpus_per_node",
        )


def _network_conflicts(job: JobSpec) -> Iterator[Conflict]:
    if job.network.init == "file" and job.launcher == "ssh" and job.resources.nodes > 1:
        yield Conflict(
            keys=("network.init", "launcher"),
            message="file needs a directory that all ranks share, and hosts over SSH share none",
            hint="init: tcp, or env",
        )
    silence, heartbeat = job.network.host_silence, job.network.heartbeat_timeout
    silence_s = silence.seconds if silence else HOST_SILENCE_S
    if heartbeat and heartbeat.seconds < silence_s:
        yield Conflict(
            keys=("network.heartbeat_timeout", "network.host_silence"),
            message=f"a heartbeat timeout of {heartbeat.seconds} s is shorter than host_silence, {silence_s:g} s; "
            "expected at least as much",
            hint="a host that does not answer sends no heartbeats: lower network.host_silence, too",
        )


def _device_conflicts(job: JobSpec) -> Iterator[Conflict]:
    if job.device == "cuda" and job.resources.gpus_per_node == 0:
        yield Conflict(
            keys=("resources.gpus_per_node", "device"), message="device cuda needs GPUs, found 0 on each node"
        )
    if job.network.backend == "nccl" and job.cpu_reason:
        yield Conflict(
            keys=("network.backend", "device", "resources.gpus_per_node"),
            message=f"nccl needs GPUs, and {job.cpu_reason}",
            hint="gloo works on the CPU; auto chooses it there",
        )


def _name_conflicts(job: JobSpec) -> Iterator[Conflict]:
    for index, name in enumerate(job.secrets):
        if name in job.env:
            yield Conflict(keys=(f"env.{name}",), message="is also under secrets; a secret has no value in the spec")
        if name in job.secrets[:index]:
            yield Conflict(keys=(f"secrets.{index}",), message=f"{name} is named twice")


def _slurm_conflicts(job: JobSpec) -> Iterator[Conflict]:
    options = job.slurm
    for name, value in options.items():
        problem = option_problem(name, value)
        if problem:
            yield Conflict(keys=(f"slurm.{name}",), message=problem[0], hint=problem[1])
    memory = [name for name in options if name in MEMORY_OPTIONS and options[name]]
    if memory and job.resources.memory_gb is not None:
        yield Conflict(
            keys=(f"slurm.{memory[0]}", "resources.memory_gb"),
            message="resources.memory_gb asks for memory too, expected one of them",
        )
    gpus = [name for name in options if name in GPU_OPTIONS and options[name]]
    if gpus and job.cpu_reason and asks_for_gpus(options):
        yield Conflict(keys=(f"slurm.{gpus[0]}", "device"), message=f"asks for GPUs, and {job.cpu_reason}")
    if options.get("dependency") and job.after:
        yield Conflict(keys=("slurm.dependency", "after"), message="after sets it, expected one of them")

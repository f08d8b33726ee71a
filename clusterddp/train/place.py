"""Where a rank stands among the ranks, and the device it computes on; why torch finds none where one is to be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from clusterddp.errors import ClusterddpError
from clusterddp.facts.torch import INSTALL_CUDA, explain_old_driver
from clusterddp.ranks.entry_environment import INIT_METHOD
from clusterddp.ranks.environment import DEVICE, GPU
from clusterddp.system.devices import read_driver, visible_gpus

_ONE_EACH = "ask for at most one rank per GPU, or run on the CPU with --cpu"
_SLICED = "CUDA shows a process one slice (MIG): name each rank its own in CUDA_VISIBLE_DEVICES, as submit does"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among the ranks, as torchrun's variables tell it."""

    rank: int
    local_rank: int
    world_size: int
    backend: str
    """What carries gradients: nccl or gloo."""
    device: str | None = None
    """What this rank computes on: cuda or cpu, as gloo carries gradients of GPUs, too; None: a GPU for nccl alone."""
    on_one_host: bool = False
    """True when whoever started the ranks says that all of them are on this host."""
    init_method: str = "env://"
    """Where the ranks meet."""
    gpu: int | None = None
    """Which of the GPUs that this process sees is its own; None: the one that its local rank counts to."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        """Read the variables; without them the process is the only rank."""
        backend = environ.get("CLUSTERDDP_BACKEND") or ("nccl" if torch.cuda.is_available() else "gloo")
        return cls(
            rank=int(environ.get("RANK", "0")),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            backend=backend,
            device=environ.get(DEVICE),
            on_one_host=environ.get("LOCAL_WORLD_SIZE", "0") == environ.get("WORLD_SIZE", "1"),
            init_method=environ.get(INIT_METHOD, "env://"),
            gpu=int(environ[GPU]) if environ.get(GPU) else None,
        )


def choose_device(place: Place) -> torch.device:
    """Choose what a rank computes on.

    Raises: ClusterddpError: it is to have a GPU, and has none of its own.
    """
    if (place.device or ("cuda" if place.backend == "nccl" else "cpu")) == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    index = place.local_rank if place.gpu is None else place.gpu
    if not gpus:
        raise _no_gpu(place)
    if index >= gpus:
        which = f"rank {place.rank} is number {place.local_rank} on its node"
        shown = visible_gpus(os.environ, listed=())
        raise ClusterddpError(
            f"{which}, which shows it {gpus} GPU{'' if gpus == 1 else 's'}",
            hint=_SLICED if shown and shown[0].startswith("MIG-") else _ONE_EACH,
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _no_gpu(place: Place) -> ClusterddpError:
    """Say why torch finds no GPU on a host that is to have some."""
    wants, build = f"rank {place.rank} is to compute on a GPU, and", f"torch {torch.__version__}"
    cpu = "--cpu runs the same ranks on the CPU"
    if torch.version.cuda is None and torch.version.hip is None:
        return ClusterddpError(f"{wants} {build} is built for the CPU", hint=f"{INSTALL_CUDA}; {cpu}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not visible_gpus(os.environ):
        return ClusterddpError(f"{wants} finds none: CUDA_VISIBLE_DEVICES is {hidden!r}", hint=cpu)
    driver = read_driver(os.environ)
    if driver is None:
        return ClusterddpError(f"{wants} finds none: nvidia-smi shows no driver on this host", hint=cpu)
    trouble = explain_old_driver(str(torch.version.cuda), driver)
    if trouble is None:
        return ClusterddpError(f"{wants} finds none: {build}, driver {driver}", hint=f"nvidia-smi -L there; {cpu}")
    found, fix = trouble
    return ClusterddpError(f"{wants} finds none: {build} is for CUDA {torch.version.cuda}, {found}", hint=fix)

"""A rank's variables, the device it computes on, and why torch finds no GPU where one is expected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from clusterddp.errors import ClusterddpError
from clusterddp.facts.torch import INSTALL_CUDA, explain_old_driver
from clusterddp.ranks.environment import DEVICE, GPU, INIT_METHOD
from clusterddp.system.devices import read_driver, visible_gpus

_ONE_EACH = "ask for at most one rank per GPU, or run on the CPU with --cpu"
_SLICED = "CUDA shows a process one slice (MIG): name each rank its own in CUDA_VISIBLE_DEVICES, as submit does"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankVariables:
    """This process's variables, named as torchrun's: its rank, its local rank, its device."""

    rank: int
    local_rank: int
    world_size: int
    backend: str
    """The backend that carries gradients: nccl or gloo."""
    device: str | None = None
    """cuda or cpu, for gloo carries gradients of GPUs, too; None: a GPU with nccl, the CPU with gloo."""
    on_one_host: bool = False
    """Whether all ranks are on this host, by LOCAL_WORLD_SIZE."""
    init_method: str = "env://"
    """The rendezvous of the ranks."""
    gpu: int | None = None
    """The index of this rank's GPU among those that the process sees; None: its local rank."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankVariables:
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


def choose_device(variables: RankVariables) -> torch.device:
    """Choose the device of a rank."""
    if (variables.device or ("cuda" if variables.backend == "nccl" else "cpu")) == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    index = variables.local_rank if variables.gpu is None else variables.gpu
    if not gpus:
        raise _no_gpu(variables)
    if index >= gpus:
        which = f"rank {variables.rank} is number {variables.local_rank} on its node"
        shown = visible_gpus(os.environ, listed=())
        raise ClusterddpError(
            f"{which}, which shows it {gpus} GPU{'' if gpus == 1 else 's'}",
            hint=_SLICED if shown and shown[0].startswith("MIG-") else _ONE_EACH,
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def cpu_bf16_units() -> tuple[bool, bool]:
    """Return whether this CPU has avx512_bf16, and whether it has AMX.

    torch's names for these are private (2.10 to 2.13); where they are gone, the answer is no. So it is on a CPU of
    another make.
    """
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    has_avx512_bf16, has_amx = (bool(getattr(torch.cpu, name, lambda: False)()) for name in names)
    return has_avx512_bf16, has_amx


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _no_gpu(variables: RankVariables) -> ClusterddpError:
    """Explain why torch finds no GPU on a host that should have some."""
    wants, build = f"rank {variables.rank} is to compute on a GPU, and", f"torch {torch.__version__}"
    cpu = "--cpu runs the same ranks on the CPU"
    if torch.version.cuda is None and torch.version.hip is None:
        return ClusterddpError(f"{wants} {build} is built for the CPU", hint=f"{INSTALL_CUDA}; {cpu}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not visible_gpus(os.environ):
        return ClusterddpError(f"{wants} finds none: CUDA_VISIBLE_DEVICES is {hidden!r}", hint=cpu)
    driver = read_driver(os.environ)
    if driver is None:
        return ClusterddpError(f"{wants} finds none: nvidia-smi shows no driver on this host", hint=cpu)
    outdated = explain_old_driver(str(torch.version.cuda), driver)
    if outdated is None:
        return ClusterddpError(f"{wants} finds none: {build}, driver {driver}", hint=f"nvidia-smi -L there; {cpu}")
    found, fix = outdated
    return ClusterddpError(f"{wants} finds none: {build} is for CUDA {torch.version.cuda}, {found}", hint=fix)

"""The devices of this host, found without torch: the GPUs that ranks may use, the loopback interface."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NVIDIA_SMI_TIMEOUT_S = 20.0
"""Without the persistence daemon nvidia-smi wakes every GPU first, which takes seconds on a full machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: str
    model: str
    uuid: str
    slices: tuple[str, ...] = ()
    """The UUIDs of its MIG slices; if it has any, they are the devices, not the GPU."""


def visible_gpus(environ: Mapping[str, str], listed: Sequence[Gpu] | None = None) -> tuple[str, ...]:
    """List the GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    If CUDA_VISIBLE_DEVICES is set, its indices or UUIDs are returned unchecked; as in CUDA, they end at the first empty
    or negative entry. Otherwise the GPUs are `listed`, by default those that `list_gpus` finds now.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return _named_gpus(named)
    gpus = list_gpus(environ) if listed is None else listed
    # By default CUDA counts the fastest GPU first and nvidia-smi does not, so indices of mixed models are ambiguous.
    alike = len({gpu.model for gpu in gpus}) == 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return tuple(name for gpu in gpus for name in gpu.slices or (gpu.index if alike else gpu.uuid,))


def list_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """List all GPUs of this host; none if nvidia-smi is missing or fails."""
    return _parse_listing(ask_nvidia_smi(environ, "-L"))


def ask_nvidia_smi(environ: Mapping[str, str], *arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it is missing or fails."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_driver(environ: Mapping[str, str]) -> str | None:
    """Return the version of NVIDIA's driver on this host; None if there is none."""
    answer = ask_nvidia_smi(environ, "--query-gpu=driver_version", "--format=csv,noheader")
    return next(iter(answer.split()), None)


def loopback_interface() -> str:
    """Return the name of the loopback interface: `lo` on Linux, `lo0` on the BSDs and macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _named_gpus(named: str) -> tuple[str, ...]:
    gpus: list[str] = []
    for entry in named.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        gpus.append(name)
    return tuple(gpus)


def _parse_listing(listing: str) -> tuple[Gpu, ...]:
    """Parse the output of `nvidia-smi -L`."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+): (.*?)\s*(?:\(UUID:\s*([^)\s]+)\))?\s*$", line):
            gpus.append(Gpu(index=gpu[1], model=gpu[2], uuid=gpu[3] or gpu[1]))
        elif gpus and (mig := re.search(r"MIG .*\(UUID:\s*(MIG-[^)\s]+)\)", line)):
            gpus[-1] = dataclasses.replace(gpus[-1], slices=(*gpus[-1].slices, mig[1]))
    return tuple(gpus)

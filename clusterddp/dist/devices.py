"""The devices of this host, found without torch: which GPUs ranks may use, which interface is the loopback."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

_NVIDIA_SMI_TIMEOUT_S = 20.0
"""Without the persistence daemon nvidia-smi wakes every GPU first, which takes seconds on a full machine."""


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES would name them.

    CUDA_VISIBLE_DEVICES is taken at its word: indices or UUIDs; as CUDA does, the list ends at the first empty or
    negative entry. Without it `nvidia-smi -L` is asked; no nvidia-smi, or one that fails, means no GPU.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return _named_gpus(named)
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ()
    try:
        listing = subprocess.run(
            [command, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _listed_gpus(listing.stdout) if listing.returncode == 0 else ()


def loopback_interface() -> str:
    """Name the loopback interface: `lo` on Linux, `lo0` on the BSDs and macOS."""
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


def _listed_gpus(listing: str) -> tuple[str, ...]:
    """Read `nvidia-smi -L`; a GPU that is cut into MIG slices is no device itself, its slices are."""
    gpus: list[str] = []
    slices: dict[str, list[str]] = {}
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            gpus.append(gpu[1])
        elif gpus and (mig := re.search(r"MIG .*\(UUID:\s*(MIG-[^)\s]+)\)", line)):
            slices.setdefault(gpus[-1], []).append(mig[1])
    return tuple(name for gpu in gpus for name in slices.get(gpu, [gpu]))

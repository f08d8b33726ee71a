"""Says whether a data set fits where it has to lie, before it is brought there."""

from __future__ import annotations

from pathlib import Path

import torch

from clusterddp.errors import ClusterddpError

_MEMINFO = Path("/proc/meminfo")


def demand_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise ClusterddpError, with both numbers, if `device` has less than `num_bytes` left for `what`."""
    free = read_free_bytes(device)
    if free is not None and num_bytes > free:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this host"
        raise ClusterddpError(
            f"{what} take {in_gib(num_bytes)} as a whole set on the device, and {where} has {in_gib(free)} left",
            hint="lower train.image_size, or take fewer images",
        )


def read_free_bytes(device: torch.device) -> int | None:
    """Return how much memory the device, or for the CPU this host, has left; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    return int(lines["MemAvailable"].split()[0]) * 1024


def in_gib(num_bytes: int) -> str:
    """Write bytes as people read them: 1.5 GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"

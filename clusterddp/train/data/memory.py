"""Says whether a data set fits where it has to lie, before it is brought there."""

from __future__ import annotations

import torch

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import free_bytes
from clusterddp.system.byte_sizes import format_bytes


def demand_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise ClusterddpError, with both numbers, if `device` has less than `num_bytes` left for `what`."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if free is not None and num_bytes > free:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this host"
        raise ClusterddpError(
            f"{what} take {format_bytes(num_bytes)} as a whole set on the device, and {where} has "
            f"{format_bytes(free)} left",
            hint="lower train.image_size, or take fewer images",
        )

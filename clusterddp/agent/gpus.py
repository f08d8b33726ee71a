"""The GPUs of this host: which processes use them, and leases on free ones for a run."""

from __future__ import annotations

import itertools
import time
from typing import Any

from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.system.devices import list_gpus, visible_gpus
from clusterddp.system.gpu_lease import ENDING_S, busy_gpus, take_leases

_PAUSE_S = 0.2


def look(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return `gpus`, `because` (why there are no more), and `busy`: GPU -> its user."""
    environ = inherited_environment()
    listed = list_gpus(environ)
    gpus = visible_gpus(environ, listed)
    named = environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if named is None else f" (CUDA_VISIBLE_DEVICES is {named!r} there)"
    return {"gpus": gpus, "because": because, "busy": busy_gpus(environ, gpus=gpus, listed=listed)}


def lease(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Lease free GPUs for the nodes of `run` on this host, `counts` of them; all or none.

    The answer has for each node `gpus`, for CUDA_VISIBLE_DEVICES, and `hold`, the descriptors for its supervisor. When
    too few are free for some seconds, `gpus` is null, and `busy` maps GPUs to their users. The agent holds the leases
    until it ends.

    Raises: ClusterddpError: the host does not have so many.
    """
    environ = inherited_environment()
    listed = list_gpus(environ)
    gpus = visible_gpus(environ, listed)
    count = sum(request["counts"])
    if len(gpus) < count:
        raise ClusterddpError(f"{count} GPUs are asked for, and there are {len(gpus)}")
    deadline = time.monotonic() + ENDING_S
    while True:
        busy = busy_gpus(environ, gpus=gpus, listed=listed)
        free = [gpu for gpu in gpus if gpu not in busy]
        if len(free) >= count:
            left = iter(free)
            parts = [list(itertools.islice(left, wanted)) for wanted in request["counts"]]
            leases = [take_leases(part, str(request["run"]), listed) for part in parts]
            taken = [each for each in leases if each is not None]
            if len(taken) == len(parts):
                return {"gpus": parts, "hold": [host.hold(each).descriptors for each in taken], "busy": {}}
            for each in taken:
                each.close()
        if time.monotonic() > deadline:
            return {"gpus": None, "hold": [], "busy": busy}
        time.sleep(_PAUSE_S)


OPERATIONS: dict[str, Operation] = {"gpus.look": look, "gpus.lease": lease}

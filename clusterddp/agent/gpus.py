"""The GPUs of this host: which processes use them, leases on free ones for a run, and the queue for them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.system.devices import Gpu, list_gpus, visible_gpus
from clusterddp.system.gpu_lease import Lease, Line, busy_gpus, take_leases

WAITER_PATIENCE_S = 60
"""A launcher in the queue that sends no request for so long loses its place."""
_FRESH_S = 20.0
"""How long the answer of nvidia-smi is used; the kernel grants each lease once."""
_TRIES = 5
"""How often another run may take a GPU between the look and the lease."""


class HostGpus:
    """The GPUs of this host, and the leases that this agent holds for its launcher."""

    def __init__(self) -> None:
        self.environ: Mapping[str, str] = inherited_environment()
        self.listed: Sequence[Gpu] = list_gpus(self.environ)
        self.gpus = visible_gpus(self.environ, self.listed)
        self.leases: list[Lease] = []
        self.line: Line | None = None
        self._usual_patience_s: int | None = None
        self._seen: dict[str, str] = {}
        self._seen_at = -math.inf

    def look(self) -> dict[str, str]:
        """Return the users of the GPUs that are in use; a `take` soon afterwards relies on it."""
        self._seen = busy_gpus(self.environ, gpus=self.gpus, listed=self.listed)
        self._seen_at = time.monotonic()
        return self._seen

    def take(self, count: int, run: str) -> tuple[list[str] | None, dict[str, str]]:
        """Lease free GPUs; None when too few are free, with the users of the others."""
        busy: dict[str, str] = {}
        for _ in range(_TRIES):
            busy = self._seen if time.monotonic() - self._seen_at < _FRESH_S else self.look()
            self._seen_at = -math.inf
            free = [gpu for gpu in self.gpus if gpu not in busy]
            if len(free) < count:
                break
            lease = take_leases(free[:count], run, self.listed)
            if lease is not None:
                self.leases.append(lease)
                return free[:count], {}
        return None, busy

    def join_queue(self, host: Host, run: str) -> list[str]:
        """Return the runs ahead in the queue; the first call takes a place, which lasts while requests come."""
        if self.line is None:
            self.line = Line(run)
            self._usual_patience_s, host.patience_s = host.patience_s, WAITER_PATIENCE_S
        return [str(holder) for holder in self.line.ahead()]

    def leave_queue(self, host: Host) -> None:
        if self.line is not None and self._usual_patience_s is not None:
            self.line.close()
            self.line, host.patience_s = None, self._usual_patience_s

    def close(self) -> None:
        """Close all leases; those that supervisors have inherited stay held."""
        for lease in self.leases:
            lease.close()
        self.leases.clear()
        if self.line is not None:
            self.line.close()


def look(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return `gpus`, `because` (why there are no more), and `busy`: GPU -> its user."""
    own = _own_gpus(host)
    named = own.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if named is None else f" (CUDA_VISIBLE_DEVICES is {named!r} there)"
    return {"gpus": own.gpus, "because": because, "busy": own.look()}


def lease(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Lease `count` free GPUs for `run`, or return their users; all or none.

    The answer has `gpus`, for CUDA_VISIBLE_DEVICES, and `hold`, the descriptors for the supervisor. When too few
    are free, `gpus` is null, and `busy` maps GPUs to their users. With `when_busy` "wait" the run has a place in the
    queue, `ahead` lists the runs before it, and its launcher asks again; without, the queue is ignored.

    Raises: ClusterddpError: the host does not have so many.
    """
    own, count, run = _own_gpus(host), int(request["count"]), str(request["run"])
    if len(own.gpus) < count:
        raise ClusterddpError(f"{count} GPUs are asked for, and there are {len(own.gpus)}")
    ahead = own.join_queue(host, run) if request["when_busy"] == "wait" else []
    gpus, busy = (None, {}) if ahead else own.take(count, run)
    hold = own.leases[-1].descriptors if gpus else ()
    return {"gpus": gpus, "hold": hold, "busy": busy, "ahead": ahead}


def leave_queue(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Give up the place in the queue; leases stay."""
    for own in host.find_held(HostGpus):
        own.leave_queue(host)
    return {}


def release(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Close the leases: the supervisors hold them, or the start was given up."""
    for own in host.find_held(HostGpus):
        own.leave_queue(host)
        host.release(own)
    return {}


OPERATIONS: dict[str, Operation] = {
    "gpus.look": look,
    "gpus.lease": lease,
    "gpus.leave_line": leave_queue,
    "gpus.let_go": release,
}


def _own_gpus(host: Host) -> HostGpus:
    return next(iter(host.find_held(HostGpus)), None) or host.hold(HostGpus())

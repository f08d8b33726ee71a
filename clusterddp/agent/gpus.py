"""The GPUs of this host: who uses them, leases on free ones for a run, and the line of those that wait."""

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
"""How long who waits in line may be silent before it loses its place."""
_FRESH_S = 20.0
"""How long we rely on what nvidia-smi has said; leases are settled by the kernel."""
_TRIES = 5
"""How often others may take what was free a moment before."""


class Desk:
    """What one agent knows of the GPUs, and holds for its launcher."""

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
        """Ask who uses which GPU; a `take` soon afterwards relies on it."""
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

    def stand_in_line(self, host: Host, run: str) -> list[str]:
        """Return who waits before us; from the first call on we have a place, for as long as we keep asking."""
        if self.line is None:
            self.line = Line(run)
            self._usual_patience_s, host.patience_s = host.patience_s, WAITER_PATIENCE_S
        return [str(holder) for holder in self.line.ahead()]

    def leave_line(self, host: Host) -> None:
        if self.line is not None and self._usual_patience_s is not None:
            self.line.close()
            self.line, host.patience_s = None, self._usual_patience_s

    def close(self) -> None:
        """Let everything go; supervisors that have inherited leases hold them on."""
        for lease in self.leases:
            lease.close()
        self.leases.clear()
        if self.line is not None:
            self.line.close()


def look(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Say which GPUs there are (`gpus`, in words why no more: `because`), who uses which (`busy`: GPU -> words)."""
    desk = _desk(host)
    named = desk.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if named is None else f" (CUDA_VISIBLE_DEVICES is {named!r} there)"
    return {"gpus": desk.gpus, "because": because, "busy": desk.look()}


def lease(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Lease `count` free GPUs for `run`, or say who has them; all or none.

    The answer has `gpus`, for CUDA_VISIBLE_DEVICES, and `hold`, the descriptors for the supervisor's order. When they
    cannot be had, `gpus` is null, and `busy` (GPU -> words) says why. With `when_busy` "wait" the run then has a place
    in the line, `ahead` says who stands before it, and its launcher asks again; without, it takes what is free at once.
    Raises: ClusterddpError: the host does not have so many.
    """
    desk, count, run = _desk(host), int(request["count"]), str(request["run"])
    if len(desk.gpus) < count:
        raise ClusterddpError(f"{count} GPUs are asked for, and there are {len(desk.gpus)}")
    ahead = desk.stand_in_line(host, run) if request["when_busy"] == "wait" else []
    gpus, busy = (None, {}) if ahead else desk.take(count, run)
    hold = desk.leases[-1].descriptors if gpus else ()
    return {"gpus": gpus, "hold": hold, "busy": busy, "ahead": ahead}


def leave_line(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Give up the place in the line; leases stay."""
    for desk in _desks(host):
        desk.leave_line(host)
    return {}


def let_go(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Hold no lease any longer, for the supervisors do, or nobody is to."""
    for desk in _desks(host):
        desk.leave_line(host)
        host.let_go(desk)
    return {}


OPERATIONS: dict[str, Operation] = {
    "gpus.look": look,
    "gpus.lease": lease,
    "gpus.leave_line": leave_line,
    "gpus.let_go": let_go,
}


def _desk(host: Host) -> Desk:
    return next(iter(_desks(host)), None) or host.hold(Desk())


def _desks(host: Host) -> list[Desk]:
    """List the desk of this agent, if there is one by now."""
    return [thing for thing in host.held if isinstance(thing, Desk)]

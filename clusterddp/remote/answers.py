"""The keys and types of an agent's answer to each request; a connection is closed when an answer has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from clusterddp.facts.machine import Machine
from clusterddp.network.choice import Outcome
from clusterddp.network.interface import Link
from clusterddp.run.leftovers import Ended, RunHere
from clusterddp.run.stored import Removed, Storage


class Part(TypedDict):
    """A piece of a file (agent/results.py)."""

    length: int
    gone: bool
    size: int
    mtime_ns: int


class Look(TypedDict):
    """A run on a host (agent/results.py)."""

    boot: str
    alive: list[str]
    has_run: bool
    end_attempt: int | None
    end: dict[str, Any] | None
    files: dict[str, tuple[int, int]] | None


class ProbeResult(TypedDict):
    """The result of a connection attempt (agent/probe.py)."""

    target: int
    address: str
    port: int
    outcome: Outcome
    detail: str
    left_from: str | None
    seen_from: str | None
    round_trip_ms: float | None


class Address(TypedDict):
    """Where the head listens for the other supervisors."""

    host: str
    port: int


HELLO: Mapping[str, Any] = {
    "hostname": str,
    "uid": int,
    "user": str,
    "home": str,
    "root": str,
    "python": str,
    "path": str,
    "version": str,
    "platform": str,
    "boot_id": str,
    "pid": int,
    "have": bool,
}
"""What the boot reports of the host (agent/boot.py)."""
ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "facts.machine": {"facts": Machine},
    "facts.clock": {"time": float},
    "gpus.look": {"gpus": list[str], "because": str, "busy": dict[str, str]},
    "gpus.lease": {"gpus": list[list[str]] | None, "hold": list[list[int]], "busy": dict[str, str]},
    "results.list": {"runs": dict[str, Look]},
    "results.read": {"parts": list[Part]},
    "net.listen": {
        "machine": str,
        "links": tuple[Link, ...],
        "own_addresses": tuple[str, ...] | None,
        "port": int,
        "master_port": int | None,
        "firewall": str | None,
    },
    "net.probe": {"probes": list[ProbeResult], "slow_names": list[str]},
    "run.ask": {"found": bool},
    "run.end": {"ended": int, "left": list[int]},
    "run.remove": {"removed": list[Removed]},
    "run.prepare": {"run_dir": str},
    "run.supervise": {"pid": int, "link": Address | None},
    "store.compare": {"place": str, "in_the_way": tuple[str, ...], "stale": tuple[str, ...], "stale_count": int},
    "store.missing": {"missing": bool},
    "table.look": {"runs": list[RunHere]},
    "table.end": {"ended": list[Ended]},
    "table.stored": {"stored": Storage},
    "table.remove": {"removed": list[Removed]},
}
"""Operation -> key -> type, for `wire.build`; the other operations answer only that they succeeded."""

"""The operations of an agent: what each receives and answers. Both ends of the connection check messages by this table.

A message is one line of JSON, `{"do": OPERATION, ...}` and its answer `{"ok": true, ...}`, with `size` bytes after it.
Keys that are missing become None, others are dropped, and a value of another type is refused (wire.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

from clusterddp.facts.machine import Machine
from clusterddp.network.choice import HostNetwork, Probe
from clusterddp.run.leftovers import Ended, RunHere
from clusterddp.run.stored import Removed, Storage


class Operation(NamedTuple):
    """The keys and types of a request, and of its answer."""

    request: Mapping[str, Any]
    answer: Mapping[str, Any]


class NamedRun(TypedDict):
    """A run on a host."""

    name: str
    """The name of its directory there."""
    token: str


class Look(TypedDict):
    """What a host answers about a run."""

    boot: str
    """The boot id of the host."""
    alive: list[str]
    """The roles of the run's processes there: `s0`, `g0`, `n0`."""
    has_run: bool
    end_attempt: int | None
    end: dict[str, Any] | None
    """The newest end that is recorded there."""
    files: dict[str, tuple[int, int]] | None
    """Path -> size, time of the last change in ns; None: as in the last answer on this connection."""


class Part(TypedDict):
    """A piece of a file of a run that is wanted."""

    path: str
    offset: int
    limit: int


class Piece(TypedDict):
    """The answer to a `Part`: how many of the bytes that follow the answer are of this file."""

    length: int
    gone: bool
    """True: it cannot be read."""
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An address to connect to, and the name that must answer there."""

    target: int
    address: str
    port: int
    name: str


class Address(TypedDict):
    """Where the head listens for the other supervisors."""

    host: str
    port: int


_Variables = dict[str, str]
_Json = dict[str, Any]
OPERATIONS: Mapping[str, Operation] = {
    # The connection: any request is a heartbeat.
    "beat": Operation({}, {"time": float}),
    # The host: its facts, GPUs and network, the live processes of all runs, and old files.
    "host.facts": Operation(
        {"data_dir": str | None, "variables": _Variables | None, "with_gpus": bool | None, "with_driver": bool | None},
        {"facts": Machine},
    ),
    "host.lease": Operation(
        {"counts": list[int], "run": str},
        {"gpus": list[list[str]] | None, "hold": list[list[int]], "busy": dict[str, str]},
    ),
    "host.listen": Operation(
        {"nonce": str | None, "name": str, "head": bool | None, "master_port": int | None},
        {"network": HostNetwork | None},
    ),
    "host.probe": Operation(
        {"nonce": str, "source": int, "targets": list[Target], "names": list[str], "within_s": float},
        {"probes": list[Probe], "slow_names": list[str]},
    ),
    "host.list": Operation(
        {"tokens": list[str] | None, "older_than_s": float | None}, {"runs": list[RunHere], "stored": Storage | None}
    ),
    "host.remove": Operation({"places": list[str], "older_than_s": float | None}, {"removed": list[Removed]}),
    # Uploads.
    "store.compare": Operation(
        {"sum": str | None, "target": str | None},
        {"missing": bool, "place": str, "in_the_way": tuple[str, ...], "stale": tuple[str, ...], "stale_count": int},
    ),
    "store.put": Operation({"sum": str | None, "target": str | None}, {}),
    # Runs: start, stop, end, and what they have written.
    "run.prepare": Operation(
        {"name": str, "attempt": int, "plan": _Json, "record": _Json, "spec": str, "code": str | None},
        {"run_dir": str},
    ),
    "run.supervise": Operation(
        {"order": _Json, "variables": _Variables, "patience_s": int}, {"pid": int, "link": Address | None}
    ),
    "run.ask": Operation(
        {"name": str, "what": Literal["stop", "stacks", "cancel", "release"], "reason": str}, {"found": bool}
    ),
    "run.end": Operation({"tokens": list[str], "patience_s": float | None}, {"ended": list[Ended]}),
    "run.look": Operation({"runs": list[NamedRun]}, {"runs": dict[str, Look]}),
    "run.read": Operation({"name": str, "parts": list[Part]}, {"parts": list[Piece]}),
}
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

"""What each request to the agent holds: one that holds anything else is refused before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class _Run(TypedDict):
    name: str
    token: str


class Seen(_Run, total=False):
    """A run, and the `sum` of the files that were listed of it before (agent/results.py)."""

    seen: str


class _Piece(TypedDict):
    path: str
    offset: int
    limit: int


class Part(_Piece, total=False):
    """A piece of a file (agent/results.py)."""

    like: list[tuple[int, int, str]]


class Target(TypedDict):
    """An address to connect to (agent/probe.py)."""

    target: int
    address: str
    port: int
    name: str


_VARIABLES = dict[str, str]
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "facts.machine": {"data_dir": str | None, "variables": _VARIABLES | None, "with_driver": bool | None},
    "gpus.lease": {"count": int, "run": str, "when_busy": str | None},
    "login.lay_out": {"at": str, "files": dict[str, str], "sum": str | None, "within": str, "git": Any},
    "results.list": {"runs": list[Seen]},
    "results.read": {"name": str, "parts": list[Part]},
    "net.listen": {"nonce": str, "name": str, "head": bool | None, "master_port": int | None},
    "net.probe": {"nonce": str, "targets": list[Target], "names": list[str], "within_s": float},
    "run.ask": {"name": str, "what": str, "reason": str},
    "run.end": {"token": str, "patience_s": float | None},
    "run.prepare": {"name": str, "attempt": int, "plan": dict[str, Any], "record": dict[str, Any], "spec": str},
    "run.release": {"token": str},
    "run.supervise": {"order": dict[str, Any], "variables": _VARIABLES, "patience_s": int},
    "store.checkout": {"sum": str, "name": str},
    "store.compare": {"target": str},
    "store.mark": {"nonce": str, "target": str | None},
    "store.missing": {"sums": list[str]},
    "store.put": {"kind": str, "sum": str | None, "target": str | None},
    "store.seen": {"nonces": list[str], "target": str | None},
    "table.end": {"tokens": list[str]},
    "table.look": {"tokens": list[str] | None},
    "table.remove": {"places": list[str], "older_than_s": float},
    "table.stored": {"older_than_s": float},
    "trial.read": {"wait_s": float},
    "trial.start": {"variables": _VARIABLES, "order": dict[str, Any]},
    "trial.send": {"message": dict[str, Any]},
}
"""Operation -> key -> type, for `wire.build`; the other operations are asked without anything."""

"""Processes of runs on this host and what old runs have left on its disk: looked at, ended, removed (ps and gc)."""

from __future__ import annotations

import dataclasses
from typing import Any

from clusterddp.agent.types import Body, Host, Operation
from clusterddp.run.leftovers import end_left_over, find_runs
from clusterddp.run.stored import find_stored, remove_stored


def look(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Tell what lives of runs here; of `tokens` only, where that is no null."""
    found = find_runs([host.root / "runs"], only=request["tokens"])
    return {"runs": [dataclasses.asdict(run) for run in found]}


def end(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """End what is left over of the runs with these tokens; a run for which somebody answers is left alone."""
    return {"ended": [dataclasses.asdict(end_left_over(token)) for token in request["tokens"]]}


def stored(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Tell which directories of ended runs, snapshots and packages are so old and needed by nothing."""
    found = find_stored(host.root, older_than_s=request["older_than_s"], in_use=[host.package.name])
    return {"stored": dataclasses.asdict(found)}


def remove(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Remove those of `places` of which the same is still true."""
    removed = remove_stored(
        host.root, request["places"], older_than_s=request["older_than_s"], in_use=[host.package.name]
    )
    return {"removed": [dataclasses.asdict(each) for each in removed]}


OPERATIONS: dict[str, Operation] = {
    "table.look": look,
    "table.end": end,
    "table.stored": stored,
    "table.remove": remove,
}

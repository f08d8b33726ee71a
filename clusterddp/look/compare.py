"""Why runs differ: the keys of their specs, packages, machines and places that are not equal, and their code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.look.background import Background
from clusterddp.look.code import FileDiff, compare_folders
from clusterddp.look.report import RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A key that is not equal in all runs; None in a run that does not have it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeDiff:
    """How the code of a run differs from that of the first one."""

    run: str
    files: tuple[FileDiff, ...]
    not_compared: str = ""
    """Why the files could not be compared; empty: they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several runs beside each other: what differs, which is the why, and what they came to."""

    runs: tuple[RunReport, ...]
    spec: tuple[Difference, ...]
    packages: tuple[Difference, ...]
    machine: tuple[Difference, ...]
    """The machine that submitted."""
    places: tuple[Difference, ...]
    """Launcher, hosts, ranks."""
    code: tuple[Difference, ...]
    """Commit, branch, snapshot."""
    diffs: tuple[CodeDiff, ...]
    """Of each further run."""

    def to_json(self) -> dict[str, Any]:
        names = [report.status.run for report in self.runs]
        parts = ("spec", "packages", "machine", "places", "code")
        return {
            "schema": 1,
            "runs": [_run_json(report) for report in self.runs],
            "differences": {
                part: {each.key: dict(zip(names, each.values, strict=True)) for each in getattr(self, part)}
                for part in parts
            },
            "diffs": [dataclasses.asdict(diff) for diff in self.diffs],
        }


def compare(runs: Sequence[RunReport]) -> Comparison:
    """Put runs beside each other; the code of each is compared with that of the first."""
    grounds = [run.background for run in runs]
    return Comparison(
        runs=tuple(runs),
        spec=_differing([ground.config for ground in grounds]),
        packages=_differing([ground.packages for ground in grounds]),
        machine=_differing([ground.machine for ground in grounds]),
        places=_differing([ground.places for ground in grounds]),
        code=_differing([_code_facts(ground) for ground in grounds]),
        diffs=tuple(_compare_code(runs[0], run) for run in runs[1:]),
    )


def _differing(facts: Sequence[Mapping[str, str]]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(key for of_run in facts for key in of_run)
    rows = [Difference(key=key, values=tuple(of_run.get(key) for of_run in facts)) for key in keys]
    return tuple(row for row in rows if len(set(row.values)) > 1)


def _code_facts(ground: Background) -> dict[str, str]:
    facts = {
        "commit": ground.commit,
        "branch": ground.branch,
        "uncommitted changes": "yes" if ground.is_dirty else "no" if ground.commit else None,
        "snapshot": ground.code and ground.code.name[:12],
    }
    return {name: fact for name, fact in facts.items() if fact}


def _compare_code(first: RunReport, other: RunReport) -> CodeDiff:
    name, here, there = other.status.run, first.background.code, other.background.code
    if here is None or there is None:
        without = [report.status.run for report in (first, other) if report.background.code is None]
        return CodeDiff(run=name, files=(), not_compared=f"no snapshot of the code of {' and '.join(without)} is here")
    if here == there:
        return CodeDiff(run=name, files=())
    try:
        return CodeDiff(run=name, files=compare_folders(here, there))
    except (ClusterddpError, OSError) as error:
        return CodeDiff(run=name, files=(), not_compared=str(error))


def _run_json(report: RunReport) -> dict[str, Any]:
    status = report.status
    return {
        "run": status.run,
        "name": report.name,
        "variant": report.variant,
        "state": status.state.value,
        "reason": status.root_cause.error if status.root_cause else status.reason,
        "launcher": status.launcher,
        "world_size": status.world_size,
        "created": status.created,
        "ended": status.ended,
        "results": dataclasses.asdict(report.results),
        "logged": dict(report.logged),
    }

"""Why runs differ: the keys of their specs, packages, machines and places that are not equal, and their code."""

from __future__ import annotations

import dataclasses
import difflib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.look.background import Background
from clusterddp.look.report import RunReport
from clusterddp.system.file_set import list_files, read_sum, show

_MAX_FILE_BYTES = 200_000
"""A larger file is named and not shown."""
_MAX_FILE_LINES = 400
MAX_FILES_SHOWN = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A key that is not equal in all runs; None in a run that does not have it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDiff:
    """A file of the code that is not equal in two runs."""

    path: str
    change: str
    """`changed`, `added`, `removed`."""
    lines: tuple[str, ...]
    """A unified diff; empty for a file that is no text, or too large."""
    left_out_lines: int = 0


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


def compare_folders(old: Path, new: Path) -> tuple[FileDiff, ...]:
    """Return the files that differ between two folders, by name; at most `MAX_FILES_SHOWN` of them with their lines.

    Raises: ClusterddpError, OSError: a folder or a file cannot be read.
    """
    before, after = ({entry.name: entry for entry in list_files(root).entries} for root in (old, new))
    diffs: list[FileDiff] = []
    for name in sorted(before.keys() | after.keys()):
        is_same = name in before and name in after and _content(old, name) == _content(new, name)
        if is_same:
            continue
        change = "added" if name not in before else "removed" if name not in after else "changed"
        lines: list[str] = []
        if len(diffs) < MAX_FILES_SHOWN:
            lines = _unified(_lines(old, name), _lines(new, name))
        shown = tuple(lines[:_MAX_FILE_LINES])
        left_out = len(lines) - len(shown)
        diffs.append(FileDiff(path=show(name), change=change, lines=shown, left_out_lines=left_out))
    return tuple(diffs)


def _unified(old: list[str] | None, new: list[str] | None) -> list[str]:
    """Return a unified diff without its two lines of file names; empty where one of the files is no text."""
    if old is None or new is None:
        return []
    return list(difflib.unified_diff(old, new, lineterm=""))[2:]


def _lines(root: Path, name: bytes) -> list[str] | None:
    """Return the lines of a text file; none where there is no such file, None where it is no text or too large."""
    kind, content = _content(root, name)
    if kind == "":
        return []
    if kind != "file" or content is None or b"\0" in content:
        return None
    try:
        return content.decode().splitlines()
    except UnicodeDecodeError:
        return None


def _content(root: Path, name: bytes) -> tuple[str, bytes | None]:
    """Return what a file is and what it holds; of a file that is too large its sum."""
    path = os.path.join(os.fsencode(root), name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return "", None
    if stat.S_ISLNK(found.st_mode):
        return "link", os.readlink(path)
    if not stat.S_ISREG(found.st_mode):
        return "folder", None
    if found.st_size > _MAX_FILE_BYTES:
        return "large", read_sum(path)
    with open(path, "rb") as file:
        return "file", file.read(_MAX_FILE_BYTES + 1)


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

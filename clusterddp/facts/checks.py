"""The needs of a run, and the results of checks, one for each host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["red", "note", "ok"]
_ORDER: tuple[Level, ...] = ("red", "note", "ok")


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a run needs of one machine; the defaults are for checks without a spec."""

    trainer: bool = False
    """The built-in trainer runs, which needs torch; the needs of a user's program are unknown."""
    use_gpus: bool = True
    """Ranks compute on GPUs if there are any."""
    num_gpus: int = 0
    nccl: bool = False
    """NCCL connects machines."""
    download: bool = True
    """Data that is missing is downloaded."""
    sent_bytes: int = 0
    """How much data will be sent, if the machine has none of it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one check found on one host; red: a run would fail; note: for information."""

    level: Level
    found: str
    fix: str | None = None
    """The command or setting that fixes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check, on one host or on many."""

    name: str
    results: dict[str, Result]
    """Host -> its result."""

    @property
    def level(self) -> Level:
        return min((result.level for result in self.results.values()), key=_ORDER.index, default="ok")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Hosts on which a check found the same."""

    check: str
    hosts: tuple[str, ...]
    result: Result


def ok(found: str) -> Result:
    return Result(level="ok", found=found)


def note(found: str, fix: str | None = None) -> Result:
    return Result(level="note", found=found, fix=fix)


def red(found: str, fix: str) -> Result:
    return Result(level="red", found=found, fix=fix)


def is_healthy(checks: Iterable[Check]) -> bool:
    """Return whether nothing is red."""
    return all(check.level != "red" for check in checks)


def reds_of(checks: Iterable[Check]) -> Iterator[tuple[str, str, Result]]:
    """List the red results: host, check, result."""
    for check in checks:
        for host, result in check.results.items():
            if result.level == "red":
                yield host, check.name, result


def rows(checks: Iterable[Check]) -> list[Row]:
    """Group checks for people: red results first, hosts with the same result together."""
    found: list[Row] = []
    for check in checks:
        hosts: dict[Result, list[str]] = {}
        for host, result in check.results.items():
            hosts.setdefault(result, []).append(host)
        found += [Row(check=check.name, hosts=tuple(names), result=result) for result, names in hosts.items()]
    return sorted(found, key=lambda row: _ORDER.index(row.result.level))


def to_json(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Return one object for each check and host, in the order of the checks."""
    return [
        {"check": check.name, "host": host, "level": result.level, "found": result.found, "fix": result.fix}
        for check in checks
        for host, result in check.results.items()
    ]

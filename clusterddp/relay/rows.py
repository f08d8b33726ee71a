"""The rows of `metrics.jsonl` as points for a tracker, read from a byte offset on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.system.files import open_regular
from clusterddp.wire import read_object

_BLOCK_BYTES = 1 << 20
_MAX_DEPTH = 4
_PLACE = frozenset({"kind", "attempt", "step", "epochs_total", "steps_total", "steps_done", "time", "samples"})
"""Keys of a row that are no values of it."""
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """How far `metrics.jsonl` was read."""

    offset: int = 0
    """The byte after the last line that was read."""
    rows: int = 0
    """The number of lines before `offset`; it numbers the points and never goes back."""
    step: int = 0
    """The step of the last row that had one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The values of one row."""

    number: int
    """The number of its line in the file, from 0."""
    step: int
    """A later attempt repeats the steps after its checkpoint."""
    attempt: int
    time: float
    """Seconds since the epoch."""
    values: Mapping[str, float] = field(default_factory=dict)


def read_points(path: Path, place: Place) -> Iterator[tuple[list[Point], Place]]:
    """Yield the points after `place` in blocks of whole lines, each with the place after it.

    A line without its end is left for the next call; a line that is no row is passed over.

    Raises: ClusterddpError: the file is shorter than what was read of it, or is no file.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        if file.seek(0, 2) < place.offset:
            raise ClusterddpError(
                f"{path}: has fewer than the {place.offset:,} bytes that were relayed before",
                hint="another file took its place; another --project takes all of it",
            )
        file.seek(place.offset)
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            lines, _, rest = (rest + block).rpartition(b"\n")
            if lines or rest != block:
                points, place = _take(lines + b"\n", place)
                yield points, place


def _take(text: bytes, place: Place) -> tuple[list[Point], Place]:
    points, step = [], place.step
    lines = text.split(b"\n")[:-1]
    for number, line in enumerate(lines, start=place.rows):
        row = _row(line)
        at = row.get("step")
        step = int(at) if isinstance(at, int | float) and math.isfinite(at) else step
        if row and (values := _values(row)):
            attempt, time = row.get("attempt"), row.get("time")
            points.append(
                Point(
                    number=number,
                    step=step,
                    attempt=attempt if isinstance(attempt, int) else 0,
                    time=float(time) if isinstance(time, int | float) and math.isfinite(time) else 0.0,
                    values=values,
                )
            )
    return points, Place(offset=place.offset + len(text), rows=place.rows + len(lines), step=step)


def _row(line: bytes) -> dict[str, Any]:
    try:
        return read_object(line)
    except ValueError:
        return {}


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row: `train/loss`, `eval/accuracy`, and those of a script under their own keys."""
    kind = row.get("kind")
    if kind == "progress":
        return {}
    prefix = f"{kind}/" if kind in ("train", "eval") else ""
    return dict(numbers_of({key: value for key, value in row.items() if key not in _PLACE}, prefix))


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers among values, those inside of an object as `step_ms.p50`; `"nan"` and `"inf"` are numbers."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name.count(".") < _MAX_DEPTH:
            yield from numbers_of(value, f"{name}.")
        elif _is_number(value):
            yield name, float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NOT_FINITE
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023
    return isinstance(value, float)

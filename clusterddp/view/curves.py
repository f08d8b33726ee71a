"""The curves of a run: `metrics.jsonl` in one pass, every row of a short file, a sample of the rows of a long one.

Evaluations, and rows with a literal NaN or Infinity, are read whatever the length of the file. A script may have
written a row, or another user; a row of another form is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.system.files import open_regular
from clusterddp.view.progress import accuracy_of

_MAX_LINE_BYTES = 1 << 24
_WHOLE_BYTES = 12 << 20
"""A file up to this size is read row by row."""
_SAMPLED_ROWS = 10_000
_MARKS = (b'"eval"', b"NaN", b"Infinity")
"""What marks a row that is read in any case."""
_NOT_FINITE = frozenset(["nan", "inf", "-inf"])
"""How a script's own rows have a number that is not finite."""
_MAX_KEYS = 200
_LARGEST = 1e150
"""A larger number counts as infinite: differences and ratios of two of them must be numbers."""
_NO_CURVE = frozenset(
    [
        "kind",
        "attempt",
        "epoch",
        "step",
        "epochs_total",
        "steps_total",
        "steps_done",
        "time",
        "train_seconds",
        "checkpoint_seconds",
        "samples",
        "straggler",  # in rows of earlier versions
    ]
)


@dataclass(slots=True)
class Curve:
    """One key of the rows of one kind, over the steps; the steps increase."""

    key: str
    """`loss`, or `step_ms.p50` for a number inside of an object."""
    kind: str
    """`train`, `eval`; of a script's own rows `log`."""
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    attempt: Any = None
    """The attempt of the newest point."""
    not_finite: float | None = None
    """The first step at which the value was NaN or infinite."""

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def best(self, *, highest: bool) -> tuple[float, float] | None:
        """Return the best value and its step."""
        if not self.values:
            return None
        value = (max if highest else min)(self.values)
        return value, self.steps[self.values.index(value)]

    def add(self, step: float | None, value: float, attempt: Any) -> None:
        """Add a point; a later attempt replaces the steps that it repeats.

        A step that does not increase within an attempt (a script counts anew in each epoch) counts on by one.
        """
        last = self.steps[-1] if self.steps else 0.0
        step = last + 1 if step is None else step
        if not abs(value) < _LARGEST:
            self.not_finite = step if self.not_finite is None else self.not_finite
            return
        if attempt != self.attempt and self.steps and step <= last:
            cut = bisect_left(self.steps, step)
            del self.steps[cut:], self.values[cut:]
        elif self.steps and step <= last:
            step = last + 1
        self.attempt = attempt
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, most: int) -> list[tuple[float, float]]:
        """Return at most `most` points (4 or more): the ends, and the lowest and highest of each interval."""
        count = len(self.steps)
        if count <= most:
            return list(zip(self.steps, self.values, strict=True))
        first, last = self.steps[0], self.steps[-1]
        intervals = max(1, (most - 2) // 2)
        kept = {0, count - 1}
        begin = 0
        for number in range(1, intervals + 1):
            end = bisect_left(self.steps, first + (last - first) * number / intervals) if number < intervals else count
            inside = range(begin, end)
            if inside:
                kept |= {min(inside, key=self.values.__getitem__), max(inside, key=self.values.__getitem__)}
            begin = end
        return [(self.steps[at], self.values[at]) for at in sorted(kept)]


@dataclass(slots=True)
class Curves:
    """All curves of a run, and the facts of its rows that are no curves."""

    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    """By key and kind."""
    read_rows: int = 0
    total_rows: int = 0
    newest: dict[str, Any] = field(default_factory=dict)
    """Each key's newest value, whatever its type."""
    accuracy: Curve = field(default_factory=lambda: Curve("accuracy", "eval"))
    """Of evaluations, and of a script's own rows, as a share 0..1."""

    def find(self, key: str, *kinds: str) -> Curve | None:
        """Return the curve of a key, of the first of these kinds that has one."""
        found = (self.curves.get((key, kind)) for kind in kinds)
        return next((curve for curve in found if curve and (curve.values or curve.not_finite is not None)), None)

    def newest_logged(self) -> dict[str, float]:
        """Return the newest value of each key that a script logged itself."""
        logged = (curve for (_, kind), curve in self.curves.items() if kind == "log" and curve.values)
        return {curve.key: curve.values[-1] for curve in logged}

    def take(self, line: bytes) -> None:
        """Take the numbers of a row; a line that is none is passed over."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if type(row) is not dict:
            return
        self.read_rows += 1
        kind = row.get("kind")
        kind = kind if isinstance(kind, str) else "log"
        step, attempt = _number(row.get("step")), row.get("attempt")
        if step is not None and not abs(step) < _LARGEST:
            step = None
        self.newest |= row
        share = accuracy_of(row)
        if share is not None:
            self.accuracy.add(step, share, attempt)
        for key, value in row.items():
            if type(value) is dict:
                for inner, inside in value.items():
                    if key not in _NO_CURVE and (number := _number(inside)) is not None:
                        self._add(f"{key}.{inner}", kind, step, number, attempt)
            elif key not in _NO_CURVE and (number := _number(value)) is not None:
                self._add(key, kind, step, number, attempt)

    def _add(self, key: str, kind: str, step: float | None, value: float, attempt: Any) -> None:
        curve = self.curves.get((key, kind))
        if curve is None:
            if len(self.curves) >= _MAX_KEYS:
                return
            curve = self.curves[key, kind] = Curve(key, kind)
        curve.add(step, value, attempt)


def read_curves(path: Path) -> Curves:
    """Read the curves of a run; none where there is no file, or none that can be read."""
    curves = Curves()
    read, number = 0, 0
    for read, (number, line) in enumerate(sample_lines(path), start=1):  # noqa: B007
        curves.take(line)
    curves.total_rows = number if read < number else curves.read_rows
    return curves


def sample_lines(path: Path, *, whole_bytes: int = _WHOLE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are read, the last one among them, each with its number from 1.

    `whole_bytes`: a file up to this size is read whole; of a larger one about 10,000 lines.
    """
    with contextlib.suppress(OSError, ClusterddpError), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        distance = size // _SAMPLED_ROWS if size > whole_bytes else 0
        end, sample_at, num_lines, skipped = 0, 0, 0, b""
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):  # else it is being written, or far too long
            begin, end, num_lines = end, end + len(line), num_lines + 1
            if end > sample_at:
                sample_at = begin + distance
            elif not any(mark in line for mark in _MARKS):
                skipped = line
                continue
            skipped = b""
            yield num_lines, line
        if skipped:
            yield num_lines, skipped


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    if type(value) is str and value in _NOT_FINITE:
        return float(value)
    return float(value) if type(value) is int and abs(value) < 2**63 else None

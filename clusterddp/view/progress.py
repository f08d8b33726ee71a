"""The progress of a run, read from the end of `metrics.jsonl`, however long the file is."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.run.metrics import timed_steps
from clusterddp.run.record import read_start
from clusterddp.system.files import read_last_jsonl, read_last_lines
from clusterddp.wire import Written, read_object

TAIL_BYTES = 64 * 1024
_ACCURACY = re.compile(r"(^|[/._ -])(acc|accuracy|acc@?1|top-?1)$")
"""The end of a key, in lower case, whose value is an accuracy."""
_HAS_ACCURACY = re.compile(rb'(acc|accuracy|acc@?1|top-?1)":', re.IGNORECASE)
"""The same in a line: few lines are parsed where many are read."""
_NOT_FINITE = ("nan", "inf", "-inf")
_COLUMNS = frozenset({"kind", "attempt", "step", "time", "epoch", "steps_done", "steps_total", "epochs_total"})
_FIELDS = frozenset({"loss", "images_per_s"})
_LARGEST = 1e300
_MAX_VALUES = 16
_MAX_LOSSES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Written):
    """The progress of the newest attempt; None where its rows have no value."""

    epoch: int | None
    """Counts from 1: the epoch that is being trained, or the last one. A script may log the epochs done: 0.04."""
    epochs: int | None
    step: int | None
    """Optimizer steps done."""
    steps: int | None
    fraction: float | None
    """0..1, of the steps."""
    loss: float | None
    accuracy: float | None
    """0..1, of the newest evaluation; of a script, the newest value with a name such as val_acc."""
    images_per_s: float | None
    """All ranks together."""
    eta_s: float | None
    """Seconds until the last step, at the pace of the newest rows; None also when the run does not go on."""
    values: dict[str, float | str] = field(default_factory=dict)
    """The newest other values that a script has logged; `nan`, `inf` and `-inf` as text."""
    losses: tuple[float, ...] = ()
    """The newest losses of the attempt, oldest first; at most 32."""


def read_progress(run: RunDir, *, tail_bytes: int = TAIL_BYTES) -> Progress | None:
    """Read how far the run is from the last `tail_bytes` of its metrics; None when it wrote none (yet).

    A script's accuracy may be further up than its many other rows. Of a step: by the rows since its start.
    """
    rows = read_last_jsonl(run.metrics, tail_bytes)
    if run.step is not None:
        since = (read_start(run.newest_attempt()) or {}).get("started", 0.0)
        rows = [row for row in rows if isinstance(at := row.get("time"), int | float) and at >= since]
    progress = progress_of(rows)
    if progress is None or progress.accuracy is not None or tail_bytes >= TAIL_BYTES:
        return progress
    lines = filter(_HAS_ACCURACY.search, reversed(read_last_lines(run.metrics, TAIL_BYTES)))
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that is incomplete or not a row
            if (accuracy := accuracy_of(read_object(line))) is not None:
                return replace(progress, accuracy=accuracy)
    return progress


def progress_of(rows: list[dict[str, Any]]) -> Progress | None:
    """Sum up metrics rows, oldest first; rows of an earlier attempt do not count towards the pace."""
    if not rows:
        return None
    attempt = rows[-1].get("attempt")
    own = [row for row in rows if row.get("attempt") == attempt]
    logged = [row for row in rows if row.get("kind") == "log"]
    rows = [_by_progress(row) for row in rows]
    step, steps = _newest(rows, "step"), _newest(rows, "steps_total")
    if step is None:
        step = _newest(logged, "step")
    fraction = min(1.0, step / steps) if step is not None and steps else None
    epoch, epochs = _newest(rows, "epoch"), _newest(rows, "epochs_total")
    losses = (number_of(row.get("loss")) for row in own if row.get("kind") in ("train", "log"))
    return Progress(
        epoch=None if epoch is None else math.ceil(epoch),
        epochs=None if epochs is None else int(epochs),
        step=None if step is None else int(step),
        steps=None if steps is None else int(steps),
        fraction=None if fraction is None else round(fraction, 4),
        loss=_newest(rows, "loss", kinds=("train", "log")),
        accuracy=next((found for row in reversed(rows) if (found := accuracy_of(row)) is not None), None),
        images_per_s=_newest(rows, "images_per_s", kinds=("train", "log")),
        eta_s=_eta_s([_by_progress(row) for row in own], step, steps),
        values=_newest_values([row for row in own if row.get("kind") == "log"]),
        losses=tuple(loss for loss in losses if loss is not None)[-_MAX_LOSSES:],
    )


def accuracy_of(row: dict[str, Any]) -> float | None:
    """Return the accuracy that a row holds as a share, 0..1; None: none, or one of training data.

    A script's value above 1 is in percent.
    """
    if row.get("kind") == "eval":
        return number_of(row.get("accuracy"))
    if row.get("kind") != "log":
        return None
    key = _accuracy_key(row)
    return None if key is None else row[key] / (100 if row[key] > 1 else 1)


def _by_progress(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the steps that are done: the step of logged values may count something else."""
    return row if row.get("kind") != "log" else {**row, "step": row.get("steps_done")}


def _newest_values(logged: list[dict[str, Any]]) -> dict[str, float | str]:
    """Return the newest value of each key that `Progress` has no field for, in the order of the newest row."""
    found: dict[str, float | str] = {}
    for row in reversed(logged):
        in_fields = {*_FIELDS, _accuracy_key(row)}
        for key in row:
            number = number_of(row[key])
            value = number if number is not None else row[key] if row[key] in _NOT_FINITE else None
            if value is not None and key not in _COLUMNS and not (key in in_fields and number is not None):
                found.setdefault(key, value)
    return dict(list(found.items())[:_MAX_VALUES])


def _accuracy_key(row: dict[str, Any]) -> str | None:
    """Return which of a script's values is its accuracy: the one of that name, else the first that ends so."""
    keys = ("accuracy", *row)
    named = (key for key in keys if _ACCURACY.search(key.lower()) and not key.lower().startswith("train"))
    return next((key for key in named if number_of(row.get(key)) is not None), None)


def number_of(value: Any) -> float | None:
    """Return a number of a row; None for what is none, or not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _LARGEST else None


def _newest(rows: list[dict[str, Any]], key: str, *, kinds: Container[str] | None = None) -> float | None:
    for row in reversed(rows):
        number = number_of(row.get(key))
        if number is not None and (kinds is None or row.get("kind") in kinds):
            return number
    return None


def _eta_s(rows: list[dict[str, Any]], step: float | None, steps: float | None) -> float | None:
    if step is None or not steps:
        return None
    if step >= steps:
        return 0.0
    timed = timed_steps(rows)
    if not timed:
        return None
    steps_done, seconds = timed[-1][0] - timed[0][0], timed[-1][1] - timed[0][1]
    if steps_done <= 0 or seconds <= 0:
        return None
    return round((steps - step) * seconds / steps_done, 1)

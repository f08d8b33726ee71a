"""How far a run is: read from the end of `metrics.jsonl`, however long the file has become."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_last_jsonl

TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the newest attempt has come; None where its rows do not say."""

    epoch: int | None
    """Counts from 1: the epoch that is being trained, or the last one."""
    epochs: int | None
    step: int | None
    """Optimizer steps done."""
    steps: int | None
    fraction: float | None
    """0..1, of the steps."""
    loss: float | None
    accuracy: float | None
    """0..1, of the newest evaluation."""
    images_per_s: float | None
    """All ranks together."""
    eta_s: float | None
    """Seconds until the last step, at the pace of the newest rows; None also when the run does not go on."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_progress(run: RunDir, *, tail_bytes: int = TAIL_BYTES) -> Progress | None:
    """Read how far the run is from the last `tail_bytes` of its metrics; None when it wrote none (yet)."""
    return progress_of(read_last_jsonl(run.metrics, tail_bytes))


def progress_of(rows: list[dict[str, Any]]) -> Progress | None:
    """Sum up metrics rows, oldest first; rows of an earlier attempt do not count towards the pace."""
    if not rows:
        return None
    attempt = rows[-1].get("attempt")
    step, steps = _newest(rows, "step"), _newest(rows, "steps_total")
    fraction = min(1.0, step / steps) if step is not None and steps else None
    epoch, epochs = _newest(rows, "epoch"), _newest(rows, "epochs_total")
    return Progress(
        epoch=None if epoch is None else int(epoch),
        epochs=None if epochs is None else int(epochs),
        step=None if step is None else int(step),
        steps=None if steps is None else int(steps),
        fraction=None if fraction is None else round(fraction, 4),
        loss=_newest(rows, "loss", kind="train"),
        accuracy=_newest(rows, "accuracy", kind="eval"),
        images_per_s=_newest(rows, "images_per_s", kind="train"),
        eta_s=_eta_s([row for row in rows if row.get("attempt") == attempt], step, steps),
    )


def _newest(rows: list[dict[str, Any]], key: str, *, kind: str | None = None) -> float | None:
    for row in reversed(rows):
        value = row.get(key)
        if kind in (None, row.get("kind")) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _eta_s(rows: list[dict[str, Any]], step: float | None, steps: float | None) -> float | None:
    if step is None or not steps:
        return None
    if step >= steps:
        return 0.0
    timed = [
        (done, at)
        for row in rows
        if isinstance(done := row.get("step"), int) and isinstance(at := row.get("time"), int | float)
    ]
    if not timed:
        return None
    steps_done, seconds = timed[-1][0] - timed[0][0], timed[-1][1] - timed[0][1]
    if steps_done <= 0 or seconds <= 0:
        return None
    return round((steps - step) * seconds / steps_done, 1)

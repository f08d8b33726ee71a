"""All that is known of a run in one value, as report draws it, and runs beside each other: where they are not equal."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.places.state import announce
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, read_gang, read_run
from clusterddp.run.seal import demand_sealed
from clusterddp.view.background import (
    Background,
    FileDiff,
    compare_folders,
    read_background,
    read_part,
    read_uncommitted,
)
from clusterddp.view.curves import Curves, read_curves
from clusterddp.view.logs import read_log_tail
from clusterddp.view.status import RunStatus, read_status
from clusterddp.view.timeline import Timeline, read_timeline

_LOG_LINES = 40
_LOG_COLUMNS = 240
_PARTS = {
    "spec": "configuration",
    "code": "code",
    "packages": "packages",
    "places": "hosts and ranks",
    "machine": "the machine that submitted",
}
"""Part of a run's background, as in JSON -> its name for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What a run came to; None where its rows and its summary do not say."""

    accuracy: float | None
    """0..1, of the last evaluation."""
    best_accuracy: float | None
    """0..1, of the best evaluation."""
    best_step: float | None
    """The step of the best evaluation."""
    loss: float | None
    """Of the last evaluation, else of the newest row."""
    epochs: float | None
    steps: float | None
    images_per_s: float | None
    """All ranks together; of the whole run where it came to its end, else of the newest row."""
    step_ms: float | None
    """The median of the optimizer steps, likewise."""
    ran_s: float
    """Seconds in which ranks ran, over all attempts."""
    waited_s: float
    """Seconds of waiting for a start, over all attempts."""
    train_seconds: float | None
    """Seconds in optimizer steps, over all attempts."""
    effective: float | None
    """Effective training time ratio, 0..1 (view/effective.py)."""
    gpu_hours: float | None
    """Hours in which ranks ran, times GPUs; None on CPUs."""
    rank_hours: float
    """Hours in which ranks ran, times ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A run at one moment, by its files."""

    status: RunStatus
    directory: str
    made: float
    """When this was read, in seconds since the epoch."""
    results: Results
    logged: Mapping[str, float]
    """The newest value of each key that a script logged itself."""
    curves: Curves
    timeline: Timeline
    background: Background
    uncommitted: tuple[FileDiff, ...]
    """The files of the snapshot that are not as in the commit; empty also where the repository is not here."""
    log: str
    """The log that the excerpt is from, relative to the run's directory; empty: there is no excerpt."""
    log_lines: tuple[str, ...]


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
    parts: Mapping[str, tuple[Difference, ...]]
    """What differs in each part of `_PARTS`."""
    diffs: tuple[CodeDiff, ...]
    """Of each further run."""

    @property
    def by_part(self) -> dict[str, tuple[Difference, ...]]:
        """What differs, by the name of its part; a part in which nothing differs is left out."""
        return {_PARTS[part]: rows for part, rows in self.parts.items() if rows}

    def to_json(self) -> dict[str, Any]:
        names = [report.status.run for report in self.runs]
        return {
            "schema": 1,
            "runs": [_run_json(report) for report in self.runs],
            "differences": {
                part: {each.key: dict(zip(names, each.values, strict=True)) for each in rows}
                for part, rows in self.parts.items()
            },
            "diffs": [dataclasses.asdict(diff) for diff in self.diffs],
        }


def read_reports(runs: Sequence[RunDir], environ: Mapping[str, str]) -> list[RunReport]:
    """Read all that is known of runs now; Slurm is asked once for all of them.

    Raises: ClusterddpError: a run's record or plan is damaged.
    """
    known = [(run, read_run(run)) for run in runs]
    announce(known)
    return [_read_report(run, record, environ) for run, record in known]


def compare(runs: Sequence[RunReport]) -> Comparison:
    """Put runs beside each other; the code of each is compared with that of the first."""
    grounds = [run.background for run in runs]
    diffs = tuple(_compare_code(runs[0], run) for run in runs[1:])
    parts = {part: _differing([ground.parts[part] for ground in grounds]) for part in _PARTS}
    return Comparison(runs=tuple(runs), parts=parts, diffs=diffs)


def _read_report(run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> RunReport:
    now = time.time()
    status = read_status(run)
    curves = read_curves(run.metrics)
    timeline = read_timeline(run, record, is_finished=status.state.finished, now=now)
    log, lines = _read_excerpt(run, status)
    background = read_background(run, record)
    return RunReport(
        status=status,
        directory=str(run.path),
        made=now,
        results=_results(run, status, curves),
        logged=curves.newest_logged(),
        curves=curves,
        timeline=timeline,
        background=background,
        uncommitted=_read_uncommitted(run, background, environ),
        log=log,
        log_lines=lines,
    )


def _results(run: RunDir, status: RunStatus, curves: Curves) -> Results:
    summary = read_part(run.summary)
    best = curves.accuracy.best(highest=True)
    progress = status.progress
    loss, speed = curves.find("loss", "eval", "train", "log"), curves.find("images_per_s", "train", "log")
    step_ms = curves.find("step_ms.p50", "train")
    of_all_steps = summary.get("step_ms")
    of_all_steps = of_all_steps.get("p50") if isinstance(of_all_steps, dict) else None
    gang = read_gang(run)
    num_ranks = gang.num_ranks
    return Results(
        accuracy=first_number(summary.get("accuracy"), curves.accuracy.last),
        best_accuracy=first_number(best and best[0], summary.get("best_accuracy")),
        best_step=best and best[1],
        loss=first_number(summary.get("loss"), loss and loss.last),
        epochs=first_number(summary.get("epochs"), progress and progress.epoch),
        steps=first_number(summary.get("steps"), progress and progress.step),
        images_per_s=first_number(summary.get("images_per_s"), speed and speed.last),
        step_ms=first_number(of_all_steps, step_ms and step_ms.last),
        ran_s=status.times.running_s,
        waited_s=status.times.queued_s,
        train_seconds=first_number(summary.get("train_seconds"), curves.newest.get("train_seconds")),
        effective=status.effective.ratio if status.effective else None,
        gpu_hours=None if gang.on_cpu else status.times.running_s * num_ranks / 3600,
        rank_hours=status.times.running_s * num_ranks / 3600,
    )


def first_number(*values: Any) -> float | None:
    """Return the first of the values that is a finite number."""
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
            return float(value) if math.isfinite(value) else None
    return None


def _read_excerpt(run: RunDir, status: RunStatus) -> tuple[str, tuple[str, ...]]:
    """Return the end of the log that explains a failure."""
    cause = status.root_cause
    log = cause.log if cause else status.job_log
    lines = read_log_tail(run.path / log, max_lines=_LOG_LINES, max_columns=_LOG_COLUMNS) if log else []
    if not lines and cause and cause.traceback:
        return "its traceback", tuple(
            line[:_LOG_COLUMNS] for line in cause.traceback.rstrip().split("\n")[-_LOG_LINES:]
        )
    return (log or "", tuple(lines)) if lines else ("", ())


def _read_uncommitted(run: RunDir, ground: Background, environ: Mapping[str, str]) -> tuple[FileDiff, ...]:
    """Return what was changed and not committed; git looks only where this user has submitted from."""
    if not (ground.is_dirty and ground.code and ground.root and ground.commit):
        return ()
    try:
        if not Path(demand_sealed(run)["working_dir"]).is_relative_to(ground.root):
            return ()
        return read_uncommitted(ground.code, ground.root, ground.commit, environ)
    except (OSError, ClusterddpError, KeyError, TypeError):
        return ()


def _differing(facts: Sequence[Mapping[str, str]]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(key for of_run in facts for key in of_run)
    rows = [Difference(key=key, values=tuple(of_run.get(key) for of_run in facts)) for key in keys]
    return tuple(row for row in rows if len(set(row.values)) > 1)


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
        "name": status.name,
        "variant": status.variant,
        "state": status.state.value,
        "reason": status.root_cause.error if status.root_cause else status.reason,
        "launcher": status.launcher,
        "world_size": status.world_size,
        "created": status.created,
        "ended": status.ended,
        "results": dataclasses.asdict(report.results),
        "logged": dict(report.logged),
    }

"""The checkpoints of a run: whether there are any, here or on its hosts, and which is the newest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.host_reports import read_reports
from clusterddp.run.record import read_gang
from clusterddp.system.files import is_file

_NAME = re.compile(r"step-(?P<step>\d+)-a(?P<attempt>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is complete."""

    path: str
    """Of its data; on a host from the run's directory there."""
    step: int
    """Optimizer steps done."""
    host: str | None = None
    """On which host of the run it is; None: here."""


def newest_checkpoint(run: RunDir) -> Checkpoint | None:
    """Find the newest checkpoint, by its name: the one with data here, else the one that a host has."""
    here = [name for path in run.checkpoints.glob("*.json") if is_file(path.with_suffix(".pt")) and (name := path.stem)]
    if newest := _newest(here):
        return Checkpoint(path=str(run.checkpoints / f"{newest[0]}.pt"), step=newest[1])
    for host, report in read_reports(run).items():
        if newest := _newest(report.checkpoints):
            return Checkpoint(path=f"checkpoints/{newest[0]}.pt", step=newest[1], host=host)
    return None


def _newest(names: Iterable[str]) -> tuple[str, int] | None:
    """Return the newest of some checkpoints, by attempt, then by step, with its step."""
    found = [(int(match["attempt"]), int(match["step"]), name) for name in names if (match := _NAME.fullmatch(name))]
    _, step, newest = max(found, default=(0, 0, ""))
    return (newest, step) if newest else None


def has_checkpoint(run: RunDir) -> bool:
    """Return whether there is a checkpoint: here, or on the SSH hosts of the run."""
    here = next(run.checkpoints.glob("*.json"), None) is not None
    return here or any(report.checkpoints for report in read_reports(run).values())


def may_have_saved(run: RunDir) -> bool:
    """Return whether the run may go on from where it was; False for a program that left no file and never asked."""
    entry = read_gang(run).entry
    if entry.always_stops or has_checkpoint(run) or any(is_file(attempt.asked) for attempt in run.attempts()):
        return True
    output = Path(entry.output_dir or run.output)
    with contextlib.suppress(OSError):
        return next(output.iterdir(), None) is not None
    return bool(entry.output_dir)  # it may be on another machine

"""What a job waits for: runs and jobs that have to end first, as Slurm's --dependency."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.run.directory import RunDir, find_run
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, find_sweep

_UNMET = {"afterok": ("FAILED", "CANCELLED", "STOPPED"), "afternotok": ("COMPLETED",), "afterany": ()}


def find_dependency(after: Sequence[str], runs_dir: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the value of --dependency and notes on what has ended already; None: there is nothing left to wait for.

    Raises: RunNotFoundError, UsageError: a run that cannot be waited for, or whose end makes waiting pointless.
    """
    words: list[str] = []
    notes: list[str] = []
    for text in after:
        kind, _, name = text.rpartition(":")
        kind = kind or "afterok"
        if re.fullmatch(r"[0-9]+(_[0-9]+)?", name):
            words.append(f"{kind}:{name}")
            continue
        sweep = find_sweep(runs_dir, name)
        if sweep:
            words += _wait_for_sweep(text, kind, sweep)
            continue
        run = find_run(runs_dir, name)
        end = _final_end(run)
        if end is None:
            words.append(f"{kind}:{_job_of(run)}")
        elif end.outcome in _UNMET[kind]:
            raise UsageError(f"after: {text}: {run.name} has ended: {end.outcome} ({end.reason})")
        else:
            notes.append(f"after: {run.name} has ended already ({end.outcome}), so nothing waits for it")
    return ",".join(words) or None, tuple(notes)


def _wait_for_sweep(text: str, kind: str, sweep: SweepDir) -> list[str]:
    """Return what waits for all runs of a sweep: for their array, and for those that go on in a job of their own."""
    if kind == "afternotok":
        raise UsageError(f"after: {text}: {sweep.name} is a sweep; afternotok takes one run", hint=f"{sweep.name}.0")
    jobs: dict[str, None] = {}
    for run in sweep.runs():
        end = _final_end(run)
        if end is None:
            jobs[_job_of(run).partition("_")[0]] = None
        elif end.outcome in _UNMET[kind]:
            raise UsageError(f"after: {text}: {run.name} has ended: {end.outcome} ({end.reason})")
    return [f"{kind}:{job}" for job in jobs]


def _final_end(run: RunDir) -> AttemptEnd | None:
    attempts = run.attempts()
    end = read_end(attempts[-1]) if attempts else None
    return None if end is None or end.will_restart else end


def _job_of(run: RunDir) -> str:
    record = read_run(run)
    if record.launcher != "slurm":
        raise UsageError(
            f"after: {run.name} is a {record.launcher} run, for which Slurm cannot wait",
            hint=f"clusterddp wait {run.name} waits for it",
        )
    if record.job_id is None:
        raise UsageError(
            f"after: the job of {run.name} is not known", hint=f"clusterddp status {run.name} asks Slurm for it"
        )
    return record.job_id

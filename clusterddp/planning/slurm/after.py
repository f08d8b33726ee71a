"""The dependencies of a job: runs and jobs that have to end first, as Slurm's --dependency."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, find_sweep

_UNMET = {"afterok": ("FAILED", "CANCELLED", "STOPPED"), "afternotok": ("COMPLETED",), "afterany": ()}


def find_dependency(after: Sequence[str], runs_dir: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the value of --dependency and notes on runs that have ended; None: no dependency is left.

    Raises: RunNotFoundError, UsageError: Slurm cannot wait for a run, or a run has ended with the wrong outcome.
    """
    dependencies: list[str] = []
    notes: list[str] = []
    for text in after:
        kind, _, name = text.rpartition(":")
        kind = kind or "afterok"
        if re.fullmatch(r"[0-9]+(_[0-9]+)?", name):
            dependencies.append(f"{kind}:{name}")
            continue
        sweep = find_sweep(runs_dir, name)
        if sweep:
            dependencies += _dependencies_on_sweep(text, kind, sweep)
            continue
        run = find_run(runs_dir, name)
        end = _final_end(run)
        if end is None:
            dependencies.append(f"{kind}:{_job_of(run)}")
        elif end.outcome in _UNMET[kind]:
            raise UsageError(f"after: {text}: {run.name} has ended: {end.outcome} ({end.reason})")
        else:
            notes.append(f"after: {run.name} has ended already ({end.outcome}), so the job does not wait for it")
    return ",".join(dependencies) or None, tuple(notes)


def _dependencies_on_sweep(text: str, kind: str, sweep: SweepDir) -> list[str]:
    """Return the dependencies on all runs of a sweep: its job array, and follow-up jobs of single runs."""
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
            f"after: the job id of {run.name} is not known", hint=f"clusterddp status {run.name} asks Slurm for it"
        )
    return record.job_id

"""The command lines of a run's processes: all that the submitting side knows of the programs on the machines."""

from __future__ import annotations

import sys
from pathlib import Path


def launcher_command(run_dir: Path, attempt: int) -> tuple[str, ...]:
    """Return the command that hands a local run to submitit's local executor."""
    return (sys.executable, "-m", "clusterddp.launchers.local.submit", str(run_dir), str(attempt))


def queue_command(sweep_dir: Path) -> tuple[str, ...]:
    """Return the command that starts the runs of a sweep, where Slurm does not."""
    return (sys.executable, "-m", "clusterddp.sweep.queue", str(sweep_dir))


def rank_command(run_dir: Path) -> tuple[str, ...]:
    """Return the command that becomes one rank; which rank, its environment says."""
    return (sys.executable, "-m", "clusterddp.node.rank", str(run_dir))

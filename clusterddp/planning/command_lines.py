"""The command lines of a run's processes: the submitting side starts programs by these and imports none of them."""

from __future__ import annotations

import sys
from pathlib import Path

EXEC_MODULE = "clusterddp.node.exec_command"
"""Becomes the command of `exec` on the machine of its rank."""


def launcher_command(run_dir: Path, attempt: int) -> tuple[str, ...]:
    """Return the command that hands a local run to submitit's local executor."""
    return (sys.executable, "-m", "clusterddp.launchers.local.submit", str(run_dir), str(attempt))


def queue_command(sweep_dir: Path) -> tuple[str, ...]:
    """Return the command of a sweep's queue, which starts its runs where Slurm does not."""
    return (sys.executable, "-m", "clusterddp.sweep.queue", str(sweep_dir))


def rank_command(run_dir: Path) -> tuple[str, ...]:
    """Return the command of a rank; the environment names which rank it is."""
    return (sys.executable, "-m", "clusterddp.node.rank", str(run_dir))

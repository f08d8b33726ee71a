"""How large a job array this cluster takes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterddp.errors import PreflightError
from clusterddp.slurm.commands import run_slurm


def check_array_size(num_tasks: int, environ: Mapping[str, str]) -> None:
    """Ask the cluster whether it takes a job array of so many tasks.

    Raises: PreflightError: it does not, in the words of its configuration. SlurmError: it cannot be asked.
    """
    config = run_slurm(["scontrol", "show", "config"], environ=environ)
    for key, most in array_limits(config).items():
        if num_tasks > most:
            raise PreflightError(
                f"a sweep of {num_tasks} runs: this cluster takes a job array of at most {most} tasks ({key})",
                hint="nothing was written; sweep fewer values at a time: train.seed=0,1 --sweep, then train.seed=2,3",
            )


def array_limits(config: str) -> dict[str, int]:
    """Read from `scontrol show config` how many tasks an array may have; key = value as the cluster has it -> number.

    Source: slurm.conf(5): the highest index is MaxArraySize - 1; max_array_tasks is below it or not set; each task
    that is started is one of MaxJobCount jobs.
    """
    limits: dict[str, int] = {}
    for key in ("MaxArraySize", "MaxJobCount"):
        match = re.search(rf"^{key}\s*=\s*(\d{{1,18}})\s*$", config, re.MULTILINE)
        if match:
            limits[f"{key}={match[1]}"] = int(match[1])
    match = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d{1,18})\b", config, re.MULTILINE)
    if match:
        limits[f"SchedulerParameters=max_array_tasks={match[1]}"] = int(match[1])
    return limits

"""The local launcher: starts a run on this machine, detached from whoever submits it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterddp.dist.environment import cookie
from clusterddp.errors import ClusterddpError
from clusterddp.launch.environment import process_environment
from clusterddp.run.directory import RunDir, read_tail
from clusterddp.run.record import read_run
from clusterddp.run.sweep import sweep

START_TIMEOUT_S = 60.0


def launcher_command(run_dir: Path, attempt: int) -> tuple[str, ...]:
    """Return the command that hands a run to submitit's local executor."""
    return (sys.executable, "-m", "clusterddp.launch.local_submit", str(run_dir), str(attempt))


def supervisor_command() -> tuple[str, ...]:
    """Return the command that supervises one node; which node, it is told over its standard input."""
    return (sys.executable, "-m", "clusterddp.node.supervisor")


def start(run: RunDir, attempt: int, environ: Mapping[str, str]) -> str:
    """Start the attempt and return its job id once submitit has taken it over.

    The record names the job and its keeper by then: submitit's controller, whose death ends the run.
    Raises: ClusterddpError: it could not be started; no process of it is left.
    """
    token = read_run(run).token
    log = run.launcher_dir / "submit.log"
    try:
        exit_code = _hand_over(run, attempt, process_environment(cookie(token, "task"), environ), log)
        job_id = read_run(run).job_id
        if exit_code != 0 or job_id is None:
            last_line = read_tail(log).rpartition("\n")[2].strip()  # of a traceback: what happened
            raise ClusterddpError(f"{run.name} could not be started: {last_line or f'exit code {exit_code}'}")
        return job_id
    except subprocess.TimeoutExpired as error:
        sweep(f"{token}.", timeout_s=5.0)
        raise ClusterddpError(
            f"{run.name} could not be started: no answer from submitit within {START_TIMEOUT_S:.0f} s"
        ) from error
    except BaseException:
        # An interrupt may have come at any point from the first process on; the cookie finds whatever there is.
        sweep(f"{token}.", timeout_s=5.0)
        raise


def _hand_over(run: RunDir, attempt: int, environment: dict[str, str], log: Path) -> int:
    """Have submitit take the attempt over; return the exit code of the process that asks it to."""
    with open(log, "ab", opener=_private) as output:
        process = subprocess.Popen(
            launcher_command(run.path, attempt),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # No file of the user's lies there that could take the place of one of Python's modules.
            cwd=run.launcher_dir,
            env=environment,
            start_new_session=True,
            umask=0o077,
        )
    return process.wait(START_TIMEOUT_S)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

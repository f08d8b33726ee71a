"""Runs Slurm's commands: with a clean environment and a timeout, and with a typed reason when one fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from clusterddp.errors import SlurmError, SlurmReason

COMMAND_TIMEOUT_S = 30.0
_FOREIGN_PREFIXES = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SCANCEL_", "SQUEUE_", "SACCT_", "SINFO_", "PMI_", "PMIX_"),
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""They name the cluster and authenticate the user."""
_TRANSIENT = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "zero bytes were transmitted",
    "slurm_persist_conn",
    "slurm backup controller in standby mode",
    "communication connection failure",
    "unexpected message received",
    "transport endpoint is not connected",
    "slurm controller is not responding",
    "slurmdbd",
    "resource temporarily unavailable",
)
"""Error messages that mean: Slurm did not answer. Source: slurm, src/common/slurm_errno.c; and seen on 22.05."""
_REASONS: dict[str, SlurmReason] = {
    "could not establish a configuration source": "no cluster",
    "accounting storage is disabled": "accounting disabled",
    "invalid job id": "unknown job",
}
"""Part of an error message -> the reason."""


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for one of Slurm's commands.

    Inside a job SLURM_* and the like would become options of the command; the variables that name the cluster stay.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN_PREFIXES)}
    return kept | {"LC_ALL": "C"}


def run_slurm(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = COMMAND_TIMEOUT_S, stdin: str | None = None
) -> str:
    """Run one of Slurm's commands and return its standard output.

    Raises: SlurmError: the command failed; the message is Slurm's.
    """
    return call_slurm(argv, environ=environ, timeout_s=timeout_s, stdin=stdin).stdout


def call_slurm(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = COMMAND_TIMEOUT_S, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return its result; standard error holds warnings."""
    environment = slurm_environment(environ)
    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None:
        raise SlurmError(
            f"{argv[0]}: no such command here; this machine is no part of a Slurm cluster",
            hint="submit from a login node of the cluster",
            transient=False,
            reason="no command",
        )
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{argv[0]}: no answer within {timeout_s:g} s", transient=True) from error
    except OSError as error:
        message = f"{argv[0]}: cannot be run: {error.strerror}"
        raise SlurmError(message, transient=False, reason="cannot run") from error
    if done.returncode != 0:
        raise _failure(done, argv[0])
    return done


def _failure(done: subprocess.CompletedProcess[str], program: str) -> SlurmError:
    """Make the error of a command: its standard error in one line, without its own name before each part."""
    lines = (line.strip().removeprefix(f"{program}: ").removeprefix("error: ") for line in done.stderr.splitlines())
    text = "; ".join(line for line in lines if line)
    found = text.lower()
    reason = next((reason for phrase, reason in _REASONS.items() if phrase in found), None)
    # Without a cluster the message also has the name server's error, which looks transient.
    is_transient = reason != "no cluster" and any(phrase in found for phrase in _TRANSIENT)
    return SlurmError(
        f"{program}: {text or f'exited with code {done.returncode}'}",
        # A command that a signal ended has no answer yet: in a job, Slurm's SIGTERM goes to all processes.
        transient=done.returncode < 0 or is_transient,
        reason=reason,
    )

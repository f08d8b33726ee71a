"""Slurm's commands as they are called here: argv, a clean environment, a time-out, and errors told apart."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from clusterddp.errors import SlurmError

COMMAND_TIMEOUT_S = 30.0
_FOREIGN_PREFIXES = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SCANCEL_", "SQUEUE_", "SACCT_", "SINFO_", "PMI_", "PMIX_"),
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Where the cluster is, and who we are to it."""
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
"""In Slurm's words: it could not be asked. Source: slurm, src/common/slurm_errno.c; and seen on 22.05."""

_NEVER_ASKED = ("could not establish a configuration source",)
"""In Slurm's words: there is no cluster to ask; what came before it, about name servers, sounds transient."""


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for one of Slurm's commands.

    Inside of a job SLURM_* and the like would silently become options of the command; what tells where the cluster is
    stays.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN_PREFIXES)}
    return kept | {"LC_ALL": "C"}


def run_slurm(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = COMMAND_TIMEOUT_S, stdin: str | None = None
) -> str:
    """Run one of Slurm's commands and return its standard output.

    Raises: SlurmError: in Slurm's own words why it failed; `transient` when Slurm could not be asked, so that nothing
    is known of what was asked for.
    """
    return call_slurm(argv, environ=environ, timeout_s=timeout_s, stdin=stdin).stdout


def call_slurm(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = COMMAND_TIMEOUT_S, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; its standard error holds warnings then.

    Raises: SlurmError: as `run_slurm`.
    """
    environment = slurm_environment(environ)
    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None:
        raise SlurmError(
            f"{argv[0]}: no such command here; this machine is no part of a Slurm cluster",
            hint="submit from a login node of the cluster",
            transient=False,
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
        raise SlurmError(f"{argv[0]}: cannot be run: {error.strerror}", transient=False) from error
    if done.returncode != 0:
        words = _words(done.stderr, argv[0])
        raise SlurmError(
            f"{argv[0]}: {words or f'left with exit code {done.returncode}'}",
            # One that a signal ended was about to be answered: in a job, Slurm's TERM is for all processes.
            transient=done.returncode < 0 or _is_transient(words.lower()),
        )
    return done


def _words(text: str, program: str) -> str:
    """Put what a command complained about into one line, without its own name before each part."""
    lines = (line.strip().removeprefix(f"{program}: ").removeprefix("error: ") for line in text.splitlines())
    return "; ".join(line for line in lines if line)


def _is_transient(words: str) -> bool:
    return any(phrase in words for phrase in _TRANSIENT) and not any(phrase in words for phrase in _NEVER_ASKED)

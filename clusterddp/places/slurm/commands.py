"""Runs Slurm's commands: with a clean environment and a timeout, and with a typed reason when one fails.

And one running job, as `scontrol show job` prints it: its state, and the time that is left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from clusterddp.errors import SlurmError, SlurmReason
from clusterddp.run.stop import KILL_WAIT_S
from clusterddp.system.own_directory import SAFE_DIRECTORIES

COMMAND_TIMEOUT_S = 30.0
_TELL_EVERY_S = 1.0
_MOST_STDERR_BYTES = 1 << 20
_FOREIGN_PREFIXES = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SCANCEL_", "SQUEUE_", "SACCT_", "SINFO_", "PMI_", "PMIX_"),
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""They name the cluster and authenticate the user."""
_FOR_SBATCH = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "KRB5CCNAME", SAFE_DIRECTORIES}
)
"""The other variables of sbatch: it hands all that it has to the job (`--export=ALL`)."""
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


def slurm_environment(environ: Mapping[str, str], program: str = "") -> dict[str, str]:
    """Return the environment for one of Slurm's commands.

    Inside a job SLURM_* and the like would become options of the command; the variables that name the cluster stay.
    sbatch gets a minimal one, so that `--export=ALL` gives the job hardly more than nothing. `--export=NONE` would
    have the node run the user's login shell first: a start-up file that fails or waits there holds or ends the job.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN_PREFIXES)}
    if program == "sbatch":
        kept = {name: value for name, value in kept.items() if name in _KEPT | _FOR_SBATCH}
    return kept | {"LC_ALL": "C"}


def run_slurm(argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run one of Slurm's commands and return its standard output.

    Raises: SlurmError: the command failed; the message is Slurm's.
    """
    return call_slurm(argv, environ=environ, timeout_s=timeout_s).stdout


def call_slurm(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    stdin: str | None = None,
    directory: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return its result; standard error holds warnings.

    What sbatch writes to it while it waits for the controller is passed on at once. `directory`: it runs there, with
    the whole environment, as a user's own sbatch does.
    """
    environment = slurm_environment(environ, argv[0]) if directory is None else dict(environ)
    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None:
        raise SlurmError(
            f"{argv[0]}: no such command here; this machine is not part of a Slurm cluster",
            hint="submit from a login node of the cluster",
            transient=False,
            reason="no command",
        )
    # Unlike a pipe, it can be read while the command runs.
    said = os.memfd_create("stderr")
    try:
        with subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            env=environment,
            cwd=directory,
        ) as process:
            try:
                stdout = _await_answer(process, stdin or "", said, argv[0], timeout_s)
            except BaseException:
                process.kill()
                raise
        stderr = os.pread(said, _MOST_STDERR_BYTES, 0).decode(errors="replace")
    except OSError as error:
        message = f"{argv[0]}: cannot be run: {error.strerror}"
        raise SlurmError(message, transient=False, reason="cannot run") from error
    finally:
        os.close(said)
    done = subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)
    if done.returncode != 0:
        raise _failure(done, argv[0])
    return done


def _await_answer(process: subprocess.Popen[str], stdin: str, said: int, program: str, timeout_s: float) -> str:
    """Wait until a command ends; return its standard output. `said`: the file that has its standard error.

    Raises: SlurmError: it has not ended after `timeout_s`; the message quotes what it has written.
    """
    deadline, told = time.monotonic() + timeout_s, 0
    given: str | None = stdin
    while True:
        try:
            return process.communicate(given, timeout=min(_TELL_EVERY_S, max(0.0, deadline - time.monotonic())))[0]
        except subprocess.TimeoutExpired:
            given = None  # the process object has kept it
        text = os.pread(said, _MOST_STDERR_BYTES, 0).decode(errors="replace")
        if time.monotonic() >= deadline:
            quote = _one_line(text, program)
            raise SlurmError(f"{program}: no answer within {timeout_s:g} s" + (quote and f": {quote}"), transient=True)
        lines, end, _ = text[told:].rpartition("\n")
        if program == "sbatch" and lines:
            print(lines, file=sys.stderr, flush=True)
            told += len(lines + end)


def _one_line(stderr: str, program: str) -> str:
    """Put what a command wrote into one line, without its own name before each part."""
    lines = (line.strip().removeprefix(f"{program}: ").removeprefix("error: ") for line in stderr.splitlines())
    return "; ".join(line for line in lines if line)


def _failure(done: subprocess.CompletedProcess[str], program: str) -> SlurmError:
    """Make the error of a command from what it wrote."""
    text = _one_line(done.stderr, program)
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


END_TIME = "SLURM_JOB_END_TIME"
"""The variable in which tasks of Slurm 23.02 and newer find the end of their job, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobNow:
    """One job, as `scontrol show job` prints it."""

    state: str
    """Slurm's own word; COMPLETING hides how a job has ended until its last process has exited."""
    reason: str
    restarts: int
    """How often Slurm has started it again. It grows at the requeue, while the processes still end."""
    preempted: bool
    """True: it is being preempted: Slurm has warned it, or ends it."""

    @property
    def ends(self) -> bool:
        """True when Slurm ends its processes, or has ended them."""
        return self.state not in {"RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING"}


def show_job(job_id: str, environ: Mapping[str, str]) -> JobNow | None:
    """Ask the controller for a job; None when it has no such job, or no longer."""
    try:
        text = run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ)
    except SlurmError as error:
        if error.reason == "unknown job":
            return None
        raise
    return read_job(text)


def down_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the job of this environment that are down, as far as Slurm says so."""
    argv = ["sinfo", "--noheader", "--Node", "--states=down", "--format=%N"]
    try:
        return sorted(set(run_slurm([*argv, f"--nodes={environ['SLURM_JOB_NODELIST']}"], environ=environ).split()))
    except (SlurmError, KeyError):
        return []


def read_job(text: str) -> JobNow:
    """Read one line of `scontrol show job -o`."""
    # The name comes first, and may contain any text.
    _, found, rest = text.partition(" UserId=")
    state = _field("JobState", rest)
    if not found or not state:
        raise SlurmError(f"scontrol: show job: not understood: {text[:200].strip()}", transient=True)
    restarts = _field("Restarts", rest)
    return JobNow(
        state=state,
        reason=_field("Reason", rest),
        restarts=int(restarts) if restarts.isdecimal() and len(restarts) <= 9 else 0,
        preempted=_field("PreemptTime", rest) not in {"", "None", "Unknown"},
    )


def read_time_left_s(text: str) -> float | None:
    """Read from `scontrol show job -o` how many seconds the job may still run; None: no limit, or not known.

    Both times are Slurm's: EndTime, and StartTime + RunTime for the time of the answer. EndTime also includes an
    extension, and a reservation that ends earlier.
    """
    start, end = _time("StartTime", text), _time("EndTime", text)
    run_s = read_duration_s(_field("RunTime", text))
    if start is None or end is None or run_s is None or _field("SuspendTime", text) not in {"", "None", "Unknown"}:
        limit_s = read_duration_s(_field("TimeLimit", text))
        return None if limit_s is None or run_s is None else limit_s - run_s
    return (end - start).total_seconds() - run_s


def read_duration_s(text: str) -> int | None:
    """Read `2-03:04:05`, `03:04:05` or `04:05` in seconds; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def read_kill_wait_s(text: str) -> float:
    """Read from `scontrol show config` the seconds between SIGTERM and SIGKILL."""
    match = re.search(r"^KillWait\s*=\s*(\d{1,9}) sec", text, re.M)
    return float(match[1]) if match else KILL_WAIT_S


def _time(name: str, text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(_field(name, text)).replace(tzinfo=None)  # all are in Slurm's own zone
    except ValueError:
        return None


def _field(name: str, text: str) -> str:
    match = re.search(rf"\s{name}=(\S*)", text)
    return match[1] if match else ""

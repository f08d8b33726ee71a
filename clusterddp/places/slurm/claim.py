"""A start of a Slurm job: what it carries, and the attempt that it claims; before that it closes a stale attempt."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.control import END_TIME, read_time_left_s
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.attempts import (
    AttemptEnd,
    cancelled,
    close_attempt,
    end_run,
    failed,
    find_end,
    make_attempt,
    read_end,
)
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.job_tag import tag_of
from clusterddp.run.record import RunRecord, log_event, read_run
from clusterddp.system.files import is_file, read_json, write_json
from clusterddp.system.storage import retry_outage, set_storage_timeout

_ACCOUNTING_TIMEOUT_S = 5.0
_MAX_ROUNDS = 100
_KEPT_PREFIXES = ("SLURM_", "SLURMD_", "SPANK_", "_SLURM_SPANK_")
_KEPT = frozenset({"TMPDIR", "HOME", "USER", "LOGNAME", "SHELL", "KRB5CCNAME"})
"""Variables of the host or of this start of the job, which win over those of the submitting shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """One start of one job, as its batch script sees it."""

    job_id: str
    """As Slurm's commands take it: `123`, or `123_7` for the task of an array."""
    name: str
    restart_count: int
    """0 for a job's first start; Slurm adds 1 for each further start."""
    host: str

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> JobStart:
        """Read the start from the variables of a batch script.

        Raises: ClusterddpError: this is no batch script of a Slurm job.
        """
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id:
            raise ClusterddpError("SLURM_JOB_ID is not set: only Slurm runs this command, as the batch script of a job")
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=f"{environ.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}" if task else job_id,
            name=environ.get("SLURM_JOB_NAME", ""),
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    def carries(self, record: RunRecord) -> bool:
        """Say whether this job is the newest that the run was submitted as."""
        return tag_of(self.name) == record.job_tag or self.job_id == record.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A run, and the start of a job that runs it."""

    run: RunDir
    record: RunRecord
    start: JobStart
    restarts: int
    """How many further attempts the spec allows."""
    srun: tuple[str, ...]
    """argv without its last word, the number of the attempt."""
    environment: Mapping[str, str] = field(repr=False)
    """For srun, the tasks and a follow-up job: the submitting shell's variables, the secrets, this job's variables."""

    def may_begin(self, attempt: int) -> bool:
        """Say whether `restarts` allows this attempt; it limits all further attempts, whatever their cause."""
        return attempt - self.record.base_attempt <= self.restarts


def job_environment(run: RunDir, own: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the environment of srun and the tasks; this job's own variables win over submitted ones.

    Raises: ClusterddpError: a file with submitted variables is damaged.
    """
    submitted: dict[str, str] = {}
    for path in (run.job_environment, run.job_secrets):
        submitted |= read_json(path) or {}
    # SLURM_EXPORT_ENV is about the batch step; srun would apply it to its tasks.
    ours = {
        name: value
        for name, value in own.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and name != "SLURM_EXPORT_ENV"
    }
    return {"PATH": own.get("PATH", os.defpath)} | submitted | ours | {COOKIE: cookie(token, "task")}


def read_carried(run: RunDir, start: JobStart, environ: Mapping[str, str]) -> Carried:
    """Read the run that this start of a job runs.

    Raises: ClusterddpError: the run has no plan for Slurm.
    """
    record = read_run(run)
    plan = read_json(run.plan)
    if not plan or not plan.get("slurm"):
        raise ClusterddpError(f"{run.plan}: found no plan for Slurm")
    set_storage_timeout(plan["gang"].get("host_silence_s"))
    environment = job_environment(run, environ, record.token)
    if plan["slurm"].get("container"):
        environment = job_end(start.job_id, environment) | environment
    return Carried(
        run=run,
        record=record,
        start=start,
        restarts=int(plan["gang"]["restarts"]),
        srun=tuple(plan["slurm"]["srun"]),
        environment=environment,
    )


def job_end(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Slurm 23.02 and newer give tasks the job's end: containers have no scontrol."""
    try:
        left_s = read_time_left_s(run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ))
    except SlurmError:
        return {}
    return {} if left_s is None else {END_TIME: str(int(time.time() + left_s))}


def claim_attempt(carried: Carried) -> AttemptDir | None:
    """Claim the attempt that this start of the job runs; None when the run has ended, which is then recorded.

    Only the attempt that the job was submitted for may exist unclaimed. An earlier start of the job made any other; it
    may be cut off from the network and still run, so the number of its attempt is not used again.
    Raises: ClusterddpError, OSError: the run directory cannot be written.
    """
    run = carried.run
    for _ in range(_MAX_ROUNDS):
        last = _last_attempt(carried)
        end = find_end(last, carried.record.token)
        if end is not None and not end.will_restart:
            return None
        if is_file(run.cancel_file):
            end_run(run, cancelled("cancelled before it was started"))
        elif end is None:
            if last.number == carried.record.job_attempt and _write_claim(last, carried.start):
                return last
            _close_stale(carried, last)
        elif not carried.may_begin(last.number + 1):
            _refuse(carried, end)
        else:
            attempt = _claim_next(run, last.number + 1, carried.start)
            if attempt is not None:
                return attempt
    raise ClusterddpError(f"{run.path}: other starts of the job claimed the attempt {_MAX_ROUNDS} times")


def is_superseded(run: RunDir, attempt: AttemptDir) -> bool:
    """Say whether another start of the job has claimed a later attempt."""
    return any(later.is_claimed() for later in run.attempts() if later.number > attempt.number)


def _last_attempt(carried: Carried) -> AttemptDir:
    """Return the last attempt; a follow-up job makes the attempt that it was submitted for."""
    attempts = retry_outage(carried.run.attempts)
    return attempts[-1] if attempts else make_attempt(carried.run, carried.record.job_attempt)


def _claim_next(run: RunDir, number: int, start: JobStart) -> AttemptDir | None:
    """Make the attempt and claim it; None when another start of the job was faster."""
    try:
        attempt = make_attempt(run, number)
    except FileExistsError:
        time.sleep(0.1)
        return None
    return attempt if _write_claim(attempt, start) and read_end(attempt) is None else None


def _write_claim(attempt: AttemptDir, start: JobStart) -> bool:
    claim = dataclasses.asdict(start) | {"pid": os.getpid(), "time": time.time()}
    return write_json(attempt.claim, claim, exclusive=True)


def _close_stale(carried: Carried, attempt: AttemptDir) -> None:
    """Record the end of an attempt whose start of the job has ended, unless another process has just recorded one."""
    run, restarts = carried.run, carried.restarts
    host = str(_claim_for(run, attempt).get("host") or "an unknown host")
    reason = f"attempt {attempt.number} on {host} recorded no end, and Slurm has started the job again"
    state = _accounted_state(carried)
    if state:
        reason += f"; Slurm's accounting reports {state}"
    will_restart = carried.may_begin(attempt.number + 1)
    if not will_restart:
        reason += f"; {_used_up(restarts)}"
    end = failed(reason, host=host, log="launcher/tasks.log", goes_on=will_restart)
    if close_attempt(attempt, end, carried.record.token).is_first:
        log_event(run, "attempt_ended", attempt=attempt.number, outcome=end.outcome, reason=end.reason)


def _claim_for(run: RunDir, attempt: AttemptDir) -> dict[str, Any]:
    """Read the claim of an attempt; an attempt that restarted in place has the claim of an earlier one."""
    for earlier in reversed(run.attempts()):
        claim = read_json(earlier.claim) if earlier.number <= attempt.number else None
        if claim is not None:
            return dict(claim)
    return {}


def _refuse(carried: Carried, last: AttemptEnd) -> None:
    """End a run that Slurm has started although its restarts are used up."""
    reason = f"{_used_up(carried.restarts)}; its last attempt: {last.reason}"
    end_run(carried.run, AttemptEnd(outcome="FAILED", reason=reason, root_cause=last.root_cause))


def _used_up(restarts: int) -> str:
    return f"its restarts are used up ({restarts})" if restarts else "the spec allows it no restarts"


def _accounted_state(carried: Carried) -> str:
    """Ask accounting for the state of the job's last start; empty where it has none."""
    # -D: with the earlier starts of the same job, oldest first.
    argv = ["sacct", "-D", "-X", "-n", "-P", "-j", carried.start.job_id, "-o", "State"]
    try:
        states = run_slurm(argv, environ=carried.environment, timeout_s=_ACCOUNTING_TIMEOUT_S).split("\n")
    except SlurmError:
        return ""
    past = [state for state in states if state and state not in {"RUNNING", "PENDING"}]
    return past[-1] if past else ""

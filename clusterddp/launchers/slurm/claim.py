"""Which attempt a start of a Slurm job carries: it claims one, after it has closed a stale attempt."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launchers.slurm.carried import Carried, JobStart
from clusterddp.run.attempts import end_run, make_attempt
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, cancelled, failed, read_end, write_end
from clusterddp.run.record import log_event
from clusterddp.slurm.commands import run_slurm
from clusterddp.system.files import is_file, read_json, write_json
from clusterddp.system.storage import retry_outage

_ACCOUNTING_TIMEOUT_S = 5.0
_MAX_ROUNDS = 100


def claim_attempt(carried: Carried) -> AttemptDir | None:
    """Claim the attempt that this start of the job carries; None when the run has ended, which is then recorded.

    Only the attempt that the job was submitted for can be there unclaimed. Any other was made by an earlier start of
    the job, which may have been cut off and not have noticed yet: its number is not used again.
    Raises: ClusterddpError, OSError: the run directory cannot be written.
    """
    run = carried.run
    for _ in range(_MAX_ROUNDS):
        last = _last_attempt(carried)
        end = read_end(last)
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
    raise ClusterddpError(f"{run.path}: no attempt could be claimed: others are at it")


def is_superseded(run: RunDir, attempt: AttemptDir) -> bool:
    """Say whether another start of the job has claimed a later attempt."""
    return any(later.is_claimed() for later in run.attempts() if later.number > attempt.number)


def _last_attempt(carried: Carried) -> AttemptDir:
    """Return the last attempt; a follow-up job makes the one that it was submitted for itself."""
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
    """Record an end for an attempt whose start of the job is no more, unless somebody does so now."""
    run, restarts = carried.run, carried.restarts
    host = str(_claim_for(run, attempt).get("host") or "an unknown host")
    reason = f"attempt {attempt.number} on {host} ended without a word, and Slurm has started the job again"
    state = _accounted_state(carried)
    if state:
        reason += f"; Slurm's accounting calls it {state}"
    goes_on = carried.may_begin(attempt.number + 1)
    if not goes_on:
        reason += f"; {_used_up(restarts)}"
    end = failed(reason, host=host, log="launcher/tasks.log", goes_on=goes_on)
    if write_end(attempt, end):
        log_event(run, "attempt_ended", attempt=attempt.number, outcome=end.outcome, reason=end.reason)


def _claim_for(run: RunDir, attempt: AttemptDir) -> dict[str, Any]:
    """Read the claim under which an attempt ran: its own, or that of the one which it restarted in place."""
    for earlier in reversed(run.attempts()):
        claim = read_json(earlier.claim) if earlier.number <= attempt.number else None
        if claim is not None:
            return dict(claim)
    return {}


def _refuse(carried: Carried, last: AttemptEnd) -> None:
    """End a run that Slurm has started once more than it may be."""
    reason = f"{_used_up(carried.restarts)}; the last attempt ended so: {last.reason}"
    end_run(carried.run, AttemptEnd(outcome="FAILED", reason=reason, root_cause=last.root_cause))


def _used_up(restarts: int) -> str:
    return f"its restarts are used up ({restarts})" if restarts else "the spec allows it no restarts"


def _accounted_state(carried: Carried) -> str:
    """Ask what became of the job's last start; empty where no accounting can say."""
    # -D: with the earlier starts of the same job, oldest first.
    argv = ["sacct", "-D", "-X", "-n", "-P", "-j", carried.start.job_id, "-o", "State"]
    try:
        states = run_slurm(argv, environ=carried.environment, timeout_s=_ACCOUNTING_TIMEOUT_S).split("\n")
    except SlurmError:
        return ""
    past = [state for state in states if state and state not in {"RUNNING", "PENDING"}]
    return past[-1] if past else ""

"""What follows the end of an attempt: nothing, the next one by the same supervisors, or in another start of the job."""

from __future__ import annotations

from typing import Literal

from clusterddp.node.attempt import Attempt
from clusterddp.run.record import AttemptEnd

Sequel = Literal["nothing", "here", "another job"]


def sequel_of(attempt: Attempt, end: AttemptEnd, *, on_slurm: bool, final: bool, able: bool) -> Sequel:
    """Say what follows when the run still has restarts and nobody has cancelled it.

    `final`: something has happened after which nothing is started again; `able`: all supervisors are there to start it,
    and have confirmed that nothing of this attempt is left.
    """
    if end.outcome in {"COMPLETED", "CANCELLED"}:
        return "nothing"
    if attempt.job_ends:
        # Slurm takes the job away; what failed meanwhile, failed because of that or fails again.
        return "another job"
    if end.outcome == "STOPPED":
        return "here" if attempt.stopped_by_time_limit and able and not final else "nothing"
    if attempt.stop_reason is not None:
        return "nothing"
    cause = attempt.cause()
    if cause.restartable and able and not final:
        return "here"
    return "another job" if on_slurm and (cause.job_restartable or cause.restartable) and not final else "nothing"

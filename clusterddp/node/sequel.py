"""What follows the end of an attempt: nothing, the next one by the same supervisors, or in another start of the job."""

from __future__ import annotations

from typing import Literal

from clusterddp.node.attempt import Attempt
from clusterddp.run.record import AttemptEnd

Sequel = Literal["nothing", "here", "another job"]


def sequel_of(attempt: Attempt, end: AttemptEnd, *, on_slurm: bool, final: bool, all_gone: bool) -> Sequel:
    """Say what follows when the run still has restarts and nobody has cancelled it.

    `final`: something has happened after which these supervisors start nothing again; `all_gone`: every node has
    confirmed that nothing of the attempt is left.
    """
    if end.outcome in {"COMPLETED", "CANCELLED"}:
        return "nothing"
    if attempt.job_ends:
        # Slurm takes the job away; what failed meanwhile, failed because of that or fails again.
        return "another job"
    if end.outcome == "STOPPED":
        return "here" if attempt.stopped_by_time_limit and all_gone and not final else "nothing"
    if attempt.stop_reason is not None:
        return "nothing"
    cause = attempt.cause()
    if cause.restartable and all_gone and not final:
        return "here"
    return "another job" if on_slurm and (cause.job_restartable or cause.restartable) and not final else "nothing"

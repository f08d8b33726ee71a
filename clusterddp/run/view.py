"""The state of a run at one moment, with its attempt, its end and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from clusterddp.run.directory import AttemptDir
from clusterddp.run.outcome import AttemptEnd

if TYPE_CHECKING:
    from clusterddp.slurm.jobs import Job


class RunState(str, Enum):
    """The states of a run; their names are stable, scripts may rely on them."""

    PENDING = "PENDING"
    """In a queue, or being started."""
    RUNNING = "RUNNING"
    """Its ranks run."""
    REQUEUED = "REQUEUED"
    """An attempt has ended and the next one will start."""
    COMPLETED = "COMPLETED"
    """All ranks ended with exit code 0."""
    FAILED = "FAILED"
    """A rank, a process of clusterddp or a host failed; `root_cause` has the first one."""
    CANCELLED = "CANCELLED"
    """Cancelled, or stopped at a checkpoint."""
    LOST = "LOST"
    """Its processes are gone and recorded no end: a power cut, or Slurm forgot the job. `resume` continues it."""
    UNKNOWN = "UNKNOWN"
    """Its host or Slurm cannot be asked now; `reason` has the last known state."""

    @property
    def finished(self) -> bool:
        """True if the run will not continue by itself."""
        return self in {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.LOST}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The state of a run at one moment."""

    state: RunState
    attempt: int | None
    """The newest attempt; None if there is none."""
    end: AttemptEnd | None
    """How the newest attempt ended; None while it runs, or if no process could record it."""
    reason: str
    """Why it is in this state, in one line."""
    job: Job | None = None
    """On Slurm: its job, as Slurm reports it; None if the state follows from the files."""

    @property
    def finished(self) -> bool:
        return self.state.finished


def final_view(attempt: AttemptDir, end: AttemptEnd) -> RunView:
    """Return the state of a run whose newest attempt is its last."""
    state = RunState.CANCELLED if end.outcome == "STOPPED" else RunState(end.outcome)
    reason = end.reason
    if end.outcome == "STOPPED":
        reason = f"stopped at a checkpoint: {end.reason}; resume continues it"
        if end.warning:
            reason = f"ended with exit code 0 after the request to stop: {end.reason}"
    return RunView(state=state, attempt=attempt.number, end=end, reason=reason)


def spell_states(views: Iterable[RunView]) -> str:
    """Count the states of runs: `3 COMPLETED, 1 FAILED`."""
    counts = Counter(view.state.value for view in views)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())

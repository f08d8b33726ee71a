"""The status of a sweep: each of its runs in one line, and the number of runs in each state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from clusterddp.places.state import announce, read_state
from clusterddp.run.record import read_run
from clusterddp.run.state import RunState
from clusterddp.run.sweep import QueueRecord, SweepDir, read_queue, read_sweep
from clusterddp.view.status import RunSummary, read_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStatus:
    """A sweep at one moment, by its files and Slurm's answer."""

    sweep: str
    launcher: str
    job_id: str | None
    keys: tuple[str, ...]
    throttle: int | None
    created: float
    """Seconds since the epoch."""
    runs: tuple[RunSummary, ...]
    queue: QueueRecord | None = None
    """The queue that starts the runs; None: Slurm does."""

    @property
    def states(self) -> dict[str, int]:
        """Count the runs in each state, in the order of a run's life; a state that none has is left out."""
        counts = Counter(run.state for run in self.runs)
        return {state.value: counts[state] for state in RunState if counts[state]}

    @property
    def finished(self) -> bool:
        return all(run.state.finished for run in self.runs)

    def without_times(self) -> dict[str, Any]:
        """Return its JSON without what changes every second."""
        return self.to_json() | {"runs": [run.to_json() | {"times": None} for run in self.runs]}

    def to_json(self) -> dict[str, Any]:
        queue = self.queue
        return {
            "sweep": self.sweep,
            "launcher": self.launcher,
            "job_id": self.job_id,
            "keys": list(self.keys),
            "throttle": self.throttle,
            "queue": queue
            and {
                "state": queue.state,
                "pid": queue.process.pid,
                "host": queue.process.host,
                "waits_for": queue.waits_for or None,
                "ended": queue.ended,
                "why": queue.why or None,
            },
            "states": self.states,
            "runs": [run.to_json() for run in self.runs],
        }


def read_sweep_status(sweep: SweepDir) -> SweepStatus:
    """Read the status of a sweep; Slurm is asked once for all its runs."""
    record = read_sweep(sweep)
    runs = [(run, read_run(run)) for run in sweep.runs()]
    announce(runs)
    return SweepStatus(
        sweep=sweep.name,
        launcher=record.launcher,
        job_id=record.job_id,
        keys=record.keys,
        throttle=record.throttle,
        created=record.created_ns / 1e9,
        queue=None if record.launcher == "slurm" else read_queue(sweep),
        runs=tuple(read_summary(run, record=known, view=read_state(run, record=known)) for run, known in runs),
    )

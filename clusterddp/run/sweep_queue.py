"""The queue of a sweep as its files tell it: which process starts the runs, what it waits for, whether it is gone.

Of the processes that may take a run out of the queue (the queue itself, who resumes the run, who cancels it) the one
that writes the attempt's `claim.json` first has it.
"""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import ProcessIdentity
from clusterddp.run.sweep_dir import SweepDir
from clusterddp.run.view import RunState, RunView
from clusterddp.system.files import read_record, write_json

QueueState = Literal["RUNNING", "ENDED", "GONE", "UNKNOWN"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRecord:
    """`queue.json`: written by whoever starts the queue, then by the queue; a lock says whose turn it is."""

    process: dict[str, Any]
    """The `ProcessIdentity` of the queue."""
    is_starting: bool = False
    """The process is not the queue yet, but whoever starts it."""
    waits_for: str = ""
    """Why the next run is not started though its turn has come, in words."""
    ended: float | None = None
    """Seconds since the epoch."""
    why: str = ""
    """Why it ended."""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity.from_json(self.process)

    @property
    def state(self) -> QueueState:
        """Say whether it still starts runs; GONE: it was killed; UNKNOWN: it is on a machine that cannot be asked."""
        if self.ended is not None:
            return "ENDED"
        alive = self.identity.alive()
        return "UNKNOWN" if alive is None else "RUNNING" if alive else "GONE"


def write_queue(sweep: SweepDir, record: QueueRecord) -> None:
    write_json(sweep.queue, dataclasses.asdict(record))


def read_queue(sweep: SweepDir) -> QueueRecord | None:
    """Read who starts the runs of a sweep; None: nobody has begun to.

    Raises: ClusterddpError: the record cannot be read.
    """
    return read_record(QueueRecord, sweep.queue)


def claim(attempt: AttemptDir) -> bool:
    """Take an attempt that waits in a queue, to start it or to end it; False: somebody else has it."""
    return write_json(attempt.claim, dataclasses.asdict(ProcessIdentity.of()), exclusive=True)


def read_queued_state(run: RunDir, attempt: AttemptDir) -> RunView:
    """Tell the state of a run that the queue of its sweep has still to start."""
    sweep = SweepDir(run.path.parent)
    record = read_queue(sweep)
    state = record.state if record else "GONE"
    if record and state == "UNKNOWN":
        here = socket.gethostname()
        reason = f"waits in the queue of {sweep.name} on {record.identity.host}, which cannot be asked from {here}"
        return _view(RunState.UNKNOWN, attempt, reason)
    if record and state == "RUNNING":
        reason = "is being started" if attempt.claim.exists() else f"waits in the queue of {sweep.name}"
        return _view(RunState.PENDING, attempt, reason)
    what = f"has ended: {record.why}" if record and record.ended is not None else "is gone"
    return _view(
        RunState.LOST,
        attempt,
        f"was not started: the queue of {sweep.name} {what} (clusterddp resume {sweep.name} goes on)",
    )


def _view(state: RunState, attempt: AttemptDir, reason: str) -> RunView:
    return RunView(state=state, attempt=attempt.number, end=None, reason=reason)

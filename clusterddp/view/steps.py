"""The steps of a batch script, as status shows them."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Literal

from clusterddp.run.attempts import find_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import read_gang, read_start
from clusterddp.run.state import RunView
from clusterddp.run.steps import read_step, steps_with_ranks
from clusterddp.wire import Written

StepState = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "LOST"]
NO_STEPS = "no ranks were started by a command that clusterddp knows"
"""What is known of a batch script that has ended without a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatus(Written):
    """A command of a batch script that has started ranks."""

    step: str
    """Its number, from 0; `2.1`: torchrun has started the workers of step 2 once more."""
    command: str
    """The launcher and its options."""
    program: str
    """What each of its tasks runs."""
    line: int | None
    """Of the script, where it is known."""
    ranks: int
    nodes: int
    state: StepState
    """Like a run's; LOST: the job ended before it."""
    reason: str
    """How it ended, in one line."""
    started: float | None
    """Seconds since the epoch."""
    ended: float | None


def read_steps(run: RunDir, view: RunView, token: str) -> tuple[StepStatus, ...]:
    """Read the steps of the newest attempt; `token`: the run's."""
    if view.attempt is None:
        return ()
    return tuple(_read_step(step, view, view.attempt, token) for step in steps_with_ranks(run, view.attempt))


def gang_of(run: RunDir, attempt: AttemptDir | None = None) -> Gang | None:
    """Read the gang of a run in an attempt, or of a step; None: the step has not started its ranks."""
    try:
        return read_gang(run, attempt)
    except FileNotFoundError:
        if run.step is None:
            raise
        return None


def step_view(step: RunDir, view: RunView, token: str) -> RunView:
    """Return the state of a run as it is for one of its steps, which may have ended before; of a whole run its own."""
    if step.step is None or view.attempt is None:
        return view
    end = find_end(step.attempt(view.attempt), f"{token}.{step.step}")
    return dataclasses.replace(view, end=end or view.end)


def _read_step(step: RunDir, view: RunView, attempt: int, token: str) -> StepStatus:
    record, start, gang = read_step(step.attempt(attempt)), read_start(step.attempt(attempt)) or {}, gang_of(step)
    end = find_end(step.attempt(attempt), f"{token}.{step.step}")
    state: StepState = "PENDING" if not start else "RUNNING"
    if end is not None:
        state = "CANCELLED" if end.outcome == "STOPPED" else end.outcome
    elif view.finished or view.end is not None:
        state = "LOST"
    over = view.end.ended if view.end and state == "LOST" else None
    return StepStatus(
        step=str(step.step),
        command=shlex.join(record.command) if record else "",
        program=shlex.join(record.program) if record else "",
        line=record.line if record else None,
        ranks=gang.num_ranks if gang else 0,
        nodes=len(gang.nodes) if gang else 0,
        state=state,
        reason=end.reason if end else "",
        started=start.get("started", record.started if record else None),
        ended=end.ended if end else over,
    )

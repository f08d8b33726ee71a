"""The state of a run: derived from its records and from what its place answers, and stored nowhere.

A place is where the ranks of a run are: this machine, the hosts of an SSH run, a Slurm job, the queue of a sweep. A
recorded end decides alone. Without one, the place is asked whether a process or job is left that will record it. Every
rule that makes a state of records and answer is in `derive_state`; a place only answers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import UsageError
from clusterddp.run.attempts import AttemptEnd, find_end, read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import ProcessIdentity, RunRecord, Start, read_start
from clusterddp.run.steps import is_batch_script

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Job

START_GRACE_S = 5.0
"""How long an attempt may be without a process: one that starts it may be between two system calls, and a file that
another machine has written may not be visible yet."""
SUBMIT_GRACE_S = 300.0
"""How long a submit on another machine, whose process cannot be checked from here, may take."""
Life = Literal["alive", "queued", "ended", "unknown"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records of a run that its state follows from, read at one moment."""

    run: RunDir
    record: RunRecord
    attempt: AttemptDir | None
    """The newest attempt."""
    end: AttemptEnd | None
    """How the newest attempt ended."""
    start: Start | None
    """`start.json` of the newest attempt."""
    is_started: bool
    """True when ranks of the newest attempt were started."""
    is_claimed: bool
    """True when a process or a start of a job has claimed the newest attempt."""
    is_restart: bool
    """True when the attempt before the newest one ended to be restarted."""

    @property
    def has_final_end(self) -> bool:
        return self.end is not None and not self.end.will_restart

    @property
    def was_handed_over(self) -> bool:
        """True when the newest attempt no longer depends on the process that submitted it."""
        record, attempt = self.record, self.attempt
        if self.is_started or self.is_claimed or self.end:
            return True
        is_next = record.job_tag is not None and attempt is not None and attempt.number > record.job_attempt
        return record.job_id is not None and not is_next  # the record does not name the job of the next attempt yet

    @property
    def submitter(self) -> ProcessIdentity | None:
        return ProcessIdentity.from_json(self.record.submitter) if self.record.submitter else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a place knows of a run without a final end.

    `alive`: a process or job is left that will record its end. `queued`: it waits there. `ended`: nothing of it is left
    there. `unknown`: the place, or a part of it that matters, cannot be asked.
    """

    life: Life
    words: str = ""
    """What the place has seen, for the reason; of an `ended` run: what is gone."""
    notes: tuple[str, ...] = ()
    """Sentences that follow the reason."""
    outcome: RunState | None = None
    """How the run ended, if it has `ended` and the place knows; `words` then say why."""
    end: AttemptEnd | None = None
    """The end that is recorded at the place, if the run has `ended` and the records have not got it."""
    end_attempt: AttemptDir | None = None
    """The attempt of `end`; None: the newest one."""
    quiet_s: float | None = None
    """How long nothing of the run has changed, where several machines see its files."""
    job: Job | None = None


def read_records(run: RunDir, record: RunRecord) -> Records:
    """Read the records of a run; `record` is its own."""
    attempts = run.attempts()
    newest = attempts[-1] if attempts else None
    if newest is None:
        return Records(
            run=run,
            record=record,
            attempt=None,
            end=None,
            start=None,
            is_started=False,
            is_claimed=False,
            is_restart=False,
        )
    is_claimed = newest.is_claimed()  # this opens the directory, and so a network file system reads it again
    end = find_end(newest, record.token)
    before = read_end(run.attempt(newest.number - 1)) if newest.number and end is None else None
    start = read_start(newest)
    # These run as soon as their job does.
    is_script = is_claimed and (record.is_hold or is_batch_script(run))
    return Records(
        run=run,
        record=record,
        attempt=newest,
        end=end,
        start=start,
        is_started=is_script or start is not None or (newest.ranks.is_dir() and len(os.listdir(newest.ranks)) > 0),
        is_claimed=is_claimed,
        is_restart=before is not None and before.will_restart,
    )


def derive_state(records: Records, answer: Answer) -> RunView:
    """Return the state of a run without a final end, and the reason."""
    if answer.life == "ended":
        return _ended(records, answer)
    if answer.life == "unknown":
        return _view(RunState.UNKNOWN, records, answer, answer.words)
    will_repeat = records.end is not None or records.is_restart
    if answer.life == "queued":  # a job whose ranks were started before waits once more
        again = will_repeat or records.is_started or records.is_claimed
        state = RunState.REQUEUED if again else RunState.PENDING
    elif records.is_started and records.end is None:
        state = RunState.RUNNING
    else:
        state = RunState.REQUEUED if will_repeat else RunState.PENDING
    facts = [f"restarts after: {records.end.reason}"] if records.end else []
    facts += [answer.words] if answer.words else []
    return _view(state, records, answer, "; ".join(facts) or ("runs" if state is RunState.RUNNING else "starting"))


def _ended(records: Records, answer: Answer) -> RunView:
    """Return the state of a run of which its place has nothing left."""
    if answer.end:
        attempt = answer.end_attempt or records.attempt
        assert attempt is not None
        return final_view(attempt, answer.end)
    submitted = records.was_handed_over or answer.job is not None
    if not submitted and not records.record.queued:
        view = _being_submitted(records, answer)
        if view:
            return view
    if answer.outcome:
        return _view(answer.outcome, records, answer, answer.words)
    if records.end:
        reason = f"should have restarted after: {records.end.reason}; {answer.words}"
    elif records.is_started:
        reason = f"{answer.words}, and no process recorded how the run ended"
    elif submitted:
        reason = f"{answer.words}, and no rank was started"
    elif records.record.queued:
        reason = f"was never started: {answer.words}"
    else:
        submitter = records.submitter
        gone = f"no longer active on {submitter.host}" if submitter and submitter.alive() is None else "gone"
        reason = f"was never started: the process that submitted it is {gone}"
    return _view(RunState.LOST, records, answer, reason)


def _being_submitted(records: Records, answer: Answer) -> RunView | None:
    """Return the state of a run that depends on the process that submits it; None when that is gone."""
    submitter = records.submitter
    alive = submitter.alive() if submitter else False
    where = f" on {submitter.host}" if submitter and alive is None else ""
    if alive is None and answer.quiet_s is None:
        return _view(RunState.UNKNOWN, records, answer, f"is being submitted{where}, which cannot be asked from here")
    grace_s = START_GRACE_S if alive is False else SUBMIT_GRACE_S
    if not alive and (answer.quiet_s is None or answer.quiet_s >= grace_s):
        return None
    state = RunState.REQUEUED if records.is_restart else RunState.PENDING
    number = records.attempt.number if records.attempt else None
    return RunView(state=state, attempt=number, end=None, reason=f"is being submitted{where}")


def _view(state: RunState, records: Records, answer: Answer, reason: str) -> RunView:
    return RunView(
        state=state,
        attempt=records.attempt.number if records.attempt else None,
        end=records.end,
        reason="; ".join([reason, *answer.notes]),
        job=answer.job,
    )


def final_view(attempt: AttemptDir, end: AttemptEnd) -> RunView:
    """Return the state of a run whose newest attempt is its last."""
    state = RunState.CANCELLED if end.outcome == "STOPPED" else RunState(end.outcome)
    reason = end.reason
    if end.has_stopped:
        reason = f"stopped at a checkpoint: {end.reason}; resume continues it"
    elif end.outcome == "STOPPED" and end.warning:
        reason = f"ended with exit code 0 after the request to stop: {end.reason}"
    return RunView(state=state, attempt=attempt.number, end=end, reason=reason)


def refuse_resume(run: RunDir, view: RunView, *, instead: str, more: bool = False) -> None:
    """Refuse to resume a run that has completed or still runs; `instead`: the hint for a run that has completed.

    `more`: a completed run may go on, with values that give it more to do.
    """
    if view.state is RunState.COMPLETED and not more:
        raise UsageError(f"{run.name}: already completed", hint=instead)
    if not view.finished:
        raise UsageError(f"{run.name}: is {view.state.value} ({view.reason})", hint=f"clusterddp cancel {run.name}")


def spell_states(views: Iterable[RunView]) -> str:
    """Count the states of runs: `3 COMPLETED, 1 FAILED`."""
    counts = Counter(view.state.value for view in views)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())

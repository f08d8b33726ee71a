"""The Slurm job as the head sees it: when it ends, and why SIGTERM came.

Slurm sends the same SIGTERM for scancel, a requeue, a preemption and the time limit, without a reason; the controller
already knows the reason. A job that was requeued or preempted starts again later; one that was cancelled does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clusterddp.node.allocation import PATIENCE_S, Allocation, Answer
from clusterddp.node.attempt import Attempt
from clusterddp.node.log import log_line
from clusterddp.run.supervisors import SlurmOrder

_ASK_AGAIN_S = 10.0
_RETRY_S = 15.0
_AGAIN_S = 1.0
"""A SIGTERM that comes sooner after another one is the same."""
_STORM_S = 0.1
"""How long Slurm may take to signal every process of the job; the signal also kills our own scontrol."""
_SCRIPT_ENDED = ("JobLaunchFailure", "RaisedSignal", "NonZeroExitCode")
"""How Slurm's reasons begin when the batch script has ended before its ranks."""
_MARGIN_S = 3.0
"""The time to end a gang and to record its end, before Slurm kills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What Slurm is about to do to the job."""

    kind: Literal["goes_on", "cancelled", "time_is_up", "failed"]
    reason: str
    ends_by: float | None = None
    """When everything must be over, on the supervisor's clock; None: there is no limit."""
    node_is_down: bool = False
    """True when Slurm ends the job because it has lost a node."""


class JobWatch:
    """Watches one start of one Slurm job."""

    def __init__(self, slurm: SlurmOrder, allocation: Allocation, *, stop_lead_s: float) -> None:
        self.undecided = False
        """True from SIGTERM until the reason for it is known."""
        self._slurm = slurm
        self._allocation = allocation
        self._stop_lead_s = stop_lead_s
        self._lead_s: float | None = None
        """Set with the first answer: at most half of the time that was left then."""
        self._end: float | None = None
        self._ask_at = 0.0
        self._term_at: float | None = None
        self._time_reported = False
        self._last_error = ""
        allocation.ask_config()

    def on_term(self, now: float) -> None:
        """Note that SIGTERM came; a later `tick` returns why.

        A preemption sends it twice: as a warning, and when the grace after the warning is over.
        """
        if not self.undecided and (self._term_at is None or now > self._term_at + _AGAIN_S):
            self._term_at = now
            self.undecided = True
            self._ask_at = now + _STORM_S

    def tick(self, now: float) -> Intent | None:
        """Return a new intent of Slurm's."""
        answer = self._allocation.take()
        if answer is not None:
            intent = self._on_answer(answer, now)
            if intent is not None:
                return intent
        if self._ask_at <= now and not self._allocation.asking:
            self._ask_at = float("inf")
            self._allocation.ask()
        return self._look_at_clock(now)

    def _on_answer(self, answer: Answer, now: float) -> Intent | None:
        if answer.job is None:
            if answer.error != self._last_error:
                log_line(f"the controller could not be asked: {answer.error}")
            self._last_error = answer.error
            self._ask_at = now + _RETRY_S
            if answer.time_left_s is not None:
                self._learn_end(answer)
        # A job that ends has as EndTime when it was ended, a preempted one the end of its grace.
        elif not answer.job.ends and not answer.job.preempted:
            self._learn_end(answer)
        if not self.undecided or self._term_at is None:
            return None
        if answer.asked < self._term_at or (answer.job is None and now < self._term_at + PATIENCE_S):
            self._ask_at = now + _STORM_S
            return None
        self.undecided = False
        intent = self._explain(answer)
        if intent is None:
            self._term_at = None  # a user's kill: Slurm does not end the job
        return intent

    def _learn_end(self, answer: Answer) -> None:
        if answer.time_left_s is None:
            self._end = None
            return
        if self._lead_s is None:
            self._lead_s = min(self._stop_lead_s, answer.time_left_s / 2)
        self._end = answer.asked + answer.time_left_s
        self._ask_at = max(self._end - self._lead_s - _ASK_AGAIN_S, answer.asked + _ASK_AGAIN_S)

    def _look_at_clock(self, now: float) -> Intent | None:
        if self._end is None or self._lead_s is None or self._time_reported or now < self._end - self._lead_s:
            return None
        self._time_reported = True
        reason = f"the time limit of the job approaches, {max(0.0, self._end - now):.0f} s are left"
        # Slurm sends SIGTERM at the end, and SIGKILL after KillWait: those are left for what goes wrong.
        return Intent(kind="time_is_up", reason=reason, ends_by=self._end)

    def _is_at_end(self, moment: float) -> bool:
        return self._end is not None and moment >= self._end - 1.0

    def _explain(self, answer: Answer) -> Intent | None:
        """Find out why SIGTERM came; None: Slurm does not end the job."""
        assert self._term_at is not None
        job = answer.job
        kind: Literal["goes_on", "failed"] = "goes_on"
        if job is None and self._is_at_end(self._term_at):
            reason = "the time limit of the job is reached"
        elif job is None:
            reason = "SIGTERM came, and the controller could not be asked why"
        elif job.preempted:
            reason = "the job was preempted"
        elif job.restarts > self._slurm.restart_count:
            reason = "the job was requeued"
        elif not job.ends:
            return None
        elif job.reason == "TimeLimit" or self._is_at_end(self._term_at):
            reason = "the time limit of the job is reached"
        elif job.reason.startswith(_SCRIPT_ENDED):
            kind = "failed"
            reason = f"the job's batch script was killed, or ended before its ranks ({job.reason})"
        elif job.reason in {"None", ""}:
            return Intent(kind="cancelled", reason="cancelled (scancel)")
        else:
            reason = f"Slurm ended the job ({job.reason})"
        # A job that is warned of its preemption still runs; its time is in the configuration, not in the job.
        ends = job is None or job.ends
        ends_by = self._term_at + max(1.0, self._allocation.kill_wait_s - _MARGIN_S) if ends else None
        node_is_down = job is not None and job.reason == "NodeDown"
        return Intent(kind=kind, reason=reason, ends_by=ends_by, node_is_down=node_is_down)


def apply_intent(intent: Intent, attempt: Attempt) -> bool:
    """Note in the attempt what Slurm is about to do; True when its ranks have yet to be asked to stop."""
    log_line(f"Slurm: {intent.reason}")
    if intent.kind == "cancelled":
        attempt.cancel_reason = attempt.cancel_reason or intent.reason
        return False
    attempt.ends_by = min(attempt.ends_by, intent.ends_by or float("inf"))
    if attempt.stopped_by_people or (intent.kind == "time_is_up" and attempt.job_ends):
        return False
    if intent.kind == "failed":
        attempt.job_failure = intent.reason  # no process is left that starts the job again
    else:
        attempt.job_ends = True
    if attempt.stop_reason is None:
        return True
    attempt.stop_reason = intent.reason
    return False

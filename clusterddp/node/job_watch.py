"""What Slurm has in mind for the job, in the eyes of the head: when it ends, and why SIGTERM came.

Slurm sends the same SIGTERM for scancel, a requeue, a preemption and the time limit, and gives no reason; the
controller knows it by then. A job that was requeued or preempted goes on later; one that was cancelled does not.
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
"""How long Slurm may take to signal every process of the job; it hits our own questions, too."""
_SCRIPT_ENDED = ("JobLaunchFailure", "RaisedSignal", "NonZeroExitCode")
"""How Slurm's reasons begin when the batch script has ended before its ranks."""
_MARGIN_S = 3.0
"""What ending a gang and writing it down take, before Slurm kills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What Slurm is about to do."""

    kind: Literal["goes_on", "cancelled", "time_is_up", "failed"]
    words: str
    ends_by: float | None = None
    """Monotonic time by which everything must be over; None: as long as it takes."""
    node_is_down: bool = False
    """True when Slurm ends the job because it has lost a node."""


class JobWatch:
    """Watches one start of one job."""

    def __init__(self, slurm: SlurmOrder, allocation: Allocation, *, stop_lead_s: float) -> None:
        self.undecided = False
        """True while it is being found out why SIGTERM came."""
        self._slurm = slurm
        self._allocation = allocation
        self._stop_lead_s = stop_lead_s
        self._lead_s: float | None = None
        """Set with the first answer: at most half of what was left then."""
        self._end: float | None = None
        self._ask_at = 0.0
        self._term_at: float | None = None
        self._told_time = False
        self._complaint = ""
        allocation.ask_config()

    def on_term(self, now: float) -> None:
        """Take in that SIGTERM came; the answer to why is an intent of a later `tick`.

        It comes a second time when the grace after the warning of a preemption is over.
        """
        if not self.undecided and (self._term_at is None or now > self._term_at + _AGAIN_S):
            self._term_at = now
            self.undecided = True
            self._ask_at = now + _STORM_S

    def tick(self, now: float) -> Intent | None:
        """Return what has become known."""
        answer = self._allocation.take()
        if answer is not None:
            intent = self._hear(answer, now)
            if intent is not None:
                return intent
        if self._ask_at <= now and not self._allocation.asking:
            self._ask_at = float("inf")
            self._allocation.ask()
        return self._look_at_clock(now)

    def _hear(self, answer: Answer, now: float) -> Intent | None:
        if answer.job is None:
            if answer.error != self._complaint:
                log_line(f"the controller could not be asked: {answer.error}")
            self._complaint = answer.error
            self._ask_at = now + _RETRY_S
            if answer.time_left_s is not None:
                self._learn_end(answer)
        # EndTime of a job that ends is the moment at which it was ended, of a preempted one the end of its grace.
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
            self._term_at = None  # of no consequence: somebody's kill
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
        if self._end is None or self._lead_s is None or self._told_time or now < self._end - self._lead_s:
            return None
        self._told_time = True
        words = f"the time limit of the job approaches, {max(0.0, self._end - now):.0f} s are left"
        # Slurm's SIGTERM comes at the end, and KillWait after it SIGKILL; that is for what goes wrong.
        return Intent(kind="time_is_up", words=words, ends_by=self._end)

    def _is_at_end(self, moment: float) -> bool:
        return self._end is not None and moment >= self._end - 1.0

    def _explain(self, answer: Answer) -> Intent | None:
        """Say why SIGTERM came; None: Slurm does not end the job."""
        assert self._term_at is not None
        job = answer.job
        kind: Literal["goes_on", "failed"] = "goes_on"
        if job is None and self._is_at_end(self._term_at):
            words = "the time limit of the job is reached"
        elif job is None:
            words = "SIGTERM came, and the controller could not be asked why"
        elif job.preempted:
            words = "the job was preempted"
        elif job.restarts > self._slurm.restart_count:
            words = "the job was requeued"
        elif not job.ends:
            return None
        elif job.reason == "TimeLimit" or self._is_at_end(self._term_at):
            words = "the time limit of the job is reached"
        elif job.reason.startswith(_SCRIPT_ENDED):
            kind = "failed"
            words = f"the job's batch script was killed, or ended before its ranks ({job.reason})"
        elif job.reason in {"None", ""}:
            return Intent(kind="cancelled", words="cancelled (scancel)")
        else:
            words = f"Slurm ended the job ({job.reason})"
        # A job that is warned of its preemption still runs; for how long, the configuration says, not the job.
        ends = job is None or job.ends
        ends_by = self._term_at + max(1.0, self._allocation.kill_wait_s - _MARGIN_S) if ends else None
        node_is_down = job is not None and job.reason == "NodeDown"
        return Intent(kind=kind, words=words, ends_by=ends_by, node_is_down=node_is_down)


def bring_home(intent: Intent, attempt: Attempt) -> bool:
    """Note in the attempt what Slurm is about to do; True when its ranks have yet to be asked to stop."""
    log_line(f"Slurm: {intent.words}")
    if intent.kind == "cancelled":
        attempt.cancel_reason = attempt.cancel_reason or intent.words
        return False
    attempt.ends_by = min(attempt.ends_by, intent.ends_by or float("inf"))
    if attempt.stopped_by_people or (intent.kind == "time_is_up" and attempt.job_ends):
        return False
    if intent.kind == "failed":
        attempt.job_failure = intent.words  # nobody is left who would have the job started again
    else:
        attempt.job_ends = True
    if attempt.stop_reason is None:
        return True
    attempt.stop_reason = intent.words
    return False

"""The Slurm job as the head sees it: when it ends, and why SIGTERM came.

Slurm sends the same SIGTERM for scancel, a requeue, a preemption and the time limit, without a reason; the controller
already knows the reason. A job that was requeued or preempted starts again later; one that was cancelled does not.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clusterddp.errors import SlurmError
from clusterddp.node.head import Intent
from clusterddp.node.link import Clock
from clusterddp.node.log import log_line
from clusterddp.places.slurm.commands import (
    END_TIME,
    JobNow,
    read_job,
    read_kill_wait_s,
    read_time_left_s,
    slurm_environment,
)
from clusterddp.run.stop import KILL_WAIT_S
from clusterddp.run.supervisors import JobOrder

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
PATIENCE_S = 4.0
"""How long the controller may take to answer: its answer mostly decides whether ranks that end are restarted."""


class SlurmJobWatch:
    """Watches one start of one Slurm job."""

    def __init__(self, job: JobOrder, allocation: Allocation, *, stop_lead_s: float) -> None:
        self.undecided = False
        """True from SIGTERM until the reason for it is known."""
        self._job = job
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

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Read the answers of questions among the children that have ended."""
        self._allocation.on_exits(exits)

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
        kind: Literal["goes_on", "failed", "cancelled"] = "goes_on"
        if job is None and self._is_at_end(self._term_at):
            reason = "the time limit of the job is reached"
        elif job is None:
            reason = "SIGTERM came, and the controller could not be asked why"
        elif job.preempted:
            reason = "the job was preempted"
        elif job.restarts > self._job.restart_count:
            reason = "the job was requeued"
        elif not job.ends:
            return None
        elif job.reason == "TimeLimit" or self._is_at_end(self._term_at):
            reason = "the time limit of the job is reached"
        elif job.reason.startswith(_SCRIPT_ENDED):
            kind = "failed"
            reason = f"the job's batch script was killed, or ended before its ranks ({job.reason})"
        elif job.reason in {"None", ""}:
            kind, reason = "cancelled", "cancelled (scancel)"
        else:
            reason = f"Slurm ended the job ({job.reason})"
        # A job that is warned of its preemption still runs; its time is in the configuration, not in the job.
        ends = job is None or job.ends
        ends_by = self._term_at + max(1.0, self._allocation.kill_wait_s - _MARGIN_S) if ends else None
        node_is_down = job is not None and job.reason == "NodeDown"
        return Intent(kind=kind, reason=reason, ends_by=ends_by, node_is_down=node_is_down)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The controller's answer about the job."""

    job: JobNow | None
    """None: it does not answer, or does not know the job."""
    asked: float
    time_left_s: float | None = None
    """At the time of the question; None: no limit is known."""
    error: str = ""


class Allocation:
    """One job at the controller."""

    def __init__(self, job_id: str, environ: Mapping[str, str], clock: Clock) -> None:
        self.kill_wait_s = KILL_WAIT_S
        self._job_id = job_id
        self._environ = slurm_environment(environ)
        end = environ.get(END_TIME, "")
        self._end_time = float(end) if end.isdecimal() and len(end) <= 12 else None
        self._clock = clock
        self._question: _Command | None = None
        self._config: _Command | None = None
        self._answer: Answer | None = None

    @property
    def asking(self) -> bool:
        return self._question is not None

    def ask(self) -> None:
        """Ask for the job, unless a question is under way."""
        if self._question is not None:
            return
        now = self._clock.now
        try:
            self._question = _Command(["scontrol", "show", "job", "-o", self._job_id], self._environ, now)
        except OSError as error:  # in a container there is no scontrol
            left_s = None if self._end_time is None else self._end_time - time.time()
            self._answer = Answer(job=None, asked=now, time_left_s=left_s, error=str(error))

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Read the answers of the questions among the children that have ended."""
        if self._config is not None and self._config.pid in exits:
            self.kill_wait_s = read_kill_wait_s(self._config.read()[0])
            self._config = None
        question = self._question
        if question is not None and question.pid in exits:
            self._question = None
            out, err = question.read()
            asked = question.begun
            try:
                self._answer = Answer(job=read_job(out), asked=asked, time_left_s=read_time_left_s(out))
            except SlurmError as error:
                self._answer = Answer(job=None, asked=asked, error=" ".join(err.split()) or error.message)

    def take(self) -> Answer | None:
        """Return the answer to the last question, once."""
        if self._question is not None and self._clock.now - self._question.begun > PATIENCE_S:
            self._question.give_up()
            self._answer = Answer(job=None, asked=self._question.begun, error=f"no answer within {PATIENCE_S:g} s")
            self._question = None
        answer, self._answer = self._answer, None
        return answer

    def ask_config(self) -> None:
        """Ask how Slurm is configured; its defaults count until the answer."""
        try:
            self._config = _Command(["scontrol", "show", "config"], self._environ, self._clock.now)
        except OSError:
            self._config = None


class _Command:
    """One of Slurm's commands under way; the supervisor's loop reaps all children, and reports its end."""

    def __init__(self, argv: list[str], environ: Mapping[str, str], now: float) -> None:
        program = shutil.which(argv[0], path=environ.get("PATH"))
        if program is None:
            raise FileNotFoundError(f"{argv[0]} is not on this host")
        self.begun = now
        self._process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def read(self) -> tuple[str, str]:
        """Return the standard output and error of a command that has ended."""
        self._process.returncode = 0  # the supervisor's loop has reaped it
        streams = (self._process.stdout, self._process.stderr)
        out, err = (stream.read().decode(errors="replace") if stream else "" for stream in streams)
        self._close()
        return out, err

    def give_up(self) -> None:
        """Kill it and ignore its answer."""
        self._process.kill()
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

"""Failover of the head: when it is lost, the other nodes end their ranks and make sure that the end is recorded.

Without Slurm each records the loss in its own run directory. On Slurm one of them records the end and starts the job
again, because the head's host mostly ran the batch script, too. They take turns by node rank, and the first one that
writes the end goes on. A node that was cut off itself cannot ask the controller, and writes nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.network.interface import is_cut_off
from clusterddp.node.allocation import Allocation, Answer
from clusterddp.node.history import log_end, record_end
from clusterddp.node.log import log_line
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.rendezvous.connection import Loss
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, failed_by, loss_of_node, read_end
from clusterddp.run.supervisors import SlurmOrder, SupervisorOrder
from clusterddp.slurm.commands import run_slurm
from clusterddp.slurm.identity import tag_of
from clusterddp.system.files import is_file

PROCESS_PATIENCE_S = 10.0
"""How long the guard of a head that was killed has for its work when its host is up."""
GUARD_PATIENCE_S = 4.0
"""The same where each node records the end itself."""
_TURN_S = 0.4
"""The time between the turns of two nodes."""
_GIVE_UP_S = 60.0
_ASK_AGAIN_S = 2.0
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOfHead:
    """The loss of the head, as one node sees it."""

    why: Loss
    interface: str | None
    """The interface that carries the gang's traffic on this host."""


class HeadFailover:
    """One node's part, from the loss of the head until it is known that the end is recorded."""

    def __init__(
        self, order: SupervisorOrder, slurm: SlurmOrder, allocation: Allocation, environ: Mapping[str, str]
    ) -> None:
        self._order = order
        self._slurm = slurm
        self._allocation = allocation
        self._environ = environ
        self._began: float | None = None
        self._turn_at: float | None = None
        self._ask_at = 0.0

    def step(self, attempt: AttemptDir, loss: LossOfHead, *, idle: bool, now: float) -> bool:
        """Do what is due; True when nothing is left to do. `idle`: nothing of this node's ranks is left."""
        if self._began is None or self._turn_at is None:
            self._began = now
            patience_s = 0.0 if loss.why.kind == "host_silent" else PROCESS_PATIENCE_S
            self._turn_at = now + patience_s + _TURN_S * (self._order.node.node_rank - 1)
        if not idle or now < self._turn_at:
            return idle and _has_end(attempt)
        if _has_end(attempt) or now - self._began > _GIVE_UP_S:
            return True
        answer = self._allocation.take()
        if answer is None or answer.job is None:
            if answer is not None:
                log_line(f"the controller could not be asked: {answer.error}")
                self._ask_at = now + _ASK_AGAIN_S
            if now >= self._ask_at:
                self._allocation.ask()
            return False
        self._take_over(attempt, loss, answer)
        return True

    def _take_over(self, attempt: AttemptDir, loss: LossOfHead, answer: Answer) -> None:
        job, slurm = answer.job, self._slurm
        assert job is not None
        if job.restarts != slurm.restart_count or (slurm.job_tag and tag_of(job.name) != slurm.job_tag):
            log_line("Slurm has started the job again already, or the job is not ours: its next start records the end")
            return
        goes_on = self._order.restarts_left_after(attempt.number) and not is_file(self._order.run.cancel_file)
        end = _end_without_head(self._order, attempt, loss, goes_on=goes_on)
        record = record_end(attempt, end, self._order.gang.token)
        if not record.is_first:
            return
        end = record.end
        log_end(self._order.run, attempt.number, end)
        if end.needs_job:
            self._start_job_again(attempt)
        else:
            self._cancel_job()

    def _start_job_again(self, attempt: AttemptDir) -> None:
        """Run the command that the job's batch script has passed on for this."""
        environment = dict(self._environ) | {COOKIE: cookie(self._order.gang.token, "task")}
        try:
            again = subprocess.Popen(
                [sys.executable, *self._slurm.start_again, str(attempt.number)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            log_line(f"the job cannot be started again: {error}")
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            again.wait(_GIVE_UP_S)

    def _cancel_job(self) -> None:
        with contextlib.suppress(SlurmError):
            run_slurm(["scancel", self._slurm.job_id], environ=self._environ)


class LossRecorder:
    """One node's part without Slurm: it records the loss of the head in its own run directory.

    The record of the head or of its guard is more exact, but the head's host may be gone for good.
    """

    def __init__(self, order: SupervisorOrder) -> None:
        self._order = order
        self._record_at: float | None = None

    def step(self, attempt: AttemptDir, loss: LossOfHead, *, idle: bool, now: float) -> bool:
        """Do what is due; True when nothing is left to do. `idle`: nothing of this node's ranks is left."""
        if self._record_at is None:
            # Hosts may share the directory: the guard of the head records the end first.
            self._record_at = now + (0.0 if loss.why.kind == "host_silent" else GUARD_PATIENCE_S)
        if not idle or (now < self._record_at and not _has_end(attempt)):
            return False
        end = _end_without_head(self._order, attempt, loss, goes_on=False)
        record_end(attempt, end, self._order.gang.token)
        return True


class TakeoverWatch:
    """Looks for later attempts that another start of the job has claimed; restarts in place claim nothing."""

    def __init__(self, run: RunDir, first_attempt: int) -> None:
        self._run = run
        self._first_attempt = first_attempt
        self._look_at = 0.0
        self._seen = False

    def look(self, now: float) -> int | None:
        """Return the number of such an attempt, once."""
        if self._seen or now < self._look_at:
            return None
        self._look_at = now + _LOOK_EVERY_S
        with contextlib.suppress(OSError):
            for attempt in self._run.attempts():
                if attempt.number > self._first_attempt and attempt.is_claimed():
                    self._seen = True
                    return attempt.number
        return None


def _has_end(attempt: AttemptDir) -> bool:
    """Return whether an end is recorded; storage that is away counts as no, and the next step reads again."""
    try:
        return read_end(attempt) is not None
    except OSError:
        return False


def _end_without_head(order: SupervisorOrder, attempt: AttemptDir, loss: LossOfHead, *, goes_on: bool) -> AttemptEnd:
    lost, what = order.gang.nodes[0], f"node 0 on {order.gang.nodes[0].host} is lost: {loss.why}"
    if loss.why.kind == "given_up":
        lost, what = order.node, f"node {order.node.node_rank} on {order.node.host} is lost: {loss.why}"
    elif loss.why.kind == "host_silent" and is_cut_off(loss.interface):
        lost, what = order.node, f"{order.node.host} is cut off, its {loss.interface} is down"
    started = attempt.ranks.is_dir() and any(attempt.ranks.glob("*.json"))
    cause = loss_of_node(
        what,
        host=lost.host,
        ranks=lost.ranks,
        ranks_in_words=spell_ranks(order.gang.carried_by(lost.ranks)),
        attempt=attempt if started else None,
    )
    return failed_by(cause, goes_on=goes_on)

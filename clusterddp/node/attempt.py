"""One attempt as the head sees it: which failure is the cause, whether it is over, how it ended, and what follows.

Nothing here touches a process, a file or a clock; the head passes in the events and acts on the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from clusterddp.node.failure import CASCADE, CERTAIN, OWN, Failure, RankEnd, failure_of
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.attempts import AttemptEnd, RootCause, cancelled, failed, failed_by
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang

SETTLE_S = 0.5
"""How long a connection loss waits for the failure that may be its cause."""
SETTLE_OWN_S = 0.15
"""How long an exception waits for a signal to another rank that may be its cause."""
SETTLE_SPAWNED_S = 4.0
"""`SETTLE_S` where programs start their ranks: a program ends its other ranks before it reports which one failed."""

NEVER_ASKED = "the program exited with code 0 and never asked clusterddp.should_stop(): it may have completed"
"""Of ranks that ended well after a request to stop, and whose code names the stop file: a look at it is not seen."""
_JUDGE_QUIET_S = 1.0

Restart = Literal["none", "here", "another job"]
"""Who starts the next attempt: no process, the same supervisors, or another start of the batch job."""


class Attempt:
    """One attempt: its ends of ranks, its failures and requests to stop."""

    def __init__(self, run: RunDir, gang: Gang, number: int) -> None:
        self.number = number
        self.begun: float | None = None
        """When ranks were ordered to start; None: not yet."""
        self.stop_reason: str | None = None
        self.stopped_by_time_limit = False
        self.cancel_reason: str | None = None
        self.stopped_by_people = False
        """True when the request to stop cannot come from the batch system."""
        self.asks = gang.entry.always_stops
        """True when the program is known to take part in the stop contract."""
        self.job_ends = False
        """The batch job ends, and the run may go on in another start of it."""
        self.job_failure: str | None = None
        """Why the batch job has failed although its ranks have not."""
        self.ends_by = float("inf")
        """When the ranks that are left have to be ended, because the batch system kills them soon after."""
        self.connected = False
        """True when a node has seen a connection to the master's address and port, or cannot see any."""
        self.running: set[int] = {rank for node in gang.nodes for rank in node.ranks}
        self._run = run
        self._gang = gang
        self._ends: dict[int, RankEnd] = {}
        self._failures: list[Failure] = []
        self._decide_at = float("inf")
        self._decided = False
        self._stop_deadline = float("inf")
        self._overdue: Failure | None = None
        """Set when the ranks have not ended in time after a request to stop."""

    @property
    def settling(self) -> bool:
        """True between the first failure and the verdict."""
        return bool(self._failures)

    @property
    def begun_in(self) -> AttemptDir | None:
        """The attempt's directory; None: no rank was ordered to start."""
        return None if self.begun is None else self._run.attempt(self.number)

    def rank_ended(self, end: RankEnd, now: float) -> None:
        """Take in the end of a rank."""
        self.running.discard(end.rank)
        self._ends[end.rank] = end
        if end.exit_code != 0 and (not end.on_order or _may_be_earlier(end)):
            self.fail(failure_of(end, self._gang), now)

    def fail(self, failure: Failure, now: float) -> None:
        """Take in a failure; the verdict is due after a moment in which its cause may be reported.

        After the decision only a connection loss still gives way to a failure that may be its cause.
        """
        if self._decided and min((failure.weight for failure in self._failures), default=CERTAIN) <= OWN:
            return
        self._failures.append(failure)
        lost = SETTLE_SPAWNED_S if self._gang.entry.spawns else SETTLE_S
        wait = {CERTAIN: 0.0, OWN: SETTLE_OWN_S}.get(failure.weight, lost)
        self._decide_at = min(self._decide_at, now + wait)

    def stop(self, reason: str, now: float, *, time_limit: bool = False) -> bool:
        """Note that the ranks are asked to stop; False when they already were."""
        if self.stop_reason is not None:
            return False
        self.stop_reason, self.stopped_by_time_limit = reason, time_limit
        self._stop_deadline = now + self._gang.stop_grace_s
        return True

    def time_limit_approaches(self, now: float) -> bool:
        """Return whether to stop because of the time limit.

        A limit shorter than twice the lead is stopped at its half, so that the ranks make some progress.
        """
        limit = self._gang.time_limit_s
        if limit is None or self.begun is None or self.stop_reason is not None:
            return False
        return now >= self.begun + limit - min(self._gang.stop_lead_s, limit / 2)

    def check_time(self, now: float) -> None:
        """Fail the attempt when its ranks have not stopped in time."""
        if self.begun is None or self._failures or not self.running:
            return
        rank = min(self.running)
        what = None
        if now >= self._stop_deadline:
            what = f"did not stop within {self._gang.stop_grace_s:g} s of the request ({self.stop_reason})"
            what += "" if self.asks else "; the program never asked clusterddp.should_stop()"
        elif self._gang.time_limit_s is not None and now >= self.begun + self._gang.time_limit_s:
            what = f"did not stop before the time limit of {self._gang.time_limit_s:g} s"
        elif now >= self.ends_by:
            what = f"did not stop before the job is taken away ({self.stop_reason})"
        if what is not None:
            host = self._gang.node_of(rank).host
            failure = Failure.at(host, f"{self._spell(self.running)} {what}", rank=rank)
            self._overdue = failure if now >= self._stop_deadline else None
            self.fail(failure, now)

    def is_about_to_be_killed(self, now: float) -> bool:
        """Return whether what is left is soon killed: a node without heartbeats is lost then, which is the cause."""
        return now >= self.ends_by - _JUDGE_QUIET_S

    def is_over(self, now: float) -> bool:
        """Return whether the verdict is due: the ranks that are left are then ended."""
        if self.cancel_reason is not None or now >= self._decide_at or not self.running:
            return True
        return self.begun is None and self.stop_reason is not None

    def decide(self) -> None:
        """Note that the gang is being ended: later failures follow from that."""
        self._decided = True

    def verdict(self, *, stop_confirmed: bool) -> AttemptEnd:
        """Return how the attempt ended. `stop_confirmed`: its program may have ended because of the request to stop."""
        if self.cancel_reason is not None:
            return cancelled(self.cancel_reason)
        if self._overdue is not None and self.stopped_by_people and self.cause() is self._overdue:
            return cancelled(f"ended without a checkpoint: {self._overdue.cause.error}")
        if self._failures:
            return failed_by(self._with_log(self.cause().cause))
        if self.stop_reason is not None and (stop_confirmed or self.begun is None):
            return self._stopped(self.stop_reason)
        reason = f"{self._spell(self._ends)} exited with code 0"
        reason += f", not because of the request to stop ({self.stop_reason})" if self.stop_reason else ""
        return AttemptEnd(outcome="COMPLETED", reason=reason)

    def warn_of_apart(self, end: AttemptEnd, address: str, port: int) -> str:
        """Return a warning where ranks on several hosts ended well and none has connected to the master.

        Ranks that meet by a file make no such connection.
        """
        gang = self._gang
        on_one_host = len({node.host for node in gang.nodes}) == 1
        if end.outcome != "COMPLETED" or self.connected or on_one_host or gang.entry.init == "file":
            return ""
        num_ranks = gang.num_ranks
        return f"no rank connected to {address}:{port}; each of the {num_ranks} ranks may have trained alone"

    def _stopped(self, reason: str) -> AttemptEnd:
        if self.job_failure is None:
            warning = "" if self.asks or self.begun is None else NEVER_ASKED
            return AttemptEnd(outcome="STOPPED", reason=reason, warning=warning)
        end = failed(self.job_failure, host=self._gang.nodes[0].host, log="launcher/job.log")
        stopped = "" if self.begun is None else "; the ranks stopped at a checkpoint"
        return dataclasses.replace(end, reason=f"{self.job_failure}{stopped}")

    def cause(self) -> Failure:
        """Return the failure that the others follow from: the one of the lowest weight, of equal ones the first."""
        first = min(self._failures, key=lambda failure: failure.weight)
        leavers = [end.rank for end in self._ends.values() if end.exit_code == 0 and not end.on_order]
        if first.weight != CASCADE or not leavers:
            return first
        rank = leavers[0]
        host = self._gang.node_of(rank).host
        what = f"rank {rank} on {host} exited with code 0 while others still needed it; then {first.cause.error}"
        cause = RootCause(rank=rank, host=host, exit_code=0, error=what, log=None)
        return Failure(cause=cause, restartable=True)

    def _spell(self, ranks: Iterable[int]) -> str:
        return spell_ranks(self._gang.carried_by(ranks))

    def _with_log(self, cause: RootCause) -> RootCause:
        """Add the log of the rank that failed; no rank failed where none had started."""
        if cause.rank is None or self.begun is None:
            return dataclasses.replace(cause, rank=None)
        log = self._run.attempt(self.number).stderr(cause.rank).relative_to(self._run.path)
        return dataclasses.replace(cause, log=str(log))


class Restarts:
    """Decides after each attempt whether another one follows, and which process starts it."""

    def __init__(self, gang: Gang, *, first_attempt: int, first_restart: int, in_job: bool) -> None:
        self._gang = gang
        self._first_attempt = first_attempt
        self._first_restart = first_restart
        self._in_job = in_job
        self.final = False
        """True once something has happened after which no process starts another attempt."""
        self.incomplete = False
        """True once a node or a task is lost: these supervisors start no other attempt."""

    def before(self, attempt: Attempt) -> int:
        """Return how many restarts lie before an attempt."""
        return self._first_restart + attempt.number - self._first_attempt

    def after(self, attempt: Attempt, end: AttemptEnd, *, all_gone: bool) -> Restart:
        """Decide what follows `end`, when no user has cancelled the run.

        `all_gone`: all supervisors have confirmed that nothing of the attempt is left.
        """
        able = all_gone and not self.incomplete
        if end.outcome in {"COMPLETED", "CANCELLED"} or self.before(attempt) >= self._gang.restarts:
            return "none"
        if attempt.job_ends:
            # The job ends: a failure meanwhile follows from that, or comes again.
            return "another job"
        if end.outcome == "STOPPED":
            return "here" if attempt.stopped_by_time_limit and able and not self.final else "none"
        cause = attempt.cause() if attempt.settling else None
        # A node that is lost after the job's SIGTERM still counts: a job step ends so when a task was killed.
        stopped = attempt.stop_reason is not None and (
            attempt.stopped_by_people or not (cause and cause.job_restartable)
        )
        if cause is None or stopped or self.final:
            return "none"
        if cause.restartable and able:
            return "here"
        return "another job" if self._in_job and (cause.job_restartable or cause.restartable) else "none"


def _may_be_earlier(end: RankEnd) -> bool:
    """Return whether a rank that ended on order may have failed before the order.

    A rank with an exception of its own may still run its cleanup while the others have lost the connection to it.
    """
    return (
        end.signal is None
        and end.weight == OWN
        and end.error is not None
        and not end.error.startswith(("SystemExit", "KeyboardInterrupt"))
    )

"""One attempt as the head sees it: which rank's end is the cause, whether it is over, how it ended, and what follows.

When one rank of a gang dies the others fail soon after, because they lose the connection to it, and the failure that is
seen first is not always the first one. So each end of a rank has a weight: 0 cannot follow from another rank's end.

`Attempt` and `Restarts` touch no process, file or clock; the head passes in the events and acts on the results.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable

from clusterddp.facts.memory import explain_limit, explain_oom_kill
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.attempts import (
    NOT_STARTED,
    AttemptEnd,
    cancelled,
    failed,
    failed_by,
    one_line,
    read_error_file,
    signal_name,
)
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import RankEnd, Restart
from clusterddp.system.files import read_tail

CERTAIN = 0
"""A signal from outside, a lost node: it does not follow from another rank's end."""
OWN = 1
"""An exception or exit code of the rank's own."""
CONNECTION = 2
"""A connection that broke, perhaps not one to another rank."""
CASCADE = 3
"""A collective that failed because another rank had ended, or did not take part."""

_CONNECTION = re.compile(r"Connection (?:closed|reset|refused|aborted)|Broken pipe|ConnectionError|EOFError", re.I)
# The errors of torch 2.13's gloo, TCPStore and NCCL on the ranks that are left (gloo's and the store's measured here,
# with 4 ranks in an all_reduce loop; NCCL's from nccl.h and ProcessGroupNCCL.cpp).
_CASCADE = re.compile(
    r"gloo[/\\]transport|ncclRemoteError|DistNetworkError|DistStoreError|Connection closed by (?:remote )?peer"
    r"|remote process exit|Watchdog caught collective|NCCL watchdog|(?:recvValue|sendBytes|recvVector) failed"
    r"|failed to recv, got 0 bytes|wait timeout after|Timed out (?:after|waiting)|monitoredBarrier",
    re.I,
)
_LINES = 20
_HEAD = "Traceback (most recent call last):"
_HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1"
_TORCHRUNS = "ChildFailedError"
_REPORTS = re.compile(rf"torch\.distributed\.elastic\S*{_TORCHRUNS}|subprocess\.CalledProcessError: |{_HYDRA}")
"""The last words of torchrun, accelerate and Hydra: that there was an exception, which is printed before them."""
_AFTERWARDS = re.compile(r"^wandb: |resource_tracker|^ *warnings\.warn\(|\bdestroy_process_group\(\) was not called")
"""What is printed when a process exits, whatever it failed of."""

SETTLE_S = 0.5
"""How long a connection loss waits for the failure that may be its cause."""
SETTLE_OWN_S = 0.15
"""How long an exception waits for a signal to another rank that may be its cause."""
SETTLE_SPAWNED_S = 4.0
"""`SETTLE_S` where programs start their ranks: a program ends its other ranks before it reports which one failed."""

NEVER_ASKED = "the program exited with code 0 and never asked clusterddp.should_stop(): it may have completed"
"""Of ranks that ended well after a request to stop, and whose code names the stop file: a look at it is not seen."""
_JUDGE_QUIET_S = 1.0


class Attempt:
    """One attempt: its ends of ranks, its failures and requests to stop."""

    def __init__(self, run: RunDir, gang: Gang, number: int) -> None:
        self.number = number
        self.begun: float | None = None
        """When ranks were ordered to start; None: not yet."""
        self.missing = ""
        """What the start waits for; empty: nothing."""
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
        self.noticed: float | None = None
        """When the first failure was noticed, in seconds since the epoch."""
        self.silent_s = 0.0
        """How long that had given no sign of life by then."""
        self.meets: bool | None = None
        """Whether a rank was seen in a collective; None: it is not known."""
        self.regroups = False
        """True when the ranks were asked to stop so that more nodes can take part in the next attempt."""
        self.running: set[int]
        self.gang = gang
        self._run = run
        self._ends: dict[int, RankEnd] = {}
        self._failures: list[RankEnd] = []
        self._decide_at = float("inf")
        self._decided = False
        self._stop_deadline = float("inf")
        self._overdue: RankEnd | None = None
        """Set when the ranks have not ended in time after a request to stop."""

    @property
    def gang(self) -> Gang:
        """The nodes that take part, and their ranks."""
        return self._gang

    @gang.setter
    def gang(self, gang: Gang) -> None:
        self._gang = gang
        self.running = {rank for node in gang.nodes for rank in node.ranks}

    @property
    def unchanged(self) -> bool:
        """True for the program of a batch script, which is not ended for a stop."""
        return self._gang.entry.unchanged

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
        assert end.rank is not None
        self.running.discard(end.rank)
        self._ends[end.rank] = end
        # A rank with an exception of its own may still run its cleanup while the others have lost the connection to it.
        of_its_own = end.signal is None and end.weight == OWN and bool(end.error)
        may_be_earlier = of_its_own and not end.error.startswith(("SystemExit", "KeyboardInterrupt"))
        if end.exit_code != 0 and (not end.on_order or may_be_earlier):
            who = f"rank {end.rank} on {end.host}"
            if self._gang.entry.spawns:
                who = f"the program of {self._spell([end.rank])} on {end.host}"
            self.fail(dataclasses.replace(end, error=end.spell(who), restart="here"), now)

    def fail(self, failure: RankEnd, now: float, *, silent_s: float = 0.0) -> None:
        """Take in a failure; the verdict is due after a moment in which its cause may be reported.

        `silent_s`: since when there was no sign of life of what failed.

        After the decision only a connection loss still gives way to a failure that may be its cause.
        """
        if self._decided and min((failure.weight for failure in self._failures), default=CERTAIN) <= OWN:
            return
        if self.noticed is None:
            self.noticed, self.silent_s = time.time(), silent_s
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
        if self.begun is None or self._failures or not self.running or self.unchanged:
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
            failure = RankEnd(rank=rank, host=host, error=f"{self._spell(self.running)} {what}")
            self._overdue = failure if now >= self._stop_deadline else None
            self.fail(failure, now)

    def is_about_to_be_killed(self, now: float) -> bool:
        """Return whether what is left is soon killed: a node without heartbeats is lost then, which is the cause."""
        return now >= self.ends_by - _JUDGE_QUIET_S

    def is_over(self, now: float) -> bool:
        """Return whether the verdict is due: the ranks that are left are then ended."""
        if not self.running:
            return True
        if self.unchanged and (self.cancel_reason is not None or self.job_ends):
            return now >= self.ends_by  # as long as the batch system leaves them: they have its signal
        if self.cancel_reason is not None or now >= self._decide_at:
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
            return cancelled(f"ended without a checkpoint: {self._overdue.error}")
        if self._failures:
            return failed_by(self._with_log(self.cause()))
        if self.stop_reason is not None and (stop_confirmed or self.begun is None):
            return self._stopped(self.stop_reason)
        reason = f"{self._spell(self._ends)} exited with code 0"
        reason += f", not because of the request to stop ({self.stop_reason})" if self.stop_reason else ""
        return AttemptEnd(outcome="COMPLETED", reason=reason)

    def warn_of_apart(self, end: AttemptEnd, address: str, port: int) -> str:
        """Return a warning where several ranks ended well and have not met, as far as it was seen.

        Ranks on one host may connect to what they like, and those that meet by a file connect to no master.
        """
        gang = self._gang
        alone = f"each of the {gang.num_ranks} ranks may have trained alone"
        may_meet_elsewhere = len({node.host for node in gang.nodes}) == 1 or gang.entry.init == "file"
        if end.outcome != "COMPLETED" or gang.num_ranks == 1 or gang.entry.unchanged:
            return ""
        if not self.connected and not may_meet_elsewhere:
            return f"no rank connected to {address}:{port}; {alone}"
        is_seen = self.meets is not False or gang.entry.spawns  # not of ranks that a program starts
        return "" if is_seen else f"no rank was seen in a collective; {alone}, which is right if they need not meet"

    def _stopped(self, reason: str) -> AttemptEnd:
        if self.job_failure is None:
            warning = "" if self.asks or self.begun is None else NEVER_ASKED
            if self.begun is None:
                reason = f"{NOT_STARTED}: {'; '.join(filter(None, (self.missing, reason)))}"
            return AttemptEnd(outcome="STOPPED", reason=reason, warning=warning)
        end = failed(self.job_failure, host=self._gang.nodes[0].host, log="launcher/job.log")
        stopped = "" if self.begun is None else "; the ranks stopped at a checkpoint"
        return dataclasses.replace(end, reason=f"{self.job_failure}{stopped}")

    def cause(self) -> RankEnd:
        """Return the failure that the others follow from: the one of the lowest weight, of equal ones the first."""
        first = min(self._failures, key=lambda failure: failure.weight)
        leavers = [end for end in self._ends.values() if end.exit_code == 0 and not end.on_order]
        if first.weight != CASCADE or not leavers:
            return first
        end = leavers[0]
        what = f"rank {end.rank} on {end.host} exited with code 0 while others still needed it; then {first.error}"
        return dataclasses.replace(end, error=what, restart="here")

    def _spell(self, ranks: Iterable[int]) -> str:
        return spell_ranks(self._gang.carried_by(ranks))

    def _with_log(self, cause: RankEnd) -> RankEnd:
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
        self.uncounted = 0
        """How many restarts took in another node and count for nothing."""

    def before(self, attempt: Attempt) -> int:
        """Return how many restarts lie before an attempt."""
        return self._first_restart + attempt.number - self._first_attempt - self.uncounted

    def after(self, attempt: Attempt, end: AttemptEnd, *, all_gone: bool) -> Restart:
        """Decide what follows `end`, when no user has cancelled the run.

        `all_gone`: all supervisors have confirmed that nothing of the attempt is left.
        """
        able = all_gone and not self.incomplete
        regroups = attempt.regroups and end.outcome == "STOPPED"
        used_up = self.before(attempt) >= self._gang.restarts and not regroups
        if end.outcome in {"COMPLETED", "CANCELLED"} or used_up:
            return "none"
        if attempt.job_ends:
            # The job ends: a failure meanwhile follows from that, or comes again.
            return "another job"
        if end.outcome == "STOPPED":
            return "here" if (attempt.stopped_by_time_limit or regroups) and able and not self.final else "none"
        cause = attempt.cause() if attempt.settling else None
        # A node that is lost after the job's SIGTERM still counts: a job step ends so when a task was killed.
        stopped = (
            attempt.stop_reason is not None
            and not attempt.regroups
            and (attempt.stopped_by_people or not (cause and cause.restart == "another job"))
        )
        if cause is None or stopped or self.final:
            return "none"
        if cause.restart == "here" and able:
            return "here"
        return "another job" if self._in_job and cause.restart != "none" else "none"


def read_rank_end(
    attempt: AttemptDir, rank: int, returncode: int, *, host: str, on_order: bool, oom_kills: int | None = None
) -> RankEnd:
    """Find out how a rank ended from its return code (negative: a signal), its error file and its standard error.

    `oom_kills`: as many processes had the kernel killed for memory when the ranks began.
    """
    if returncode == 0:
        return RankEnd(rank=rank, host=host, exit_code=0, on_order=on_order)
    error, traceback = read_error_file(attempt.error_file(rank))
    stderr = read_tail(attempt.stderr(rank))
    name = signal_name(-returncode) if returncode < 0 else None
    said = f"{error}\n{traceback}" if error else "\n".join(stderr.splitlines()[-5:])
    weight = CASCADE if _CASCADE.search(said) else CONNECTION if _CONNECTION.search(said) else OWN
    if name is not None and (name != "SIGABRT" or weight == OWN):
        # Only SIGABRT may come from the process itself, for example from NCCL's watchdog.
        weight = CERTAIN
    if name == "SIGKILL" and not on_order:
        error = explain_oom_kill(oom_kills) or error
    if name == "SIGABRT" and error is None:
        error = one_line(stderr.rpartition("\n")[2]) or None
    last = find_last_line(stderr) if error is None and name is None else None
    limit = explain_limit(error or (last[0] if last else name) or "")
    if limit and last:
        last = (f"{one_line(last[0])} ({limit})", last[1])
    elif limit:
        error = f"{error} ({limit})" if error else limit
    return RankEnd(
        rank=rank,
        host=host,
        exit_code=128 - returncode if returncode < 0 else returncode,
        signal=name,
        error=error or "",
        traceback=last[1] if last else traceback,
        last_line=one_line(last[0]) if last else "",
        weight=weight,
        on_order=on_order,
    )


def find_last_line(text: str) -> tuple[str, str] | None:
    """Return the most telling line of an output, and the lines around it: a traceback's, or the last ones.

    None where the output is empty.
    """
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    lines = [line for line in lines if not _AFTERWARDS.search(line)] or lines
    if not lines:
        return None
    if _REPORTS.match(lines[-1]) or any(_TORCHRUNS in line and _REPORTS.match(line) for line in lines):
        tracebacks = [block for block in _tracebacks(text.splitlines()) if not _REPORTS.match(block[-1])]
        if tracebacks:
            return tracebacks[-1][-1].strip(), "\n".join(tracebacks[-1])
    said = text.partition(_HYDRA)[0].strip()
    if said and lines[-1].startswith(_HYDRA):  # a wrong override has no traceback
        last_words = said.rpartition("\n\n")[2]
        return last_words.splitlines()[0], last_words
    return lines[-1].strip(), "\n".join(text.splitlines()[-_LINES:])


def _tracebacks(lines: list[str]) -> list[list[str]]:
    """Find the tracebacks, each from its head to the line of its exception.

    torchrun can put `[rank1]: ` before the lines of its ranks.
    """
    found: list[list[str]] = []
    block: list[str] | None = None
    for line in lines:
        own = re.sub(r"^\[[^\]]*\]:? ?", "", line)
        if own.startswith(_HEAD):
            block = [own]
        elif block is not None:
            block.append(own)
            if own and not own.startswith((" ", "\t")):
                found.append(block)
                block = None
    return found

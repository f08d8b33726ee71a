"""The end of an attempt: the one account of how it ended and why, whichever process gives it.

The head gives it as a rule. Where the head cannot, its guard does, another node, the task or the batch script that
carries the run, the next start of a Slurm job, or the process that could not start it. All build an `AttemptEnd` by the
functions here; the first to write `end.json` is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import drop_secrets
from clusterddp.system.files import build_record, read_json, write_json

AttemptOutcome = Literal["COMPLETED", "FAILED", "CANCELLED", "STOPPED"]
_LOG = re.compile(r"(attempts/\d+/logs/rank-\d+|launcher/[\w-]+)\.(out|err|log)")
"""What a root cause may name as its log, relative to the run's directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """Why an attempt failed: the first failure, not the ones that followed from it."""

    rank: int | None
    """The rank that failed first; for a lost node the lowest of its ranks; None when it failed before any started."""
    host: str
    exit_code: int | None
    """As a shell would say it: 128 + signal for a rank that a signal ended."""
    error: str
    log: str | None
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """`end.json`: how an attempt ended. The first to write it is right."""

    outcome: AttemptOutcome
    reason: str
    root_cause: RootCause | None = None
    will_restart: bool = False
    needs_job: bool = False
    """With `will_restart`, on Slurm: the next attempt needs another start of the job."""
    ended: float = 0.0
    warning: str = ""
    """What the outcome does not tell and a person should look at."""


def cancelled(reason: str) -> AttemptEnd:
    """Return the end of an attempt that was cancelled."""
    return AttemptEnd(outcome="CANCELLED", reason=reason)


def failed(
    reason: str,
    *,
    host: str | None = None,
    rank: int | None = None,
    exit_code: int | None = None,
    log: str | None = None,
    goes_on: bool = False,
) -> AttemptEnd:
    """Return the end of an attempt that failed, `reason` being all that is known of its cause.

    `host`: where it failed, by default here. `goes_on`: another start of its Slurm job begins the next attempt.
    """
    where = socket.gethostname() if host is None else host
    cause = RootCause(rank=rank, host=where, exit_code=exit_code, error=reason, log=log)
    return failed_by(cause, goes_on=goes_on)


def failed_by(cause: RootCause, *, goes_on: bool = False) -> AttemptEnd:
    """Return the end of an attempt with this root cause; `goes_on` as for `failed`."""
    return AttemptEnd(outcome="FAILED", reason=cause.error, root_cause=cause, will_restart=goes_on, needs_job=goes_on)


def loss_of_node(
    what: str,
    *,
    host: str,
    ranks: Collection[int],
    ranks_in_words: str,
    attempt: AttemptDir | None,
    whose: str = "its ",
) -> RootCause:
    """Return the root cause where ranks ended because of something that is no rank's fault: a lost host or supervisor.

    `what` says what happened. `attempt`: the one whose ranks had started; None: none had.
    """
    if attempt is None:
        words = f"{what} before any rank was started"
        return RootCause(rank=None, host=host, exit_code=None, error=words, log=None)
    rank = min(ranks)
    log = str(attempt.stderr(rank).relative_to(attempt.path.parents[1]))
    words = f"{what}; {whose}{ranks_in_words} ended with it"
    return RootCause(rank=rank, host=host, exit_code=None, error=words, log=log)


def write_end(attempt: AttemptDir, end: AttemptEnd) -> bool:
    """Record how the attempt ended; False when another process has (what it wrote stands).

    With the end of the run its secrets go, whichever process records it.
    """
    is_first = write_json(attempt.end, dataclasses.asdict(end) | {"ended": end.ended or time.time()}, exclusive=True)
    run = RunDir(attempt.path.parents[1])
    with contextlib.suppress(OSError):
        # Not when the run has been resumed meanwhile: then they are the new attempt's.
        if is_first and not end.will_restart and run.newest_attempt().number == attempt.number:
            drop_secrets(run)
    return is_first


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    data = read_json(attempt.end)
    return None if data is None else parse_end(data, str(attempt.end))


def parse_end(data: Any, where: str = "end.json") -> AttemptEnd:
    """Make an end of what `end.json` holds.

    The log of a root cause is one of the run's own, or none: a host or another user may have written the file.
    Raises: ClusterddpError: it holds something else, `where`.
    """
    end = build_record(AttemptEnd, data, where)
    cause = end.root_cause
    if cause is None or cause.log is None or _LOG.fullmatch(cause.log):
        return end
    return dataclasses.replace(end, root_cause=dataclasses.replace(cause, log=None))


def signal_name(number: int) -> str:
    """Name a signal as people know it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

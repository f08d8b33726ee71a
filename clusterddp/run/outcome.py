"""The end of an attempt: how it ended and why.

Usually the head records it. If the head cannot, its guard does, another node, the task or the batch script that carries
the run, the next start of a Slurm job, or the process that failed to start it. All build an `AttemptEnd` with the
functions here; the first `end.json` that is written counts.
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
"""The paths that a root cause may have as its log, relative to the run's directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """Why an attempt failed: the first failure, not the ones that followed from it."""

    rank: int | None
    """The rank that failed first; for a lost node the lowest of its ranks; None when it failed before any started."""
    host: str
    exit_code: int | None
    """As in a shell: 128 + signal for a rank that a signal ended."""
    error: str
    log: str | None
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """`end.json`: how an attempt ended. The first one that is written counts."""

    outcome: AttemptOutcome
    reason: str
    root_cause: RootCause | None = None
    will_restart: bool = False
    needs_job: bool = False
    """With `will_restart`, on Slurm: the next attempt needs another start of the job."""
    ended: float = 0.0
    warning: str = ""
    """A problem that did not change the outcome; empty: none."""


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
    """Return the end of an attempt that failed with this reason as its root cause.

    `host`: where it failed, by default this one. `goes_on`: another start of its Slurm job begins the next attempt.
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
    """Return the root cause of ranks that ended because a host or a supervisor was lost.

    `what`: a sentence on what happened. `attempt`: the one whose ranks had started; None: no rank had.
    """
    if attempt is None:
        error = f"{what} before any rank was started"
        return RootCause(rank=None, host=host, exit_code=None, error=error, log=None)
    rank = min(ranks)
    log = str(attempt.stderr(rank).relative_to(attempt.path.parents[1]))
    error = f"{what}; {whose}{ranks_in_words} ended with it"
    return RootCause(rank=rank, host=host, exit_code=None, error=error, log=log)


def write_end(attempt: AttemptDir, end: AttemptEnd) -> bool:
    """Record how the attempt ended; False if another process has done so, whose record stays.

    If the run ends with it, its secrets are removed.
    """
    is_first = write_json(attempt.end, dataclasses.asdict(end) | {"ended": end.ended or time.time()}, exclusive=True)
    run = RunDir(attempt.path.parents[1])
    with contextlib.suppress(OSError):
        # If the run has been resumed meanwhile, its new attempt needs the secrets.
        if is_first and not end.will_restart and run.newest_attempt().number == attempt.number:
            drop_secrets(run)
    return is_first


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    data = read_json(attempt.end)
    return None if data is None else parse_end(data, str(attempt.end))


def parse_end(data: Any, where: str = "end.json") -> AttemptEnd:
    """Read an end from the JSON of `end.json`.

    A host or another user may have written the file: a log that is not one of the run's own is dropped.
    Raises: ClusterddpError: the data is invalid; the message begins with `where`.
    """
    end = build_record(AttemptEnd, data, where)
    cause = end.root_cause
    if cause is None or cause.log is None or _LOG.fullmatch(cause.log):
        return end
    return dataclasses.replace(end, root_cause=dataclasses.replace(cause, log=None))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

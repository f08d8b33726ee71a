"""Attempts of a run: how one is made, how it ends and why, and the record of its end (`end.json`).

The head records the end (`EndRecord`). Where it cannot, whichever process finds the attempt without an end closes it
(`close_attempt`): its guard, a node that has lost it, the task or batch script that carries the run, the next start of
a Slurm job, a command. The first `end.json` that is written counts.

The spool keeps ends that a run's own storage does not take (full, read-only, lost) in the user's state directory. A
reader that finds no `end.json` looks there. On a cluster it helps if home directories are shared and on other storage
than the runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.gang import Gang, Node
from clusterddp.run.record import ProcessIdentity, RankEnd, drop_secrets, read_run, write_run
from clusterddp.system.directories import state_directory
from clusterddp.system.files import build_record, read_json, read_regular, sync_directory, write_json
from clusterddp.system.storage import is_outage, retry_outage, storage_timeout_s

AttemptOutcome = Literal["COMPLETED", "FAILED", "CANCELLED", "STOPPED"]
_LOG = re.compile(r"(attempts/\d+(/steps/[\w.-]+)?/logs/(rank|setup)-\d+|launcher/[\w-]+)\.(out|err|log)")
"""The paths that a root cause may have as its log, relative to the run's directory."""
_MAX_LINE = 400
_MAX_TRACEBACK = 8_000
_RETRY_S = 0.5
_FULL_S = 10.0
"""How long the write of an end is retried on a full disk."""


NOT_STARTED = "ended before its ranks started"
"""How the reason of an attempt begins that was asked to stop before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """`end.json`: how an attempt ended. The first one that is written counts."""

    outcome: AttemptOutcome
    reason: str
    root_cause: RankEnd | None = None
    """The first failure, not the ones that followed from it."""
    will_restart: bool = False
    needs_job: bool = False
    """With `will_restart`, on Slurm: the next attempt needs another start of the job."""
    ended: float = 0.0
    warning: str = ""
    """A problem that did not change the outcome; empty: none."""

    @property
    def has_stopped(self) -> bool:
        """True when its ranks stopped at a checkpoint."""
        return self.outcome == "STOPPED" and not self.warning and not self.reason.startswith(NOT_STARTED)


def cancelled(reason: str) -> AttemptEnd:
    """Return the end of an attempt that was cancelled."""
    return AttemptEnd(outcome="CANCELLED", reason=reason)


def failed(
    reason: str, *, host: str | None = None, log: str | None = None, goes_on: bool = False, of_node: bool = False
) -> AttemptEnd:
    """Return the end of an attempt that failed with this reason as its root cause.

    `host`: where it failed, by default this one. `goes_on`: another start of its Slurm job begins the next attempt.
    """
    cause = RankEnd(rank=None, host=host or socket.gethostname(), error=reason, log=log, of_node=of_node)
    return failed_by(cause, goes_on=goes_on)


def failed_by(cause: RankEnd, *, goes_on: bool = False) -> AttemptEnd:
    """Return the end of an attempt with this root cause; `goes_on` as for `failed`."""
    return AttemptEnd(outcome="FAILED", reason=cause.error, root_cause=cause, will_restart=goes_on, needs_job=goes_on)


def loss_of_nodes(
    gang: Gang,
    nodes: Sequence[Node],
    what: str,
    *,
    attempt: AttemptDir | None,
    place: Node | None = None,
    whose: str = "its ",
) -> RankEnd:
    """Return the root cause of ranks that ended because their hosts or supervisors were lost.

    `what`: a sentence on what happened. `attempt`: the one whose ranks had started; None: no rank had. `place`: where
    it was seen, if not on the first of the nodes.
    """
    host, of_node = (place or nodes[0]).host, place is None and bool(whose)
    if attempt is None:
        error = f"{what} before any rank was started"
        return RankEnd(rank=None, host=host, error=error, restart="another job", of_node=of_node)
    ranks = [rank for node in nodes for rank in node.ranks]
    rank = min((place.ranks if place else ranks) or ranks, default=None)
    if rank is None:  # a spare
        return RankEnd(rank=None, host=host, error=what, restart="another job")
    log = str(attempt.stderr(rank).relative_to(attempt.run_path))
    error = f"{what}; {whose}{spell_ranks(gang.carried_by(ranks))} ended with it"
    return RankEnd(rank=rank, host=host, error=error, log=log, restart="another job", of_node=of_node)


class EndRecord:
    """The record of the end of an attempt; it is spooled when the run's storage does not take it in time."""

    def __init__(self, attempt: AttemptDir, end: AttemptEnd, token: str) -> None:
        self.end = end
        self.is_first = False
        """True when no other process had recorded an end."""
        self.error: str | None = None
        """Why the run's storage did not take it."""
        self._attempt = attempt
        self._token = token
        self._retry_at = 0.0
        self._began = time.monotonic()

    def step(self, now: float) -> bool:
        """Try when a try is due; True when the end is written, or the time is up."""
        if now < self._retry_at:
            return False
        self._retry_at = now + _RETRY_S
        try:
            make_attempt_dirs(self._attempt)
            self.is_first = write_end(self._attempt, self.end)
            return True
        except (ClusterddpError, OSError) as error:
            patience_s = storage_timeout_s() if is_outage(error) else min(_FULL_S, storage_timeout_s())
            if now < self._began + patience_s:
                return False
            self.error = str(error)
            reason = f"{self.end.reason}; this could not be recorded in the run's directory: {error}"
            self.end = dataclasses.replace(
                self.end, reason=reason, will_restart=False, needs_job=False, ended=time.time()
            )
            self.is_first = spool_end(self._token, self._attempt.number, self.end)
            drop_secrets(RunDir(self._attempt.run_path))
            return True


def close_attempt(attempt: AttemptDir, end: AttemptEnd, token: str) -> EndRecord:
    """Record the end of an attempt whose head has recorded none; return when it is written or spooled."""
    record = EndRecord(attempt, end, token)
    while not record.step(time.monotonic()):
        time.sleep(_RETRY_S)
    return record


def end_run(run: RunDir, end: AttemptEnd, *, attempt: AttemptDir | None = None, token: str = "") -> None:
    """Close the newest attempt of a run; if the run was about to restart, make the next one and close that.

    `attempt`, `token`: what is known of it, where the run's storage may be away.
    Raises: ClusterddpError, OSError: it is away, and no attempt is known.
    """
    try:
        attempt = retry_outage(lambda: _attempt_without_end(run))
    except (ClusterddpError, OSError):
        if attempt is None:
            raise
    close_attempt(attempt, end, token or read_run(run).token)


def write_end(attempt: AttemptDir, end: AttemptEnd) -> bool:
    """Record how the attempt ended; False if another process has done so, whose record stays.

    If the run ends with it, its secrets are removed.
    """
    is_first = write_json(attempt.end, dataclasses.asdict(end) | {"ended": end.ended or time.time()}, exclusive=True)
    if attempt.is_step:
        return is_first
    run = RunDir(attempt.run_path)
    with contextlib.suppress(OSError):
        # If the run has been resumed meanwhile, its new attempt needs the secrets.
        if is_first and not end.will_restart and run.newest_attempt().number == attempt.number:
            drop_secrets(run)
    return is_first


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    data = read_json(attempt.end)
    return None if data is None else parse_end(data, str(attempt.end))


def find_end(attempt: AttemptDir, token: str) -> AttemptEnd | None:
    """Read how an attempt ended, from the spool where the run's storage has no record."""
    return read_end(attempt) or read_spooled(token, attempt.number)


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


def spool_end(token: str, attempt: int, end: AttemptEnd) -> bool:
    """Write the end of an attempt to the spool; False: it has one already, or cannot be written."""
    path = _path(token, attempt)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_json(path, dataclasses.asdict(end), exclusive=True)
    except (ClusterddpError, OSError):
        return False


def read_spooled(token: str, attempt: int) -> AttemptEnd | None:
    """Read the end of an attempt from the spool; None if it has none."""
    path = _path(token, attempt)
    with contextlib.suppress(OSError):
        data = read_json(path)
        return None if data is None else parse_end(data, str(path))
    return None


def deliver_end(attempt: AttemptDir, token: str, end: AttemptEnd) -> None:
    """Move the end of an attempt from the spool to the run, if the run's storage takes it now."""
    path = _path(token, attempt.number)
    if path.exists():
        with contextlib.suppress(ClusterddpError, OSError):
            write_end(attempt, end)
            path.unlink(missing_ok=True)


def read_error_file(path: Path) -> tuple[str | None, str | None]:
    """Read what the rank, or torch's @record, wrote into TORCHELASTIC_ERROR_FILE: the exception, the traceback."""
    try:
        message: Any = json.loads(read_regular(path, 1_000_000).decode(errors="replace"))["message"]
        if not isinstance(message, dict):
            return _gist(str(message)), None
        traceback = (message.get("extraInfo") or {}).get("py_callstack")
        return _gist(str(message["message"])), str(traceback)[-_MAX_TRACEBACK:] if traceback else None
    except (OSError, ClusterddpError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None


def spell_exit(returncode: int) -> str:
    """Say how a process ended, by its return code (negative: a signal)."""
    return f"exited with code {returncode}" if returncode >= 0 else f"was killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one_line(text: str) -> str:
    """Return a text in one line, shortened to what a message takes."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."


def make_attempt(run: RunDir, number: int) -> AttemptDir:
    """Make the directory of an attempt, which claims its number.

    Raises: FileExistsError: another process has claimed the number. OSError: the file system refuses.
    """
    attempt = run.attempt(number)
    attempt.path.parent.mkdir(mode=0o700, exist_ok=True)
    attempt.path.mkdir(mode=0o700)
    attempt.ranks.mkdir(mode=0o700)
    attempt.logs.mkdir(mode=0o700)
    sync_directory(attempt.path)
    sync_directory(attempt.path.parent)
    return attempt


def later_claimed(run: RunDir, number: int) -> int | None:
    """Return the number of an attempt after this one that another start of the job has claimed."""
    attempts = RunDir(run.path).attempts()  # not those of a step
    return next((each.number for each in attempts if each.number > number and each.is_claimed()), None)


def claim(attempt: AttemptDir) -> bool:
    """Claim an attempt that waits in a queue, to start it or to end it; False: another process has claimed it."""
    return write_json(attempt.claim, dataclasses.asdict(ProcessIdentity.of()), exclusive=True)


def adopt(run: RunDir, number: int, *, queued: bool = False) -> None:
    """Record that this process resumes a run; `queued`: a queue will start it."""
    write_run(
        run,
        dataclasses.replace(
            read_run(run),
            submitter=dataclasses.asdict(ProcessIdentity.of()),
            keeper=None,
            job_id=None,
            job_tag=None,
            hold=None,
            base_attempt=number,
            queued=queued,
        ),
    )
    run.cancel_file.unlink(missing_ok=True)


def end_queued(run: RunDir, reason: str) -> bool:
    """End a run that waits in the queue of a sweep; False: it does not wait, or another process is starting it."""
    if not read_run(run).queued or final_end(run) is not None or not claim(run.attempts()[-1]):
        return False
    end_run(run, cancelled(reason))
    return True


def final_end(run: RunDir) -> AttemptEnd | None:
    """Read how the run ended; None while an attempt runs or another one follows."""
    attempts = run.attempts()
    end = find_end(attempts[-1], read_run(run).token) if attempts else None
    return None if end is None or end.will_restart else end


def _attempt_without_end(run: RunDir) -> AttemptDir:
    """Return the newest attempt, or the one that was to follow it."""
    attempt = run.newest_attempt()
    last = read_end(attempt)
    if last is None or not last.will_restart:
        return attempt
    with contextlib.suppress(FileExistsError):
        make_attempt(run, attempt.number + 1)
    return run.attempt(attempt.number + 1)


def _path(token: str, attempt: int) -> Path:
    # Hashed: a record that another user has written must not lead to another file.
    name = hashlib.sha256(f"{token} {attempt}".encode()).hexdigest()[:32]
    return state_directory() / "ends" / f"{name}.json"


def _gist(text: str) -> str:
    """Return an exception's message in one line.

    An exception of torch.multiprocessing.spawn contains another process's traceback; of it, the last line is returned.
    """
    if "Traceback (most recent call last):" not in text:
        return one_line(text)
    kind = text.strip().partition(":")[0].rpartition(".")[2]
    return one_line(f"{kind}: {text.strip().splitlines()[-1]}")

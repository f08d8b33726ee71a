"""Attempts of a run: make the next one, and record an end that the run's own processes did not record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import AttemptDir, RunDir, is_of_another_user
from clusterddp.run.outcome import AttemptEnd, cancelled, close_attempt, read_end, read_spooled, write_end
from clusterddp.run.record import ProcessIdentity, read_run, write_run
from clusterddp.run.state import RunState, RunView
from clusterddp.run.sweep import claim
from clusterddp.system.files import sync_directory
from clusterddp.system.storage import retry_outage


class Closeable(Protocol):
    """Open connections that `close` ends."""

    def close(self) -> object: ...


Report = Callable[[str], object]
"""Receives messages about the progress of slow steps."""


def no_report(message: str) -> None:
    """Drop a progress message."""


@dataclass(frozen=True, slots=True)
class Started:
    """The result of a launcher's start."""

    job_id: str
    connections: Closeable | None = None
    """The open connections that an attached run depends on; it ends when they are closed or this process ends."""


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


def refuse_to_end(path: Path) -> None:
    """Refuse to end a run or a sweep of another user.

    Raises: UsageError: the directory belongs to another user.
    """
    if is_of_another_user(path):
        owner = os.stat(path).st_uid
        raise UsageError(f"{path.name} belongs to another user (uid {owner}); only that user can end it")


def refuse_resume(run: RunDir, view: RunView, *, instead: str, more: bool = False) -> None:
    """Refuse to resume a run that has completed or still runs; `instead`: the hint for a run that has completed.

    `more`: a completed run may go on, with values that give it more to do.

    Raises: UsageError.
    """
    if view.state is RunState.COMPLETED and not more:
        raise UsageError(f"{run.name}: already completed", hint=instead)
    if not view.finished:
        raise UsageError(f"{run.name}: is {view.state.value} ({view.reason})", hint=f"clusterddp cancel {run.name}")


def make_next_attempt(run: RunDir, number: int) -> None:
    """Make the directory of the attempt that resumes a run.

    Raises: UsageError: another process has made it. ClusterddpError: the file system refuses.
    """
    try:
        make_attempt(run, number)
    except FileExistsError:
        raise UsageError(f"{run.name}: another process is resuming it") from None
    except OSError as error:
        raise ClusterddpError(f"{run.path}: cannot be resumed: {error.strerror}") from error


def adopt(run: RunDir, number: int, *, queued: bool = False) -> None:
    """Record that this process resumes a run; `queued`: a queue will start it.

    Raises: ClusterddpError: the file system refuses.
    """
    write_run(
        run,
        dataclasses.replace(
            read_run(run),
            submitter=dataclasses.asdict(ProcessIdentity.of()),
            keeper=None,
            job_id=None,
            job_tag=None,
            base_attempt=number,
            queued=queued,
        ),
    )
    run.cancel_file.unlink(missing_ok=True)


def end_run(run: RunDir, end: AttemptEnd) -> None:
    """Record how the run ended, unless an end is recorded already.

    If the run was about to restart, this makes the next attempt and records the end there.
    Raises: ClusterddpError, OSError: the storage does not take the record.
    """
    write_end(_attempt_without_end(run), end)


def end_or_spool(run: RunDir, attempt: AttemptDir, token: str, end: AttemptEnd) -> None:
    """Record how the run ended; spool the end if the storage does not take it. `attempt`: the newest known attempt."""
    with contextlib.suppress(ClusterddpError, OSError):
        attempt = retry_outage(lambda: _attempt_without_end(run))
    close_attempt(attempt, end, token)


def _attempt_without_end(run: RunDir) -> AttemptDir:
    """Return the newest attempt, or the one that was to follow it."""
    attempt = run.newest_attempt()
    last = read_end(attempt)
    if last is None or not last.will_restart:
        return attempt
    with contextlib.suppress(FileExistsError):
        make_attempt(run, attempt.number + 1)
    return run.attempt(attempt.number + 1)


def end_queued(run: RunDir, reason: str) -> bool:
    """End a run that waits in the queue of a sweep; False: it does not wait, or another process is starting it."""
    if not read_run(run).queued or final_end(run) is not None or not claim(run.attempts()[-1]):
        return False
    end_run(run, cancelled(reason))
    return True


def final_end(run: RunDir) -> AttemptEnd | None:
    """Read how the run ended; None while an attempt runs or another one follows."""
    attempts = run.attempts()
    end = None
    if attempts:
        end = read_end(attempts[-1]) or read_spooled(read_run(run).token, attempts[-1].number)
    return None if end is None or end.will_restart else end

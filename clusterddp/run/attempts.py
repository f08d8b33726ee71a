"""Attempts of a run, seen from its launcher: claim the next one, record the end that nobody else is left to record."""

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
from clusterddp.run.outcome import AttemptEnd, cancelled, read_end, write_end
from clusterddp.run.record import ProcessIdentity, read_run, write_run
from clusterddp.run.spool import read_spooled, spool_end
from clusterddp.run.sweep import claim
from clusterddp.run.view import RunState, RunView
from clusterddp.system.files import sync_directory
from clusterddp.system.storage import retry_outage


class Closeable(Protocol):
    """Open connections that `close` ends."""

    def close(self) -> object: ...


Tell = Callable[[str], object]
"""Takes words about what is being waited for."""


def silence(words: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Started:
    """What a launcher has started."""

    job_id: str
    connections: Closeable | None = None
    """The open connections that an attached run depends on: when they are closed, or this process ends, it ends."""


def make_attempt(run: RunDir, number: int) -> AttemptDir:
    """Make the directory of an attempt, which claims its number.

    Raises: FileExistsError: somebody else has claimed it. OSError: the file system refuses.
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
    """Refuse to end what another user has started, a run or a sweep.

    Raises: UsageError: the directory belongs to another user.
    """
    if is_of_another_user(path):
        owner = os.stat(path).st_uid
        raise UsageError(f"{path.name} belongs to another user (uid {owner}), who alone can end it")


def refuse_resume(run: RunDir, view: RunView, *, instead: str, more: bool = False) -> None:
    """Let only a run go on that has ended before it was done; `instead`: what else to do with one that is done.

    `more`: it is given values with which it may not be done yet.

    Raises: UsageError.
    """
    if view.state is RunState.COMPLETED and not more:
        raise UsageError(f"{run.name}: already completed", hint=instead)
    if not view.finished:
        raise UsageError(f"{run.name}: is {view.state.value} ({view.reason})", hint=f"clusterddp cancel {run.name}")


def make_next_attempt(run: RunDir, number: int) -> None:
    """Make the directory of the attempt that a run goes on with.

    Raises: UsageError: somebody else has. ClusterddpError: the file system refuses.
    """
    try:
        make_attempt(run, number)
    except FileExistsError:
        raise UsageError(f"{run.name}: somebody else is resuming it") from None
    except OSError as error:
        raise ClusterddpError(f"{run.path}: cannot be resumed: {error.strerror}") from error


def adopt(run: RunDir, number: int, *, queued: bool = False) -> None:
    """Write down that this process goes on with a run; `queued`: it waits for a queue to start it.

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
    """Record how the run ended, unless that is recorded already.

    When it was about to restart, the end is that of the attempt that never came to be.
    Raises: ClusterddpError, OSError: its storage does not take it.
    """
    attempt = run.newest_attempt()
    last = read_end(attempt)
    if last is not None and last.will_restart:
        with contextlib.suppress(FileExistsError):
            make_attempt(run, attempt.number + 1)
        attempt = run.attempt(attempt.number + 1)
    write_end(attempt, end)


def end_or_spool(run: RunDir, attempt: AttemptDir, token: str, end: AttemptEnd) -> None:
    """Record how the run ended; what its storage does not take is spooled. `attempt`: the newest one that is known."""
    try:
        retry_outage(lambda: end_run(run, end))
    except (ClusterddpError, OSError) as error:
        with contextlib.suppress(OSError):
            attempt = run.newest_attempt()
        reason = f"{end.reason}; this could not be recorded in the run's directory: {error}"
        spool_end(token, attempt.number, dataclasses.replace(end, reason=reason))


def end_queued(run: RunDir, reason: str) -> bool:
    """End a run that waits in the queue of a sweep; False: it does not, or somebody is just starting it."""
    if not read_run(run).queued or final_end(run) is not None or not claim(run.attempts()[-1]):
        return False
    end_run(run, cancelled(reason))
    return True


def final_end(run: RunDir) -> AttemptEnd | None:
    """Read how the run ended; None while an attempt goes on, or is to follow."""
    attempts = run.attempts()
    end = None
    if attempts:
        end = read_end(attempts[-1]) or read_spooled(read_run(run).token, attempts[-1].number)
    return None if end is None or end.will_restart else end

"""Attempts of a run, seen from its launcher: claim the next one, record the end that nobody else is left to record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from clusterddp.run.directory import AttemptDir, RunDir, sync_directory
from clusterddp.run.record import AttemptEnd, read_end, read_run, write_end
from clusterddp.run.sweep_queue import claim


class Closeable(Protocol):
    """What is let go by `close`."""

    def close(self) -> object: ...


Tell = Callable[[str], object]
"""Takes words about what is being waited for."""


def silence(words: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Started:
    """What a launcher has started."""

    job_id: str
    tie: Closeable | None = None
    """What an attached run hangs on: closing it, or the end of this process, ends the run."""


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


def end_run(run: RunDir, end: AttemptEnd) -> None:
    """Record how the run ended, unless that is recorded already.

    When it was about to restart, the end is that of the attempt that never came to be.
    """
    attempt = run.attempts()[-1]
    last = read_end(attempt)
    if last is not None and last.will_restart:
        with contextlib.suppress(FileExistsError):
            make_attempt(run, attempt.number + 1)
        attempt = run.attempt(attempt.number + 1)
    write_end(attempt, end)


def end_queued(run: RunDir, reason: str) -> bool:
    """End a run that waits in the queue of a sweep; False: it does not, or somebody is just starting it."""
    if not read_run(run).queued or final_end(run) is not None or not claim(run.attempts()[-1]):
        return False
    end_run(run, AttemptEnd(outcome="CANCELLED", reason=reason))
    return True


def final_end(run: RunDir) -> AttemptEnd | None:
    """Read how the run ended; None while an attempt goes on, or is to follow."""
    attempts = run.attempts()
    end = read_end(attempts[-1]) if attempts else None
    return None if end is None or end.will_restart else end

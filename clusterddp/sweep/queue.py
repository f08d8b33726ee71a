"""`python -m clusterddp.sweep.queue SWEEP_DIR`: start the runs of a sweep where Slurm does not; see them end.

Each run is an ordinary one: nothing of it hangs on the queue, which may be killed at any time. What it had not started
then waits for the next queue of the sweep. Runs that need GPUs which others have keep their place in the queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from clusterddp.errors import ClusterddpError
from clusterddp.launchers.state import read_state
from clusterddp.planning.local import GpusInUseError
from clusterddp.planning.plan import read_plan
from clusterddp.ranks.environment import inherited_environment
from clusterddp.results.sync import Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import read_end
from clusterddp.run.record import ProcessIdentity, read_run
from clusterddp.run.sweep import QueueRecord, SweepDir, read_sweep, write_queue
from clusterddp.submission.cancel import cancel
from clusterddp.sweep.plan import queue_width
from clusterddp.sweep.queued_run import start_queued
from clusterddp.system.files import is_file
from clusterddp.system.storage import retry_outage

_POLL_S = 0.5
_FIRST_RETRY_S = 2.0
_MAX_RETRY_S = 30.0
"""How long at most until a run that found its GPUs in use tries again; it does at once when one of ours has ended."""
_MOST_FAILED_STARTS = 3
"""Runs in a row that cannot be started: then something is wrong that spares no run."""


class _Going:
    """A run that was started, and what keeps its files fresh."""

    def __init__(self, run: RunDir, environ: Mapping[str, str]) -> None:
        self.run = run
        self._stack = contextlib.ExitStack()
        self._sync: Synchroniser = self._stack.enter_context(Synchroniser([run], environ, interval_s=_POLL_S))

    def has_ended(self) -> bool:
        self._sync.update()
        return read_state(self.run).finished

    def leave(self) -> None:
        """Fetch what its spec wants here, now that it has ended."""
        self._sync.download()
        self._stack.close()


class Queue:
    """Starts runs in the order of their numbers, so many at a time."""

    def __init__(self, sweep: SweepDir, environ: Mapping[str, str]) -> None:
        self._sweep = sweep
        self._environ = environ
        self._record = QueueRecord(process=dataclasses.asdict(ProcessIdentity.of()))
        self._waiting: deque[RunDir] = deque()
        self._going: list[_Going] = []
        first = read_plan(sweep.runs()[0])
        self._width = queue_width(first, read_sweep(sweep).throttle)
        self._failed_starts = 0
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0
        self._is_starting = False
        self._signal: str | None = None

    def work(self) -> str:
        """Work until all runs have ended, or there is a reason to stop before; return the reason."""
        write_queue(self._sweep, self._record)
        for run in self._sweep.runs():
            self._sort_in(run)
        while self._waiting or self._going:
            if reason := self._why_stop():
                return reason
            ended = [going for going in self._going if going.has_ended()]
            self._going = [going for going in self._going if going not in ended]
            if ended:
                self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
            while not self._why_stop() and self._start_next():
                pass
            for going in ended:  # now that what they had is used by others
                going.leave()
            time.sleep(_POLL_S)
        return "all runs have ended"

    def _sort_in(self, run: RunDir) -> None:
        """Let a run wait for its turn, or watch it when another queue of this sweep has started it."""
        try:
            waits = read_run(run).queued and read_end(run.attempts()[-1]) is None
        except (ClusterddpError, OSError) as error:  # one broken record must not stop the others
            print(f"{run.path}: {error}", flush=True)
            return
        if waits:
            self._waiting.append(run)
        elif not read_state(run).finished:
            self._going.append(_Going(run, self._environ))

    def _why_stop(self) -> str | None:
        if self._signal:
            return f"it was ended by {self._signal}"
        if is_file(self._sweep.cancel_file):
            return "the sweep was cancelled"
        if self._failed_starts >= _MOST_FAILED_STARTS and self._waiting:
            return f"{self._failed_starts} runs in a row could not be started"
        return None

    def _start_next(self) -> bool:
        """Start the run whose turn it is, if there is room; False: there is none, or no room."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return False
        if self._width is not None and len(self._going) >= self._width:
            return False
        run = self._waiting[0]
        try:
            started = self._start(run)
        except GpusInUseError as error:
            self._note(f"{run.name}: {error.message}")
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(_MAX_RETRY_S, 2 * self._retry_s)
            return False
        self._waiting.popleft()
        self._note("")
        if started:
            self._going.append(_Going(run, self._environ))
        return True

    def _start(self, run: RunDir) -> bool:
        """Start one run; False: it has ended, or another process has it.

        Raises: GpusInUseError: it waits on.
        """
        try:
            retry_outage(run.newest_attempt)
            with self._interruptible():
                if not start_queued(run, self._tell):
                    return False
        except GpusInUseError:
            raise
        except ClusterddpError as error:  # that is recorded as its end
            print(f"{run.name}: {error.message}", flush=True)
            self._failed_starts += 1
            return False
        except KeyboardInterrupt:
            return False
        self._failed_starts = 0
        if is_file(run.cancel_file):  # its hosts knew nothing of it when they were asked to end it
            with contextlib.suppress(ClusterddpError):
                cancel(run)
        return True

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop between two runs; the start of one is broken off."""
        self._signal = signal.Signals(number).name
        if self._is_starting:
            self._is_starting = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    def _tell(self, words: str) -> None:
        print(words, flush=True)
        self._note(words)

    def _note(self, words: str) -> None:
        """Record what the queue waits for."""
        if words == self._record.waits_for:
            return
        self._record = dataclasses.replace(self._record, waits_for=words)
        self._write()

    def end(self, why: str) -> None:
        """Record that no more is started."""
        self._record = dataclasses.replace(self._record, waits_for="", ended=time.time(), why=why)
        self._write()

    def _write(self) -> None:
        # A disk that is full keeps no run from being started.
        with contextlib.suppress(ClusterddpError):
            write_queue(self._sweep, self._record)


def main() -> None:
    """Be the queue of a sweep."""
    queue = Queue(SweepDir(Path(sys.argv[1])), inherited_environment())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, queue.interrupt)
    why = "it was killed"
    try:
        why = queue.work()
    except BaseException as error:
        traceback.print_exc()
        why = f"it failed: {type(error).__name__}: {error}"
        sys.exit(1)
    finally:
        queue.end(why)


if __name__ == "__main__":
    main()

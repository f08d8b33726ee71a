"""`python -m clusterddp.sweep.queue SWEEP_DIR`: start the runs of a sweep without Slurm, and wait for their ends.

The runs do not depend on the queue, which may be killed at any time; the runs that it has not started then wait for the
next queue of the sweep. A run whose GPUs are in use keeps its place in the queue.
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
_RETRY_S = 5.0
"""The pause before a retry if the GPUs are in use; the end of one of the queue's runs ends the pause."""
_MAX_FAILED_STARTS = 3
"""After so many failed starts in a row the queue stops: the other runs would fail, too."""


class _StartedRun:
    """A run that was started, with the synchroniser of its files."""

    def __init__(self, run: RunDir, environ: Mapping[str, str]) -> None:
        self.run = run
        self._stack = contextlib.ExitStack()
        self._sync: Synchroniser = self._stack.enter_context(Synchroniser([run], environ, interval_s=_POLL_S))

    def has_ended(self) -> bool:
        self._sync.update()
        return read_state(self.run).finished

    def close(self) -> None:
        """Download the results of the run, which has ended."""
        self._sync.download()
        self._stack.close()


class Queue:
    """Starts runs in the order of their numbers, a limited number at a time."""

    def __init__(self, sweep: SweepDir, environ: Mapping[str, str]) -> None:
        self._sweep = sweep
        self._environ = environ
        self._record = QueueRecord(process=dataclasses.asdict(ProcessIdentity.of()))
        self._waiting: deque[RunDir] = deque()
        self._started: list[_StartedRun] = []
        first = read_plan(sweep.runs()[0])
        self._width = queue_width(first, read_sweep(sweep).throttle)
        self._failed_starts = 0
        self._retry_at = 0.0
        self._is_starting = False
        self._signal: str | None = None

    def work(self) -> str:
        """Start runs until all have ended, or there is a reason to stop earlier; return the reason."""
        write_queue(self._sweep, self._record)
        for run in self._sweep.runs():
            self._sort_in(run)
        while self._waiting or self._started:
            if reason := self._why_stop():
                return reason
            ended = [started for started in self._started if started.has_ended()]
            self._started = [started for started in self._started if started not in ended]
            if ended:
                self._retry_at = 0.0
            while not self._why_stop() and self._start_next():
                pass
            for started in ended:  # last: a long download must not delay the next start
                started.close()
            time.sleep(_POLL_S)
        return "all runs have ended"

    def _sort_in(self, run: RunDir) -> None:
        """Add a run to the waiting ones, or, if an earlier queue of this sweep has started it, to the started ones."""
        try:
            waits = read_run(run).queued and read_end(run.attempts()[-1]) is None
        except (ClusterddpError, OSError) as error:  # one broken record must not stop the others
            print(f"{run.path}: {error}", flush=True)
            return
        if waits:
            self._waiting.append(run)
        elif not read_state(run).finished:
            self._started.append(_StartedRun(run, self._environ))

    def _why_stop(self) -> str | None:
        if self._signal:
            return f"it was ended by {self._signal}"
        if is_file(self._sweep.cancel_file):
            return "the sweep was cancelled"
        if self._failed_starts >= _MAX_FAILED_STARTS and self._waiting:
            return f"{self._failed_starts} runs in a row could not be started"
        return None

    def _start_next(self) -> bool:
        """Start the first waiting run, if another may run now; False: it did not."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return False
        if self._width is not None and len(self._started) >= self._width:
            return False
        run = self._waiting[0]
        try:
            started = self._start(run)
        except GpusInUseError as error:
            self._record_wait(f"{run.name}: {error.message}")
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        self._waiting.popleft()
        self._record_wait("")
        if started:
            self._started.append(_StartedRun(run, self._environ))
        return True

    def _start(self, run: RunDir) -> bool:
        """Start one run; False: it has ended, or another process has claimed it.

        Raises: GpusInUseError: it has to wait.
        """
        try:
            retry_outage(run.newest_attempt)
            with self._interruptible():
                if not start_queued(run, self._report):
                    return False
        except GpusInUseError:
            raise
        except ClusterddpError as error:  # it is recorded as the end of the run
            print(f"{run.name}: {error.message}", flush=True)
            self._failed_starts += 1
            return False
        except KeyboardInterrupt:
            return False
        self._failed_starts = 0
        if is_file(run.cancel_file):  # it was cancelled during the start, before its hosts had the run
            with contextlib.suppress(ClusterddpError):
                cancel(run)
        return True

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop after a signal; interrupt a start that is under way."""
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

    def _report(self, message: str) -> None:
        print(message, flush=True)
        self._record_wait(message)

    def _record_wait(self, reason: str) -> None:
        """Record what the queue waits for."""
        if reason == self._record.waits_for:
            return
        self._record = dataclasses.replace(self._record, waits_for=reason)
        self._write()

    def end(self, why: str) -> None:
        """Record that the queue has ended."""
        self._record = dataclasses.replace(self._record, waits_for="", ended=time.time(), why=why)
        self._write()

    def _write(self) -> None:
        # A full disk must not stop the queue.
        with contextlib.suppress(ClusterddpError):
            write_queue(self._sweep, self._record)


def main() -> None:
    """Run the queue of a sweep."""
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

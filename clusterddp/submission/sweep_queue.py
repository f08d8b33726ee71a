"""The queue of a sweep without Slurm: `python -m clusterddp.submission.sweep_queue SWEEP_DIR` starts its runs.

The runs do not depend on the queue, which may be killed at any time; the runs that it has not started then wait for the
next queue of the sweep. A run whose GPUs are in use keeps its place in the queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.base import Report, no_report
from clusterddp.places.registry import launcher_named
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.planning.placement import GpusInUseError
from clusterddp.planning.plan import read_plan
from clusterddp.planning.processes import process_environment, queue_command
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import cancelled, claim, end_queued, end_run, final_end, read_end
from clusterddp.run.cleanup import marking
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run
from clusterddp.run.state import RunState, RunView, spell_states
from clusterddp.run.sweep import QueueRecord, SweepDir, read_queue, read_sweep, write_queue, write_sweep
from clusterddp.submission.cancel import cancel
from clusterddp.submission.submit import (
    CANCELLED_IN_QUEUE,
    Submitted,
    check_start,
    give_up_start,
    open_attempt,
    plan_again,
    record_end,
    start_attempt,
)
from clusterddp.submission.sweep_plan import queue_width
from clusterddp.system.directories import remove_directory
from clusterddp.system.files import is_file, open_log, read_tail, write_json
from clusterddp.system.own_directory import demand_own
from clusterddp.system.processes import read_process
from clusterddp.system.storage import retry_outage


def start_queued(run: RunDir, report: Report = no_report) -> bool:
    """Claim a run in the queue and start it; False: another process has claimed it.

    Raises: GpusInUseError: it has to wait. ClusterddpError: it cannot be started, which is recorded as its end.
    KeyboardInterrupt: the start was interrupted, which is recorded as its end, too.
    """
    attempt = run.newest_attempt()
    if attempt.claim.exists():
        return False
    plan_error = None
    try:
        plan_again(run, inherited_environment())
    except GpusInUseError:
        raise
    except (ClusterddpError, OSError) as error:
        plan_error = error
    if not claim(attempt):
        return False
    try:
        submitter = dataclasses.asdict(ProcessIdentity.of())
        write_run(run, dataclasses.replace(read_run(run), queued=False, submitter=submitter))
        if plan_error is not None:
            give_up_start(run, plan_error)
        start_attempt(run, attempt.number, report, may_wait=True)
    except GpusInUseError:
        write_run(run, dataclasses.replace(read_run(run), queued=True))
        if run.cancel_file.exists():  # it was cancelled during the start
            end_run(run, cancelled(CANCELLED_IN_QUEUE))
        else:
            attempt.claim.unlink(missing_ok=True)
        raise
    except KeyboardInterrupt:
        if final_end(run) is None:
            record_end(run, cancelled("interrupted while it was being started"))
        raise
    return True


def queue_again(run: RunDir, view: RunView) -> None:
    """Queue a run that has ended for its next attempt.

    Raises: ClusterddpError: leftover processes cannot be ended, or the file system refuses.
    """
    record = read_run(run)
    if view.state is RunState.LOST and record.queued and not run.attempts()[-1].claim.exists():
        return  # it waits already
    launcher_named(record.launcher, inherited_environment()).clear_away(run, record)
    log_event(run, "queued", attempt=open_attempt(run, view, queued=True))


def is_left(run: RunDir, view: RunView) -> bool:
    """Return whether a run of a sweep was lost, was cancelled, or failed before a rank was started."""
    if view.state in {RunState.LOST, RunState.CANCELLED}:
        return True
    return view.state is RunState.FAILED and not any(attempt.start.exists() for attempt in run.attempts())


_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
"""How long a queue may take to end; it may be waiting for hosts that do not answer."""
_CANCELS_AT_ONCE = 8
_POLL_S = 0.05


def submit_to_queue(sweep: SweepDir, environ: Mapping[str, str]) -> Submitted:
    """Start the queue of a sweep whose directory is ready.

    Raises: ClusterddpError: nothing is left of the sweep.
    """
    try:
        return _start_queue(sweep, sweep.runs(), environ)
    except BaseException:  # an interrupted submit leaves no runs
        with contextlib.suppress(ClusterddpError):
            cancel_queued(sweep, environ)
        remove_directory(sweep.path)
        raise


def resume_sweep(sweep: SweepDir) -> Submitted:
    """Start a queue for the runs of a sweep that were not started, were lost or were cancelled.

    Raises: UsageError: there are none, or its queue still runs. ClusterddpError: a run cannot be queued again.
    """
    sweep = SweepDir(sweep.path.absolute())
    demand_own(sweep.path)
    environ = inherited_environment()
    runs = sweep.demand_sealed()
    with Synchroniser(runs, environ) as sync:
        sync.update()
    views = {run: read_state(run) for run in runs}
    _refuse_resume(sweep, views.values())
    left = [run for run, view in views.items() if is_left(run, view)]
    if not left:
        failed = [run.name for run, view in views.items() if view.state.value == "FAILED"]
        hint = f"clusterddp resume {failed[0]} resumes one that failed" if failed else None
        raise UsageError(f"{sweep.name}: no run is left to start: {spell_states(views.values())}", hint=hint)
    check_start(read_plan(left[0]), environ)
    for run in left:
        queue_again(run, views[run])
    return _start_queue(sweep, left, environ)


def cancel_queued(sweep: SweepDir, environ: Mapping[str, str], *, save: bool = False) -> str:
    """End the queue of a sweep and its runs; with `save`, after a checkpoint. Return a sentence with their states.

    Raises: ClusterddpError: some have not ended in time.
    """
    runs = sweep.runs()
    waited = [run for run in runs if end_queued(run, "cancelled with its sweep before it was started")]
    _end_queue(sweep)
    with Synchroniser(runs, environ) as sync:
        sync.update()
    going = [run for run in runs if not read_state(run).finished]
    errors: list[ClusterddpError] = []

    def end(run: RunDir) -> None:
        try:
            cancel(run, save=save)
        except ClusterddpError as error:  # the other runs are still ended
            errors.append(error)

    with ThreadPoolExecutor(_CANCELS_AT_ONCE) as pool:
        list(pool.map(end, going))
    if errors:
        raise ClusterddpError("\n".join(error.message for error in errors), hint=errors[0].hint)
    states = spell_states(read_state(run) for run in (runs if not going and not waited else [*waited, *going]))
    return f"ended: {states}" if going or waited else f"has already ended: {states}"


def _start_queue(sweep: SweepDir, runs: list[RunDir], environ: Mapping[str, str]) -> Submitted:
    """Start the queue, which outlives this process; it inherits the lock, so there is never a second one.

    Raises: UsageError: a queue runs already. ClusterddpError: it did not start.
    """
    record = read_sweep(sweep)
    environment = process_environment(environ)  # without a cookie: the cleanup after a run must not kill the queue
    with _locked(sweep) as lock, open_log(sweep.queue_log) as log:
        sweep.cancel_file.unlink(missing_ok=True)
        starting = QueueRecord(process=ProcessIdentity.of(), is_starting=True)
        write_queue(sweep, starting)
        with marking(None):
            process = subprocess.Popen(
                queue_command(sweep.path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=sweep.launcher_dir,
                env=environment,
                start_new_session=True,
                umask=0o077,
                pass_fds=(lock,),
            )
        try:
            _await_queue(sweep, process)
        except BaseException:
            process.kill()
            process.wait()
            write_queue(sweep, dataclasses.replace(starting, ended=time.time(), why="it did not start"))
            raise
    job_id, names = str(process.pid), tuple(run.name for run in runs)
    write_sweep(sweep, dataclasses.replace(record, job_id=job_id))
    return Submitted(run=sweep.name, launcher=record.launcher, job_id=job_id, run_dir=sweep.path, runs=names)


def _await_queue(sweep: SweepDir, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        record = read_queue(sweep)
        if record is not None and not record.is_starting:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            last_line = read_tail(sweep.queue_log).rpartition("\n")[2].strip()
            raise ClusterddpError(f"{sweep.name}: its queue did not start: {last_line or 'no answer in time'}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _locked(sweep: SweepDir) -> Iterator[int]:
    """Hold the lock of the queue; a process that inherits the descriptor holds it, too.

    Raises: UsageError: another process holds it.
    """
    descriptor = os.open(sweep.queue_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            raise UsageError(f"{sweep.name}: its queue runs or is starting") from None
        raise ClusterddpError(f"{sweep.queue_lock}: cannot be locked: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_resume(sweep: SweepDir, views: Iterable[RunView]) -> None:
    record, queue = read_sweep(sweep), read_queue(sweep)
    if record.launcher == "slurm":
        raise UsageError(
            f"{sweep.name}: runs of a job array are resumed one by one", hint=f"clusterddp resume {sweep.name}.0"
        )
    state = queue.state if queue else "GONE"
    # The queue runs for a moment after the end of its last run.
    if queue and state == "RUNNING" and not all(view.finished for view in views):
        raise UsageError(
            f"{sweep.name}: its queue still runs (pid {queue.process.pid})",
            hint=f"clusterddp resume {sweep.name}.0 resumes one run that has ended",
        )
    if queue and state == "UNKNOWN":
        raise UsageError(f"{sweep.name}: its queue is on {queue.process.host}", hint="resume it there")


def _end_queue(sweep: SweepDir) -> None:
    """End the queue of a sweep; on another machine it is only asked to end, and cannot start runs that have ended."""
    record = read_queue(sweep)
    state = record.state if record else "GONE"
    if record is None or state not in {"RUNNING", "UNKNOWN"}:
        return
    write_json(sweep.cancel_file, {"time": time.time()}, exclusive=True)
    deadline = time.monotonic() + _END_TIMEOUT_S
    if state == "RUNNING" and not record.is_starting:  # otherwise it sees the file
        _signal(record.process, signal.SIGTERM)
    while state in {"RUNNING", "UNKNOWN"} and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = read_queue(sweep)
        state = now.state if now else "GONE"
    if state == "RUNNING" and not record.is_starting:
        _signal(record.process, signal.SIGKILL)


def _signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = read_process(identity.pid)
        if identity.alive():
            process.send_signal(number)


_PASS_S = 0.5
_RETRY_S = 5.0
"""The pause before a retry if the GPUs are in use; the end of one of the queue's runs ends the pause."""
_MAX_FAILED_STARTS = 3
"""After so many failed starts in a row the queue stops: the other runs would fail, too."""


class _StartedRun:
    """A run that was started, with the synchroniser of its files."""

    def __init__(self, run: RunDir, environ: Mapping[str, str]) -> None:
        self.run = run
        self._stack = contextlib.ExitStack()
        self._sync: Synchroniser = self._stack.enter_context(Synchroniser([run], environ, interval_s=_PASS_S))

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
        self._record = QueueRecord(process=ProcessIdentity.of())
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
            time.sleep(_PASS_S)
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

"""Start, restart and end the queue of a sweep without Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.launchers.state import read_state
from clusterddp.planning.command_lines import queue_command
from clusterddp.planning.environment import process_environment
from clusterddp.planning.plan import read_plan
from clusterddp.planning.prerequisites import check_secrets, check_trainer
from clusterddp.ranks.environment import COOKIE, inherited_environment
from clusterddp.results.sync import Synchroniser
from clusterddp.run.attempts import end_queued
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity
from clusterddp.run.sweep import QueueRecord, SweepDir, read_queue, read_sweep, write_queue, write_sweep
from clusterddp.run.view import RunView, spell_states
from clusterddp.submission.cancel import cancel
from clusterddp.sweep.queued_run import is_left, queue_again
from clusterddp.sweep.staging import take_back
from clusterddp.system.files import read_tail, write_json
from clusterddp.system.processes import read_process

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
"""How long a queue may take to end; it may be waiting for hosts that do not answer."""
_CANCELS_AT_ONCE = 8
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedSweep:
    """The result of the submit or resume of a sweep."""

    sweep: str
    launcher: str
    job_id: str
    """The id of the job array, or the pid of the queue."""
    path: Path
    runs: tuple[str, ...]
    """The runs that will be started."""


def submit_to_queue(sweep: SweepDir, environ: Mapping[str, str]) -> SubmittedSweep:
    """Start the queue of a sweep whose directory is ready.

    Raises: ClusterddpError: nothing is left of the sweep.
    """
    try:
        return _started(sweep, sweep.runs(), environ)
    except BaseException:  # an interrupted submit leaves no runs
        with contextlib.suppress(ClusterddpError):
            cancel_queued(sweep, environ)
        take_back(sweep)
        raise


def resume_sweep(sweep: SweepDir) -> SubmittedSweep:
    """Start a queue for the runs of a sweep that were not started, were lost or were cancelled.

    Raises: UsageError: there are none, or its queue still runs. ClusterddpError: a run cannot be queued again.
    """
    sweep = SweepDir(sweep.path.absolute())
    environ = inherited_environment()
    runs = sweep.runs()
    with Synchroniser(runs, environ) as sync:
        sync.update()
    views = {run: read_state(run) for run in runs}
    _refuse_resume(sweep, views.values())
    left = [run for run, view in views.items() if is_left(run, view)]
    if not left:
        failed = [run.name for run, view in views.items() if view.state.value == "FAILED"]
        hint = f"clusterddp resume {failed[0]} resumes one that failed" if failed else None
        raise UsageError(f"{sweep.name}: no run is left to start: {spell_states(views.values())}", hint=hint)
    plan = read_plan(left[0])
    check_secrets(plan.secrets, environ)
    check_trainer(plan.gang, elsewhere=plan.elsewhere)
    for run in left:
        queue_again(run, views[run])
    return _started(sweep, left, environ)


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


def _started(sweep: SweepDir, runs: list[RunDir], environ: Mapping[str, str]) -> SubmittedSweep:
    record = read_sweep(sweep)
    pid = _start_queue(sweep, environ)
    write_sweep(sweep, dataclasses.replace(record, job_id=str(pid)))
    names = tuple(run.name for run in runs)
    return SubmittedSweep(sweep=sweep.name, launcher=record.launcher, job_id=str(pid), path=sweep.path, runs=names)


def _start_queue(sweep: SweepDir, environ: Mapping[str, str]) -> int:
    """Start the queue, which outlives this process, and return its pid.

    It inherits the lock, so there is never a second one.
    Raises: UsageError: a queue runs already. ClusterddpError: it did not start.
    """
    environment = process_environment("", environ)
    # Without a cookie: the cleanup after a run must not kill the queue.
    environment.pop(COOKIE)
    with _locked(sweep) as lock, open(sweep.queue_log, "ab", opener=_private) as log:
        sweep.cancel_file.unlink(missing_ok=True)
        starting = QueueRecord(process=dataclasses.asdict(ProcessIdentity.of()), is_starting=True)
        write_queue(sweep, starting)
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
    return process.pid


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
            f"{sweep.name}: its queue still runs (pid {queue.identity.pid})",
            hint=f"clusterddp resume {sweep.name}.0 resumes one run that has ended",
        )
    if queue and state == "UNKNOWN":
        raise UsageError(f"{sweep.name}: its queue is on {queue.identity.host}", hint="resume it there")


def _end_queue(sweep: SweepDir) -> None:
    """End the queue of a sweep; on another machine it is only asked to end, and cannot start runs that have ended."""
    record = read_queue(sweep)
    state = record.state if record else "GONE"
    if record is None or state not in {"RUNNING", "UNKNOWN"}:
        return
    write_json(sweep.cancel_file, {"time": time.time()}, exclusive=True)
    deadline = time.monotonic() + _END_TIMEOUT_S
    if state == "RUNNING" and not record.is_starting:  # otherwise it sees the file
        _signal(record.identity, signal.SIGTERM)
    while state in {"RUNNING", "UNKNOWN"} and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = read_queue(sweep)
        state = now.state if now else "GONE"
    if state == "RUNNING" and not record.is_starting:
        _signal(record.identity, signal.SIGKILL)


def _signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = read_process(identity.pid)
        if identity.alive():
            process.send_signal(number)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

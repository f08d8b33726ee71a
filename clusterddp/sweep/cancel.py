"""Ending a sweep: all of its runs at once; on Slurm with one order for the whole job array."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import time
from collections.abc import Mapping

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.launchers.state import announce, read_state
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import end_run, refuse_to_end
from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import cancelled
from clusterddp.run.record import RunRecord, log_event, read_run
from clusterddp.run.stop import request_stop
from clusterddp.run.sweep_dir import SweepDir, SweepRecord, read_sweep
from clusterddp.run.view import RunState, RunView
from clusterddp.slurm.commands import run_slurm
from clusterddp.slurm.identity import job_name
from clusterddp.slurm.queue import Slurm
from clusterddp.submission.submit import cancel
from clusterddp.sweep.queue_control import cancel_queued, spell_states
from clusterddp.system.files import write_json

_ANSWER_S = 60.0
"""How long running tasks have to end: Slurm's KillWait, 30 s by default, and some more."""
_SAVE_S = 180.0
"""The same when they may write a checkpoint first."""
_POLL_S = 0.5
_Run = tuple[RunDir, RunRecord]


def cancel_sweep(sweep: SweepDir, *, save: bool = False) -> str:
    """End every run of a sweep; with `save`, those that run may write a checkpoint first. Say what became of them.

    Raises: ClusterddpError: some have not ended in time, or Slurm could not be asked. UsageError: it is another user's.
    """
    sweep = SweepDir(sweep.path.absolute())
    refuse_to_end(sweep.path)
    record = read_sweep(sweep)
    return _cancel_array(sweep, record, save=save) if record.launcher == "slurm" else cancel_queued(sweep, save=save)


def _cancel_array(sweep: SweepDir, record: SweepRecord, *, save: bool) -> str:
    environ = inherited_environment()
    slurm = Slurm(environ, max_age_s=_POLL_S)
    runs = [(run, read_run(run)) for run in sweep.runs()]
    views = _read_states(runs, slurm)
    going = [(run, known) for run, known in runs if not views[run].finished]
    if not going:
        return f"has already ended: {spell_states(views.values())}"
    of_array = [(run, known) for run, known in going if known.job_tag == record.job_tag]
    stopping = [run for run, _ in of_array if save and views[run].state is RunState.RUNNING]
    for run in stopping:
        request_stop(run.attempts()[-1].stop_file, "cancel --save")
    if stopping:
        # They may see their stop files late over a slow file system.
        _scancel(record, environ, "--state=RUNNING", "--batch", "--signal=USR2")
    for run, _ in of_array:
        if run not in stopping:
            _mark(run)
    _scancel(record, environ, *(["--state=PENDING"] if stopping else []))
    for run, _ in of_array:
        if views[run].state in {RunState.PENDING, RunState.REQUEUED}:
            _record_end(run)
    for run, known in going:
        if known.job_tag != record.job_tag:  # it goes on in a job of its own
            cancel(run, save=save)
    return _await_all(sweep, going, slurm, _SAVE_S if stopping else _ANSWER_S)


def _scancel(record: SweepRecord, environ: Mapping[str, str], *options: str) -> None:
    """Order something for the tasks of the array that still carry its name; those that have ended are no error.

    Raises: SlurmError: Slurm could not be asked.
    """
    assert record.job_tag is not None
    user = pwd.getpwuid(os.getuid()).pw_name
    # The name alone says which jobs are meant; the number, where it is known, spares Slurm the search.
    number = [record.job_id] if record.job_id else []
    argv = ["scancel", f"--user={user}", f"--name={job_name(record.name, record.job_tag)}", *options, *number]
    try:
        run_slurm(argv, environ=environ)
    except SlurmError as error:
        if error.transient:
            raise


def _mark(run: RunDir) -> None:
    """Ask whoever carries the run, now or after a requeue, to end it."""
    by = f"pid {os.getpid()} on {socket.gethostname()}"
    if write_json(run.cancel_file, {"by": by, "time": time.time()}, exclusive=True):
        log_event(run, "cancel_requested")


def _record_end(run: RunDir) -> None:
    # Whoever has recorded an end first is right.
    with contextlib.suppress(ClusterddpError):
        end_run(run, cancelled("cancelled with its sweep before it was started"))


def _await_all(sweep: SweepDir, going: list[_Run], slurm: Slurm, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        views = _read_states(going, slurm)
        left = [run.name for run, _ in going if not views[run].finished]
        if not left:
            return f"ended: {spell_states(views.values())}"
        if time.monotonic() >= deadline:
            few = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise ClusterddpError(f"{sweep.name}: {len(left)} runs have not ended after {timeout_s:.0f} s: {few}")
        time.sleep(_POLL_S)


def _read_states(runs: list[_Run], slurm: Slurm) -> dict[RunDir, RunView]:
    announce(runs, slurm)
    return {run: read_state(run, slurm) for run, _ in runs}

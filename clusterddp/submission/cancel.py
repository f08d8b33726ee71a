"""End a run: at once, or after a checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from clusterddp.errors import ClusterddpError
from clusterddp.places.base import Report, no_report
from clusterddp.places.registry import launcher_named
from clusterddp.places.slurm.queue import Phase, Slurm
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import cancelled, end_queued, final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_held
from clusterddp.run.record import RunRecord, log_event, read_gang, read_run
from clusterddp.run.seal import demand_sealed, mark_of
from clusterddp.run.state import RunState, RunView
from clusterddp.run.steps import is_batch_script, running_steps
from clusterddp.run.stop import request_stop
from clusterddp.submission.submit import CANCELLED_IN_QUEUE, record_end, wait
from clusterddp.system.files import is_file, write_json
from clusterddp.system.own_directory import account_name

_ANSWER_INTERVAL_S = 0.25
_MAX_AGE_S = 0.5
"""How old an answer of Slurm's may be while a run is being ended."""
_ANSWER_S = 5.0
"""How long the supervisors may take to cancel: they look four times a second, then kill the ranks."""
_ASKS_WITHIN_S = 2.0
"""So long a run that was asked to stop may take to end before the user reads what it waits for."""
HOW_TO_STOP = "a program that asks clusterddp.should_stop(), or looks at $CLUSTERDDP_STOP_FILE, saves: docs/entry.md"


def cancel(run: RunDir, *, save: bool = False, timeout_s: float = 15.0, report: Report = no_report) -> str:
    """End a run; with `save`, let it write a checkpoint first. Return a sentence on the result.

    A run that has ended stays as it is; a second cancel only waits for the first. `report` receives what a user should
    know while it waits.
    Raises: ClusterddpError: the run has not ended in time, or with `save` ended without a checkpoint. UsageError: the
    run is not this user's own.
    """
    run = RunDir(run.path.absolute())
    if mark_of(run) != "unsealed" or final_end(run) is None:  # of one that has ended the end is read
        demand_sealed(run)
    record = read_run(run)
    if record.is_hold and record.launcher != "slurm":  # there its job ends them
        for each in list_held(run):
            cancel(each, save=save, timeout_s=timeout_s, report=report)
    with Synchroniser([run], inherited_environment(), interval_s=_ANSWER_INTERVAL_S) as sync:
        sync.update()
        return _end(run, sync, save=save, timeout_s=timeout_s, report=report)


def _end(run: RunDir, sync: Synchroniser, *, save: bool, timeout_s: float, report: Report) -> str:
    if end_queued(run, CANCELLED_IN_QUEUE):
        return CANCELLED_IN_QUEUE
    view = read_state(run)
    record = read_run(run)
    if view.state is RunState.LOST:
        launcher = launcher_named(record.launcher, inherited_environment())
        num_strays = launcher.clear_away(run, record)
        if num_strays:
            return f"was lost; ended {num_strays} leftover {launcher.things}"
    if view.finished:
        return f"has already ended: {view.state.value} ({view.reason})"
    waits = view.job is not None and view.job.phase is Phase.WAITING
    if save and view.state is not RunState.REQUEUED and view.attempt is not None and not waits:
        return _stop(run, record, view.attempt, sync, report)
    return _cancel(run, record, timeout_s, sync)


def _stop(run: RunDir, record: RunRecord, attempt: int, sync: Synchroniser, report: Report) -> str:
    """Ask the run to checkpoint and end, and wait for its end.

    Raises: ClusterddpError: it did not end, or ended without a checkpoint.
    """
    launcher = launcher_named(record.launcher, inherited_environment())
    gang = read_gang(run)
    grace_s = gang.stop_grace_s
    is_script = is_batch_script(run)
    if not (is_script and launcher.signal_script(run, record)):
        for step in running_steps(run, attempt) if is_script else [run]:
            request_stop(step.attempt(attempt).stop_file, "cancel --save")
    log_event(run, "stop_requested", attempt=attempt, by="cancel --save")
    if not is_script:
        launcher.request_stop(run, record, sync)
    with _detaching(f"{run.name} was asked to stop, and does so without this command"):
        slurm = Slurm(inherited_environment(), max_age_s=_MAX_AGE_S)
        view = wait(run, _ASKS_WITHIN_S, slurm=slurm, sync=sync)
        if not view.finished:
            asks = gang.entry.always_stops or is_file(run.attempt(attempt).asked)
            report(
                "asked to stop: its own signal was sent, or its ranks see the stop file; waiting for its end"
                if is_script
                else f"asked to stop, waiting for its checkpoint; ended after {grace_s:.0f} s at the latest"
                if asks
                else f"the program has not asked clusterddp.should_stop() so far: unless it looks at "
                f"$CLUSTERDDP_STOP_FILE itself, it is ended in {grace_s:.0f} s and saves nothing; "
                f"clusterddp cancel {run.name} ends it now"
            )
            view = wait(run, grace_s + _ANSWER_S - _ASKS_WITHIN_S, slurm=slurm, sync=sync)
    if not view.finished:
        raise ClusterddpError(
            f"{run.name}: was asked to stop, and has not ended after {grace_s + _ANSWER_S:.0f} s",
            hint=f"clusterddp cancel {run.name} ends it without a checkpoint",
        )
    if view.state is RunState.CANCELLED and view.end and view.end.outcome == "CANCELLED":
        raise ClusterddpError(f"{run.name}: {view.reason}", hint=HOW_TO_STOP)
    if view.state in {RunState.FAILED, RunState.LOST}:
        raise ClusterddpError(f"{run.name}: was asked to stop, and ended {view.state.value}: {view.reason}")
    return f"was asked to stop, and has ended: {view.reason}" if is_script else _describe_end(view)


@contextlib.contextmanager
def _detaching(what_goes_on: str) -> Iterator[None]:
    """Let Ctrl-C end the waiting only, and say what goes on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{what_goes_on}; clusterddp status shows it") from None


def _cancel(run: RunDir, record: RunRecord, timeout_s: float, sync: Synchroniser) -> str:
    launcher = launcher_named(record.launcher, inherited_environment())
    deadline = time.monotonic() + timeout_s
    asked = ask_to_end(run)
    will_answer = launcher.request_end(run, record, sync)
    with _detaching(f"{run.name} was asked to end, and does so without this command"):
        slurm = Slurm(inherited_environment(), max_age_s=_MAX_AGE_S)
        view = wait(run, min(_ANSWER_S, timeout_s) if will_answer else 0.0, slurm=slurm, sync=sync)
    # No supervisor answers: the launcher ends the run.
    if final_end(run) is None and launcher.end_by_force(run, record, deadline - time.monotonic()):
        record_end(run, cancelled(launcher.killed))
        view = read_state(run, slurm)
    if not view.finished:
        view = wait(run, max(0.0, deadline - time.monotonic()), slurm=slurm, sync=sync)
    if not view.finished:
        raise ClusterddpError(
            f"{run.name}: {view.reason}, and has not ended after {timeout_s:.0f} s",
            hint=f"it ends as soon as its supervisors see {run.cancel_file}",
        )
    return _describe_end(view) if asked else f"was being cancelled already, {_describe_end(view)}"


def ask_to_end(run: RunDir) -> bool:
    """Write the file by which a run ends, now or after a requeue of its job; False: it was there already."""
    is_new = write_json(run.cancel_file, {"by": account_name(os.geteuid()), "time": time.time()}, exclusive=True)
    if is_new:
        log_event(run, "cancel_requested")
    return is_new


def _describe_end(view: RunView) -> str:
    result = {RunState.CANCELLED: "cancelled", RunState.COMPLETED: "completed before it could be cancelled"}
    text = result.get(view.state, f"ended: {view.state.value} ({view.reason})")
    return f"{text}; {view.end.warning}" if view.end and view.end.warning else text

"""Submit and cancel a sweep: its runs are tasks of one Slurm job array, or wait in a queue."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.places.slurm.launcher import submit_job, variables_for
from clusterddp.places.slurm.queue import Slurm, scancel
from clusterddp.places.slurm.state import wait_for_job
from clusterddp.places.state import announce, read_state
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import cancelled
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_name
from clusterddp.run.record import RunRecord, read_run
from clusterddp.run.state import RunState, RunView, spell_states
from clusterddp.run.steps import is_batch_script
from clusterddp.run.stop import request_stop
from clusterddp.run.sweep import SweepDir, SweepRecord, read_sweep, write_sweep
from clusterddp.submission.cancel import ask_to_end, cancel
from clusterddp.submission.submit import Submitted, check_start, record_end
from clusterddp.submission.sweep_plan import SweepPlan, make_sweep
from clusterddp.submission.sweep_queue import cancel_queued, submit_to_queue
from clusterddp.system.directories import remove_directory

_ANSWER_S = 60.0
"""How long running tasks may take to end: Slurm's KillWait, 30 s by default, and 30 s more."""
_SAVE_S = 180.0
"""How long they may take if they write a checkpoint first."""
_POLL_S = 0.5
_Run = tuple[RunDir, RunRecord]


def submit_sweep(plan: SweepPlan) -> Submitted:
    """Make the directory of the sweep, then submit its job array or start its queue.

    Raises: ClusterddpError: nothing is left behind; or a transient SlurmError: Slurm may have the job, and the sweep
    stays.
    """
    environ = inherited_environment()
    check_start(plan.base, environ)
    ours = plan.job is not None and plan.job.directory is None
    try:
        make_sweep(plan, environ, variables_for(plan.base, environ) if ours else {})
    except FileExistsError as error:
        raise ClusterddpError(f"{plan.path}: another submit has just taken this name", hint="try again") from error
    sweep = SweepDir(plan.path)
    if plan.job is None:
        return submit_to_queue(sweep, environ)
    job_id, cluster = _submit(sweep, plan, environ)
    try:
        write_sweep(sweep, dataclasses.replace(read_sweep(sweep), job_id=job_id, cluster=cluster))
    except ClusterddpError:  # the disk is full: no process could find the job
        _withdraw(sweep, environ)
        raise
    names = tuple(run.run for run in plan.runs)
    return Submitted(run=plan.sweep, launcher=plan.base.launcher, job_id=job_id, run_dir=plan.path, runs=names)


def cancel_sweep(sweep: SweepDir, *, save: bool = False) -> str:
    """End every run of a sweep; with `save`, after a checkpoint. Return a sentence with their states.

    Raises: ClusterddpError: some have not ended in time, or Slurm could not be asked. UsageError: one is not
    this user's own.
    """
    sweep = SweepDir(sweep.path.absolute())
    sweep.demand_sealed()
    record = read_sweep(sweep)
    environ = inherited_environment()
    if record.launcher == "slurm":
        return _cancel_array(sweep, record, environ, save=save)
    return cancel_queued(sweep, environ, save=save)


def _cancel_array(sweep: SweepDir, record: SweepRecord, environ: Mapping[str, str], *, save: bool) -> str:
    """See `cancel_sweep`."""
    slurm = Slurm(environ, max_age_s=_POLL_S)
    runs = [(run, read_run(run)) for run in sweep.runs()]
    views = _read_states(runs, slurm)
    going = [(run, known) for run, known in runs if not views[run].finished]
    if not going:
        return f"has already ended: {spell_states(views.values())}"
    of_array = [(run, known) for run, known in going if known.job_tag == record.job_tag]
    stopping = [run for run, _ in of_array if save and views[run].state is RunState.RUNNING]
    # First, since the next task of the array may start as soon as another one ends.
    for run, _ in of_array:
        if run not in stopping:
            ask_to_end(run)
    _request_stops(stopping)
    assert record.job_tag is not None
    names = {job_name(record.name, record.job_tag), *(job.name for run, _ in of_array if (job := views[run].job))}
    if stopping and not is_batch_script(stopping[0]):
        # A slow file system may show them their stop files late.
        _scancel(names, record, environ, "--state=RUNNING", "--batch", "--signal=USR2")
    _scancel(names, record, environ, *(["--state=PENDING"] if stopping else []))
    for run, _ in of_array:
        if views[run].state in {RunState.PENDING, RunState.REQUEUED}:
            record_end(run, cancelled("cancelled with its sweep before it was started"))
    for run, known in going:
        if known.job_tag != record.job_tag:  # it was resumed in a job of its own
            cancel(run, save=save)
    return _await_all(sweep, going, slurm, _SAVE_S if stopping else _ANSWER_S)


def _request_stops(runs: Sequence[RunDir]) -> None:
    """Ask running tasks of the array to checkpoint and end."""
    for run in runs:
        if is_batch_script(run):
            cancel(run, save=True)
        else:
            request_stop(run.attempts()[-1].stop_file, "cancel --save")


def _submit(sweep: SweepDir, plan: SweepPlan, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Run sbatch once; if its answer is unclear, find the array by its tag. Return the array's id and its cluster."""
    array = dataclasses.replace(plan.base, slurm=plan.job)
    first = sweep.runs()[0]
    try:
        answer = submit_job(first, array, read_run(first), environ, sweep=sweep)[0]
    except KeyboardInterrupt:  # an interrupted submit leaves no runs
        _withdraw(sweep, environ)
        raise
    except SlurmError as error:
        if not error.transient:
            remove_directory(sweep.path)
        raise
    number, _, cluster = answer.partition(";")
    return number.partition("_")[0], cluster or None


def _withdraw(sweep: SweepDir, environ: Mapping[str, str]) -> None:
    """Cancel the array, if Slurm has it, and remove the sweep; a job that starts later finds no runs."""
    first = sweep.runs()[0]
    record = read_run(first)
    with contextlib.suppress(SlurmError):
        job = wait_for_job(first, record, environ, num_looks=3)
        if job is not None:
            scancel(job.name, job.job_id.partition("_")[0], record.cluster, environ)
    remove_directory(sweep.path)


def _scancel(names: Iterable[str], record: SweepRecord, environ: Mapping[str, str], *options: str) -> None:
    """Run scancel for the tasks of the array, by their names; tasks that have ended are no error.

    Raises: SlurmError: Slurm could not be asked.
    """
    for name in names:
        try:
            # The name selects the jobs; with their id Slurm need not search for it.
            scancel(name, record.job_id, record.cluster, environ, *options)
        except SlurmError as error:
            if error.transient:
                raise


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

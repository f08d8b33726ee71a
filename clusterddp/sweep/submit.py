"""Submit and cancel a sweep: its runs are tasks of one Slurm job array, or wait in a queue."""

from __future__ import annotations

from clusterddp.launchers.slurm.launcher import SlurmLauncher, variables_for
from clusterddp.planning.prerequisites import check_secrets, check_trainer
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import refuse_to_end
from clusterddp.run.sweep import SweepDir, read_sweep
from clusterddp.sweep.array import cancel_array, submit_array
from clusterddp.sweep.plan import SweepPlan, rename_sweep
from clusterddp.sweep.queue_control import SubmittedSweep, cancel_queued, submit_to_queue
from clusterddp.sweep.staging import make_sweep


def submit_sweep(plan: SweepPlan) -> SubmittedSweep:
    """Make the directory of the sweep, then submit its job array or start its queue.

    Raises: ClusterddpError: nothing is left behind; or a transient SlurmError: Slurm may have the job, and the sweep
    stays.
    """
    environ = inherited_environment()
    check_secrets(plan.base.secrets, environ)
    check_trainer(plan.base.gang, elsewhere=plan.base.elsewhere)
    SlurmLauncher(environ).check(plan.base)
    while True:
        try:
            make_sweep(plan, environ, variables_for(plan.base, environ) if plan.job else {})
            break
        except FileExistsError:
            plan = rename_sweep(plan)
    sweep = SweepDir(plan.path)
    if plan.job is None:
        return submit_to_queue(sweep, environ)
    job_id = submit_array(sweep, plan, environ)
    names = tuple(run.run for run in plan.runs)
    return SubmittedSweep(sweep=plan.sweep, launcher=plan.base.launcher, job_id=job_id, path=plan.path, runs=names)


def cancel_sweep(sweep: SweepDir, *, save: bool = False) -> str:
    """End every run of a sweep; with `save`, after a checkpoint. Return a sentence with their states.

    Raises: ClusterddpError: some have not ended in time, or Slurm could not be asked. UsageError: the sweep belongs to
    another user.
    """
    sweep = SweepDir(sweep.path.absolute())
    refuse_to_end(sweep.path)
    record = read_sweep(sweep)
    environ = inherited_environment()
    if record.launcher == "slurm":
        return cancel_array(sweep, record, environ, save=save)
    return cancel_queued(sweep, environ, save=save)

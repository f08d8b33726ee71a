"""Submit a plan, resume a run, cancel it, wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterddp.errors import ClusterddpError, SlurmError, SpecError, UsageError
from clusterddp.places.base import Report, no_report
from clusterddp.places.registry import launcher_named, starter_named
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.places.staging import make_run
from clusterddp.places.state import read_state
from clusterddp.planning.hold import in_hold, with_own_job
from clusterddp.planning.placement import GpusInUseError, Request
from clusterddp.planning.plan import Plan, move_plan, plan_changed, plan_json, plan_run, read_plan
from clusterddp.planning.prerequisites import check_secrets, check_trainer
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import AttemptEnd, adopt, cancelled, claim, end_run, failed, make_attempt
from clusterddp.run.directory import RunDir
from clusterddp.run.node_marks import learn
from clusterddp.run.record import log_event, read_run, write_run
from clusterddp.run.seal import demand_sealed
from clusterddp.run.state import RunView, refuse_resume
from clusterddp.run.steps import is_batch_script
from clusterddp.system.files import write_json, write_text
from clusterddp.system.own_directory import demand_own

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm
    from clusterddp.spec.load import ResolvedSpec

CANCELLED_IN_QUEUE = "cancelled before it was started"
_RESUME_LOOK_S = 60.0
"""How long `resume` waits for the answers of busy hosts, which decide whether the run may start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The result of a submit or a resume of a run, or of a sweep."""

    run: str
    launcher: str
    job_id: str | None
    """Of a sweep: the id of the job array, or the pid of the queue."""
    run_dir: Path
    runs: tuple[str, ...] = ()
    """Of a sweep: the runs that will be started."""


def plan_ahead(resolved: ResolvedSpec, request: Request) -> Plan:
    """Compute everything that submitting this spec would do, with what its machines say now; see `plan_run`."""
    return launcher_named(resolved.job.launcher, request.environ).look_ahead(plan_run(resolved, request))


def submit(plan: Plan, report: Report = no_report) -> Submitted:
    """Make the run's directory, then start the run; `report` receives progress messages.

    Raises: ClusterddpError: the directory cannot be made, and nothing is left; or the start fails, and the run's
    recorded end says why.
    """
    environ = inherited_environment()
    check_start(plan, environ)
    demand_own(plan.runs_dir)
    plan = make_run(plan, environ)
    return start_attempt(RunDir(plan.run_dir), 0, report)


def check_start(plan: Plan, environ: Mapping[str, str]) -> None:
    """Check what a run needs here. Raises: UsageError, PreflightError: it could not start, with the reason."""
    check_secrets(plan.secrets, environ)
    check_trainer(plan.gang, elsewhere=plan.elsewhere)
    starter_named(plan.launcher, environ).check(plan)


def resume(
    run: RunDir,
    report: Report = no_report,
    *,
    overrides: Sequence[str] = (),
    check: Callable[[], None] | None = None,
    hold: RunDir | None = None,
) -> Submitted:
    """Start the next attempt of a run that ended before it was done, or of one to which `overrides` give more to do.

    `check` may refuse it, once it is known that the run can go on. `hold`: in whose job it goes on; None: in its own.
    Raises: UsageError: the run is not this user's own, has not ended, is done, or cannot go on with these values.
    PreflightError: fewer GPUs are free than the run had. SpecError: an override is wrong.
    """
    run = RunDir(run.path.absolute())
    demand_sealed(run)
    environ = inherited_environment()
    demand_own(run.path)
    record = read_run(run)
    if record.is_hold:
        raise UsageError(f"{run.name}: is a hold, which has no ranks to go on", hint="clusterddp hold SPEC makes one")
    with Synchroniser([run], environ) as sync:
        sync.update(timeout_s=_RESUME_LOOK_S)
    view = read_state(run)
    learn(run)
    instead = f"clusterddp submit {run.name} repeats it; clusterddp resume {run.name} KEY=VALUE gives it more to do"
    refuse_resume(run, view, instead=instead, more=bool(overrides) or is_batch_script(run))
    if check is not None:
        check()
    if not overrides:  # with some, the whole spec is read anew
        from clusterddp.spec.load import load_spec

        try:
            load_spec(run.spec, environ=environ, whole=True)
        except SpecError as error:  # it has a value that only earlier versions took: its ranks would fail
            first = error.problems[0]
            hint = f"clusterddp resume {run.name} {first.key}=VALUE goes on with another value"
            hint += f"; {first.hint}" if first.hint else ""
            raise UsageError(f"{run.name}: {first.key}: {first.message}", hint=hint) from error
    plan = read_plan(run)
    changed = plan_changed(plan, run.spec, overrides, environ) if overrides else plan
    for note in changed.notes:
        if note not in plan.notes:
            report(f"note: {note}")
    left_out = _hosts_of(plan) - _hosts_of(changed)
    # First: leftover processes may hold the run's GPUs.
    launcher_named(record.launcher, environ).clear_away(run, record, left_out=left_out)
    plan = plan_again(run, environ, changed, hold=hold)
    check_start(plan, environ)
    number = open_attempt(run, view)
    log_event(run, "resumed", attempt=number, **({"overrides": list(overrides)} if overrides else {}))
    return start_attempt(run, number, report)


def open_attempt(run: RunDir, view: RunView, *, queued: bool = False) -> int:
    """Make the next attempt of a run that has ended; `queued`: a queue will start it. Return its number.

    An attempt that was queued and never started is reused.
    Raises: UsageError: another process has made the attempt. ClusterddpError: the file system refuses.
    """
    number = view.attempt or 0
    if view.attempt is None or not (read_run(run).queued and claim(run.attempt(number))):
        number = 0 if view.attempt is None else view.attempt + 1
        try:
            make_attempt(run, number)
        except FileExistsError:
            raise UsageError(f"{run.name}: another process is resuming it") from None
        except OSError as error:
            raise ClusterddpError(f"{run.path}: cannot be resumed: {error.strerror}") from error
    adopt(run, number, queued=queued)
    return number


def start_attempt(run: RunDir, attempt: int, report: Report = no_report, *, may_wait: bool = False) -> Submitted:
    """Start an attempt whose directory is ready.

    Raises: ClusterddpError: the start fails; the run's recorded end says why. GpusInUseError: GPUs are in use; with
    `may_wait` no end is recorded.
    """
    name = read_run(run).launcher
    launcher = starter_named(name, inherited_environment(), run=run.name)
    try:
        demand_own(run.path)
        job_id = launcher.start(run, attempt, report)
    except KeyboardInterrupt:
        # A user who interrupts a submit does not want the run.
        result = launcher.withdraw(run)
        reason = "; ".join(filter(None, ("interrupted while it was being started", result)))
        record_end(run, cancelled(reason))
        raise KeyboardInterrupt(f"{run.name}: {reason}") from None
    except (ClusterddpError, OSError) as error:
        if isinstance(error, SlurmError) and error.transient:
            raise  # Slurm may have the job, so the run has not ended
        if isinstance(error, GpusInUseError) and may_wait:
            raise
        give_up_start(run, error)
    return Submitted(run=run.name, launcher=name, job_id=job_id, run_dir=run.path)


def wait(
    run: RunDir,
    timeout_s: float | None = None,
    *,
    slurm: Slurm | None = None,
    sync: Synchroniser = NO_HOSTS,
) -> RunView:
    """Wait until the run has ended or `timeout_s` has passed; return its last state.

    `slurm`: as for `read_state`. `sync`: updates the files of the run.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    interval = 0.2
    while True:
        sync.update()
        view = read_state(run, slurm)
        if view.finished:
            learn(run)
            return view
        left = interval if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return view
        time.sleep(min(interval, left))
        interval = min(1.0, interval * 1.2)


def _hosts_of(plan: Plan) -> set[str]:
    return {node.host for node in plan.gang.nodes} if plan.ssh else set()


def plan_again(
    run: RunDir, environ: Mapping[str, str], changed: Plan | None = None, *, hold: RunDir | None = None
) -> Plan:
    """Renew what depends on the machine, the path of the run directory and `hold`; write the plan.

    `changed`: the plan with other values.
    Raises: GpusInUseError, PreflightError: the machine lacks GPUs for the plan, or they are in use.
    """
    plan = read_plan(run)
    starter = starter_named(plan.launcher, environ, run=run.name)
    renewed = with_own_job(changed or plan) if hold is None else in_hold(changed or plan, hold)
    renewed = move_plan(starter.renew(renewed), run.path)
    record = read_run(run)
    if record.hold != renewed.hold:
        write_run(run, dataclasses.replace(record, hold=renewed.hold))
    if renewed.spec_text != plan.spec_text:
        write_text(run.spec, renewed.spec_text)
    if renewed != plan:
        write_json(run.plan, plan_json(renewed))
    return renewed


def give_up_start(run: RunDir, error: ClusterddpError | OSError) -> NoReturn:
    """Record the reason of a failed start as the run's end, and raise it.

    Raises: ClusterddpError: the reason.
    """
    reason = error.message if isinstance(error, ClusterddpError) else f"could not be started: {error}"
    log = "launcher/submit.log" if (run.launcher_dir / "submit.log").exists() else None
    record_end(run, failed(reason, log=log))
    if isinstance(error, ClusterddpError):
        raise error
    raise ClusterddpError(f"{run.name}: {reason}") from error


def record_end(run: RunDir, end: AttemptEnd) -> None:
    """Record the end of a run, unless one is recorded already."""
    # A full or unreachable disk must not hide why the start failed.
    with contextlib.suppress(ClusterddpError, OSError):
        end_run(run, end)

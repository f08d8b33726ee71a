"""A hold on Slurm: a job without ranks of its own, in which runs are started one after another.

A run asks by a file in the directory of the hold, which stays until the run has ended; keeper.py is the process of the
hold that starts it. The record of the run names the job of the hold, so what Slurm knows of that job says how the run
fares, too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.slurm.queue import Slurm
from clusterddp.places.slurm.state import ask_slurm, find_job, is_over
from clusterddp.run.attempts import cancelled, claim, end_run, final_end
from clusterddp.run.directory import RunDir, is_run_name
from clusterddp.run.find import list_requests
from clusterddp.run.record import RunRecord, drop_secrets, log_event, read_run, write_run
from clusterddp.run.state import Answer, Records
from clusterddp.system.files import write_json

_POLL_S = 0.1
_RELEASE_S = 20.0


def hold_of(run: RunDir, record: RunRecord) -> RunDir:
    """Return the hold that a run is in."""
    if record.hold is None or not is_run_name(record.hold):
        raise ClusterddpError(f"{run.record}: {record.hold!r} is not the name of a hold")
    return RunDir(run.path.parent / record.hold)


def refuse_ended(hold: RunDir, environ: Mapping[str, str]) -> None:
    """Raises: UsageError: Slurm no longer has the job of the hold. SlurmError: Slurm does not answer."""
    if is_over(find_job(hold, read_run(hold), environ)):
        raise UsageError(f"the job of hold {hold.name} has ended", hint="clusterddp hold SPEC makes another one")


def ask_hold(run: RunDir, attempt: int) -> str:
    """Ask the hold of a run to start this attempt; return the id of the job of the hold.

    Raises: UsageError: it is no hold.
    """
    record = read_run(run)
    path = hold_of(run, record)
    its = read_run(path)
    if not its.is_hold or its.job_id is None:
        raise UsageError(f"{path.name} is not a hold that Slurm has a job of", hint="clusterddp list shows them")
    record = dataclasses.replace(
        record,
        job_tag=its.job_tag,
        job_attempt=attempt,
        job_id=its.job_id,
        cluster=its.cluster,
        keeper=None,
        array_index=None,
        job_directory=str(path.launcher_dir),
    )
    write_run(run, record)
    log_event(run, "submitted", attempt=attempt, job_id=its.job_id, hold=path.name)
    path.requests.mkdir(mode=0o700, exist_ok=True)
    write_json(path.requests / f"{time.time_ns():020}-{run.name}", {"attempt": attempt}, exclusive=True)
    return its.job_id


def leave_queue(run: RunDir, record: RunRecord) -> bool:
    """End a run that waits in its hold; False: the hold has started it."""
    attempts = run.attempts()
    if not attempts or attempts[-1].number != record.job_attempt or not claim(attempts[-1]):
        return False
    end_run(run, cancelled("cancelled before it was started"))
    drop_secrets(run)
    return True


def await_release(run: RunDir, record: RunRecord) -> None:
    """Wait until the hold has let go of a run that has ended: the processes of its step may still clean up.

    Raises: ClusterddpError: it has not in time.
    """
    hold, deadline = hold_of(run, record), time.monotonic() + _RELEASE_S
    while final_end(hold) is None and run.name in _names(hold):
        if time.monotonic() >= deadline:
            raise ClusterddpError(f"{run.name}: hold {hold.name} has not let go of it after {_RELEASE_S:g} s")
        time.sleep(_POLL_S)


def ask_in_hold(records: Records, slurm: Slurm) -> Answer:
    """Say what Slurm knows of the job of the hold that a run is in, and whether the hold still has the run."""
    answer = ask_slurm(records, slurm)
    hold = hold_of(records.run, records.record)
    if answer.life != "alive":
        return answer
    names = _names(hold)
    if records.run.name not in names:
        return Answer(life="ended", words=f"hold {hold.name} no longer has it", job=answer.job)
    if names[0] != records.run.name:
        return Answer(life="queued", words=f"waits in hold {hold.name} for {names[0]}", job=answer.job)
    return answer


def _names(hold: RunDir) -> list[str]:
    return [run.name for run in list_requests(hold).values()]

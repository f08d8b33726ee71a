"""The state of a run on Slurm: from its files, then from Slurm's state of its job, then from the age of its files.

A job belongs to the run if its name has the run's tag; its id proves nothing. When Slurm does not answer, the state is
UNKNOWN; an unanswered query never makes a run LOST.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.run.directory import AttemptDir, RunDir, is_of_another_user
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import ProcessIdentity, RunRecord, read_run
from clusterddp.run.view import RunState, RunView
from clusterddp.slurm.explain import explain_end, explain_waiting
from clusterddp.slurm.jobs import Job, Phase
from clusterddp.slurm.queue import Slurm, Wanted
from clusterddp.system.files import read_tail

RECORD_GRACE_S = 5.0
"""How long after the end of its job the recorded end of a run may still be invisible on a shared file system."""
QUIET_GRACE_S = 30.0
"""How long after a run's last write queue and accounting may both lack its job: slurmdbd records jobs seconds late."""
SUBMIT_GRACE_S = 300.0
"""How long a submit on another machine, whose process cannot be checked from here, may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The files of a run without a final end."""

    run: RunDir
    record: RunRecord
    attempt: AttemptDir | None
    end: AttemptEnd | None
    """The end of the newest attempt, if another attempt follows."""

    @property
    def job_name(self) -> str:
        return f"job {self.record.job_id}" if self.record.job_id else "any job of this run"

    @property
    def was_started(self) -> bool:
        """True when the newest attempt has started its ranks."""
        return self.attempt is not None and self.attempt.start.exists()

    @property
    def was_claimed(self) -> bool:
        """True when a start of a job has claimed the newest attempt."""
        return self.attempt is not None and self.attempt.claim.exists()

    @property
    def waiting_state(self) -> RunState:
        """REQUEUED when the run was started before, PENDING otherwise."""
        attempt = self.attempt
        if self.end or self.was_started or (attempt and attempt.number > self.record.job_attempt):
            return RunState.REQUEUED
        return RunState.REQUEUED if self.follows_another else RunState.PENDING

    @property
    def follows_another(self) -> bool:
        """True when the newest attempt is a restart of the attempt before it."""
        attempt = self.attempt
        previous = read_end(self.run.attempt(attempt.number - 1)) if attempt and attempt.number else None
        return previous is not None and previous.will_restart

    def view(self, state: RunState, reason: str, job: Job | None = None) -> RunView:
        if job and job.twins:
            reason += f"; job {', '.join(job.twins)} has the tag of this run too: the newest job is shown"
        number = self.attempt.number if self.attempt else None
        return RunView(state=state, attempt=number, end=self.end, reason=reason, job=job)


def wanted_jobs(runs: Iterable[tuple[RunDir, RunRecord]]) -> Iterator[Wanted]:
    """Yield the queries for the jobs of those runs that have no final end."""
    for run, record in runs:
        with contextlib.suppress(ClusterddpError, OSError, TypeError, AttributeError):
            attempts = run.attempts()
            end = read_end(attempts[-1]) if attempts else None
            wanted = wanted_job(run, record) if end is None or end.will_restart else None
            if wanted:
                yield wanted


def wanted_job(run: RunDir, record: RunRecord) -> Wanted | None:
    """Return the query for the job of a run; None before a job can exist."""
    if record.launcher != "slurm" or record.job_tag is None:
        return None
    return Wanted(
        tag=record.job_tag,
        array_index=record.array_index,
        job_id=record.job_id,
        since=record.created_ns / 1e9,
        noted=max(_times([run.record, run.job_answer(record.job_tag)])),
        cluster=record.cluster,
        owners=_owners(run),
    )


def _owners(run: RunDir) -> tuple[int, ...]:
    """Return the users who may own the run's job: the owner of its files, and, where user ids are mapped, this user."""
    own, owner = os.getuid(), os.stat(run.path).st_uid
    if own in {0, owner}:
        return (owner,)
    try:
        pwd.getpwuid(owner)
    except KeyError:
        return (own,)  # squeue refuses an unknown user
    return (own, owner)


def read_job_state(
    run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None, slurm: Slurm
) -> RunView | None:
    """Read the state of a run without a final end; `attempt` is its newest attempt, `end` the end of that.

    None: its files changed while Slurm was queried.
    """
    known = _Run(run=run, record=record, attempt=attempt, end=end)
    wanted = wanted_job(run, record)
    if wanted is None:
        return _unsubmitted(known)
    try:
        job = slurm.find(wanted)
    except SlurmError as error:
        return _without_answer(known, error, slurm.last_known(wanted))
    if job and job.phase is not Phase.ENDED and job.source == "squeue":
        return _in_queue(known, job, answer_age_s=slurm.answer_age_s(wanted))
    return None if _has_changed(known) else _left_queue(known, job, slurm)


def _in_queue(known: _Run, job: Job, *, answer_age_s: float) -> RunView:
    where = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
    if job.phase is Phase.UNKNOWN:
        return known.view(RunState.UNKNOWN, f"{where} is {job.state}, which clusterddp does not know", job)
    waiting = known.waiting_state
    after = f"starts again after: {known.end.reason}; " if known.end else ""
    if job.phase is Phase.WAITING and known.end is None and known.was_claimed:
        if _quiet_s(known) < answer_age_s + RECORD_GRACE_S:  # the ranks were started since squeue was asked
            state = RunState.RUNNING if known.was_started else RunState.PENDING
            return known.view(state, f"{where} has started", job)
        waiting = RunState.REQUEUED
    if job.phase is Phase.WAITING:
        words = explain_waiting(job, was_started=waiting is RunState.REQUEUED)
        return known.view(waiting, after + words, job)
    if known.was_started and known.end is None:
        does = {"RUNNING": "runs", "SUSPENDED": "is suspended: Slurm has stopped its processes"}
        return known.view(RunState.RUNNING, f"{where} {does.get(job.state, f'is {job.state}')}", job)
    if job.phase is Phase.ENDING:
        return known.view(waiting, f"{after}{where} is ending ({job.state})", job)
    words = f"{where} is starting its ranks" if job.phase is Phase.RUNNING else f"{where}: its nodes are being prepared"
    if job.state not in {"RUNNING", "CONFIGURING"}:
        words += f" ({job.state})"
    return known.view(waiting, after + words, job)


def _left_queue(known: _Run, job: Job | None, slurm: Slurm) -> RunView:
    """Return the state of a run whose job is not in the queue."""
    attempt = known.attempt
    if attempt and attempt.number > known.record.job_attempt and not known.was_claimed and not known.was_started:
        return _unsubmitted(known)  # the record does not name its job yet
    if job and job.phase is Phase.ENDED:
        return _ended(known, job)
    if job:
        return _without_job(known, f"the queue no longer knows job {job.job_id}, the accounting reports {job.state}")
    if slurm.has_accounting:
        return _without_job(known, f"queue and accounting no longer know {known.job_name}")
    return _without_job(known, f"Slurm no longer knows {known.job_name}")


def _ended(known: _Run, job: Job) -> RunView:
    words = explain_end(job)
    if job.state == "REVOKED":
        return known.view(RunState.UNKNOWN, f"{words}: another cluster of the federation has it", job)
    may_record = known.was_claimed or known.was_started
    if may_record and min(_quiet_s(known), abs(time.time() - (job.ended or 0))) < RECORD_GRACE_S:
        state = RunState.RUNNING if known.was_started and known.end is None else known.waiting_state
        return known.view(state, f"{words}; its end may be recorded soon", job)
    if job.state == "CANCELLED":
        return known.view(RunState.CANCELLED, words, job)
    if known.end:
        reason = f"should have started again after: {known.end.reason}; {words}, and no job follows it"
        return known.view(RunState.LOST, reason, job)
    if job.state == "COMPLETED":
        return known.view(RunState.LOST, f"{words}, but no process recorded how the run ended{_last_line(known)}", job)
    return known.view(RunState.FAILED, words + (_last_line(known) or _explain_no_output(known, job)), job)


def _without_job(known: _Run, words: str) -> RunView:
    """Return the state of a run whose job Slurm does not know; `words` says so."""
    if is_of_another_user(known.run.path):
        reason = f"belongs to another user, whose jobs Slurm may not show to you: {words}"
        return known.view(RunState.UNKNOWN, reason)
    if known.record.job_id is None and not known.was_started and known.end is None:
        return _unsubmitted(known)
    if known.run.cancel_file.exists():
        return known.view(RunState.CANCELLED, f"was cancelled; {words}")
    quiet_s = _quiet_s(known)
    if quiet_s < QUIET_GRACE_S:
        was = "running" if known.was_started and known.end is None else "waiting"
        return known.view(RunState.UNKNOWN, f"{words}; last known: {was}, {quiet_s:.0f} s ago")
    if known.end:
        reason = f"should have started again after: {known.end.reason}; {words}"
    elif known.was_started:
        reason = f"{words}, and no process recorded how the run ended"
    else:
        reason = f"{words}, which Slurm had accepted, and no rank was started"
    return known.view(RunState.LOST, f"{reason}{_last_line(known)}; resume queues it again")


def _unsubmitted(known: _Run) -> RunView:
    """Return the state of a run without a job: its submit is under way or has failed."""
    submitter = ProcessIdentity.from_json(known.record.submitter) if known.record.submitter else None
    alive = submitter.alive() if submitter else False
    quiet_s = _quiet_s(known)
    if alive or quiet_s < (RECORD_GRACE_S if alive is False else SUBMIT_GRACE_S):
        where = f" on {submitter.host}" if submitter and alive is None else ""
        state = RunState.REQUEUED if known.follows_another else RunState.PENDING
        return known.view(state, f"is being submitted{where}")
    if known.run.cancel_file.exists():
        return known.view(RunState.CANCELLED, "was cancelled before it was queued")
    gone = f"no longer active on {submitter.host}" if submitter and alive is None else "gone"
    reason = f"was never queued: Slurm knows no job of it, and its submitting process is {gone}; resume queues it"
    return known.view(RunState.LOST, reason)


def _without_answer(known: _Run, error: SlurmError, job: Job | None) -> RunView:
    if job:
        last = f"job {job.job_id} was {job.state}" + (f" on {job.nodes}" if job.nodes else "")
    elif known.end:
        last = f"was waiting to start again after: {known.end.reason}"
    elif known.was_started:
        last = "its ranks were started"
    elif known.record.job_id:
        last = f"it was queued as job {known.record.job_id}"
    else:
        last = "it was being submitted"
    return known.view(RunState.UNKNOWN, f"Slurm could not be asked: {error.message}; last known: {last}", job)


def _has_changed(known: _Run) -> bool:
    """Say whether the files changed while Slurm was queried: a job writes its last file before it ends."""
    attempts = known.run.attempts()  # opening a directory makes a network file system refresh it
    newest = attempts[-1] if attempts else None
    if (newest and newest.number) != (known.attempt and known.attempt.number):
        return True
    if newest and known.end is None and os.listdir(newest.path) and read_end(newest):
        return True
    return read_run(known.run).job_tag != known.record.job_tag


def _quiet_s(known: _Run) -> float:
    """Return the seconds since a file of the run changed; a time in the future, from another clock, counts as past."""
    files: list[Path] = [known.run.record, *_job_logs(known.run)]
    if known.record.job_tag:
        files.append(known.run.job_answer(known.record.job_tag))
    if known.attempt:
        files += [known.attempt.path, known.attempt.ranks, known.attempt.claim]
    return abs(time.time() - max(_times(files), default=0.0))


def _times(files: Iterable[Path]) -> Iterator[float]:
    """Yield the modification time of each file that exists."""
    for path in files:
        try:
            yield os.stat(path).st_mtime
        except OSError:
            continue


def _last_line(known: _Run) -> str:
    """Quote the last line of the job's logs."""
    for path in _job_logs(known.run):
        lines = read_tail(path).splitlines()
        if lines:
            return f'; {path.relative_to(known.run.path)} ends with "{lines[-1].strip()[:300]}"'
    return ""


def _explain_no_output(known: _Run, job: Job) -> str:
    """Explain a job that failed without a claim and without output here.

    A newer slurmstepd creates a missing output directory on the node's own disk and writes the output there.
    """
    if known.was_claimed or job.exit_code.partition(":")[0] not in {"", "1"} or _job_logs(known.run)[0].exists():
        return ""
    return "; its output is not here: usually its nodes do not share the run's directory"


def _job_logs(run: RunDir) -> tuple[Path, Path]:
    """Return the logs of the batch script and of srun."""
    return run.launcher_dir / "job.log", run.launcher_dir / "tasks.log"

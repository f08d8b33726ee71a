"""The state of a run on Slurm: its files first, then what Slurm says of its job, and where both are silent, how long.

A job is the run's own when its name carries the run's tag; its number proves nothing. Where Slurm cannot be asked the
state is UNKNOWN: a question without an answer has never ended a run.
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
"""How long after the end of its job the end of a run may still be on its way through a shared file system."""
QUIET_GRACE_S = 30.0
"""How long after a run's last sign of life it is no news that neither queue nor accounting knows its job: slurmdbd
hears of a job some seconds late."""
SUBMIT_GRACE_S = 300.0
"""How long a submit may take whose process, on another machine, cannot be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What the files tell of a run that has not ended for good."""

    run: RunDir
    record: RunRecord
    attempt: AttemptDir | None
    end: AttemptEnd | None
    """How the newest attempt ended, when another one is to follow."""

    @property
    def job_words(self) -> str:
        return f"job {self.record.job_id}" if self.record.job_id else "any job of this run"

    @property
    def was_started(self) -> bool:
        """True when the newest attempt has ranks, or had them."""
        return self.attempt is not None and self.attempt.start.exists()

    @property
    def was_claimed(self) -> bool:
        """True when a start of a job has taken the newest attempt upon itself."""
        return self.attempt is not None and self.attempt.claim.exists()

    @property
    def waiting_state(self) -> RunState:
        """REQUEUED when a start of the job has gone before, PENDING otherwise."""
        attempt = self.attempt
        if self.end or self.was_started or (attempt and attempt.number > self.record.job_attempt):
            return RunState.REQUEUED
        return RunState.REQUEUED if self.follows_another else RunState.PENDING

    @property
    def follows_another(self) -> bool:
        """True when the attempt before the newest one ended with the promise of another."""
        attempt = self.attempt
        previous = read_end(self.run.attempt(attempt.number - 1)) if attempt and attempt.number else None
        return previous is not None and previous.will_restart

    def view(self, state: RunState, reason: str, job: Job | None = None) -> RunView:
        if job and job.twins:
            reason += f"; job {', '.join(job.twins)} carries the tag of this run too: the newest one is shown"
        number = self.attempt.number if self.attempt else None
        return RunView(state=state, attempt=number, end=self.end, reason=reason, job=job)


def wanted_jobs(runs: Iterable[tuple[RunDir, RunRecord]]) -> Iterator[Wanted]:
    """Yield how Slurm is asked for the jobs of those runs that have not ended for good."""
    for run, record in runs:
        with contextlib.suppress(ClusterddpError, OSError, TypeError, AttributeError):
            attempts = run.attempts()
            end = read_end(attempts[-1]) if attempts else None
            wanted = wanted_job(run, record) if end is None or end.will_restart else None
            if wanted:
                yield wanted


def wanted_job(run: RunDir, record: RunRecord) -> Wanted | None:
    """Return how Slurm is asked for the job of a run; None before there can be one."""
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
    """Return the users of whom one has the run's job: the owner of its files, or, where these are mapped, who looks."""
    own, owner = os.getuid(), os.stat(run.path).st_uid
    if own in {0, owner}:
        return (owner,)
    try:
        pwd.getpwuid(owner)
    except KeyError:
        return (own,)  # squeue refuses to be asked for a user that it does not know
    return (own, owner)


def read_job_state(
    run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None, slurm: Slurm
) -> RunView | None:
    """Tell the state of a run that has not ended for good; `end` is that of `attempt`, the newest one.

    None: its files have news that came while Slurm was asked.
    """
    known = _Run(run=run, record=record, attempt=attempt, end=end)
    wanted = wanted_job(run, record)
    if wanted is None:
        return _unsubmitted(known)
    try:
        job = slurm.find(wanted)
    except SlurmError as error:
        return _unasked(known, error, slurm.last_known(wanted))
    if job and job.phase is not Phase.ENDED and job.source == "squeue":
        return _going_on(known, job, answer_age_s=slurm.answer_age_s(wanted))
    return None if _has_news(known) else _over(known, job, slurm)


def _going_on(known: _Run, job: Job, *, answer_age_s: float) -> RunView:
    where = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
    if job.phase is Phase.UNKNOWN:
        return known.view(RunState.UNKNOWN, f"{where} is {job.state}, a word of Slurm's not known here", job)
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


def _over(known: _Run, job: Job | None, slurm: Slurm) -> RunView:
    """Tell the state of a run whose job has left the queue, or was never there; Slurm was asked, and answered."""
    attempt = known.attempt
    if attempt and attempt.number > known.record.job_attempt and not known.was_claimed and not known.was_started:
        return _unsubmitted(known)  # made for a job that is not in the record yet
    if job and job.phase is Phase.ENDED:
        return _ended(known, job)
    if job:
        return _nowhere(known, f"the queue no longer knows job {job.job_id}, the accounting calls it {job.state}")
    if slurm.has_accounting:
        return _nowhere(known, f"queue and accounting no longer know {known.job_words}")
    return _nowhere(known, f"Slurm no longer knows {known.job_words}")


def _ended(known: _Run, job: Job) -> RunView:
    words = explain_end(job)
    if job.state == "REVOKED":
        return known.view(RunState.UNKNOWN, f"{words}: another cluster of the federation has it", job)
    may_speak = known.was_claimed or known.was_started
    if may_speak and min(_quiet_s(known), abs(time.time() - (job.ended or 0))) < RECORD_GRACE_S:
        state = RunState.RUNNING if known.was_started and known.end is None else known.waiting_state
        return known.view(state, f"{words}; the record of its end may still come", job)
    if job.state == "CANCELLED":
        return known.view(RunState.CANCELLED, words, job)
    if known.end:
        reason = f"was to start again after: {known.end.reason}; {words}, and no other follows it"
        return known.view(RunState.LOST, reason, job)
    if job.state == "COMPLETED":
        return known.view(RunState.LOST, f"{words}, but nobody recorded how the run ended{_last_line(known)}", job)
    return known.view(RunState.FAILED, words + (_last_line(known) or _why_wordless(known, job)), job)


def _nowhere(known: _Run, words: str) -> RunView:
    """Tell the state of a run whose job Slurm does not know, as `words` say."""
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
        reason = f"was to start again after: {known.end.reason}; {words}"
    elif known.was_started:
        reason = f"ended without a word: {words}, and no end is recorded"
    else:
        reason = f"{words}, which it had acknowledged, and no rank was ever started"
    return known.view(RunState.LOST, f"{reason}{_last_line(known)}; resume queues it again")


def _unsubmitted(known: _Run) -> RunView:
    """Tell the state of a run that has no job: it is being submitted, or it never was."""
    submitter = ProcessIdentity.from_json(known.record.submitter) if known.record.submitter else None
    alive = submitter.alive() if submitter else False
    quiet_s = _quiet_s(known)
    if alive or quiet_s < (RECORD_GRACE_S if alive is False else SUBMIT_GRACE_S):
        where = f" on {submitter.host}" if submitter and alive is None else ""
        state = RunState.REQUEUED if known.follows_another else RunState.PENDING
        return known.view(state, f"is being submitted{where}")
    if known.run.cancel_file.exists():
        return known.view(RunState.CANCELLED, "was cancelled before it was queued")
    gone = f"silent for long on {submitter.host}" if submitter and alive is None else "gone"
    reason = f"was never queued: Slurm knows no job of it, and what submitted it is {gone}; resume queues it"
    return known.view(RunState.LOST, reason)


def _unasked(known: _Run, error: SlurmError, job: Job | None) -> RunView:
    if job:
        last = f"job {job.job_id} was {job.state}" + (f" on {job.nodes}" if job.nodes else "")
    elif known.end:
        last = f"was to start again after: {known.end.reason}"
    elif known.was_started:
        last = "its ranks were started"
    elif known.record.job_id:
        last = f"it was queued as job {known.record.job_id}"
    else:
        last = "it was being submitted"
    return known.view(RunState.UNKNOWN, f"Slurm could not be asked: {error.message}; last known: {last}", job)


def _has_news(known: _Run) -> bool:
    """Say whether files came while Slurm was asked: what is written there last is written before a job ends."""
    attempts = known.run.attempts()  # opening a directory makes a file system over the network look again
    newest = attempts[-1] if attempts else None
    if (newest and newest.number) != (known.attempt and known.attempt.number):
        return True
    if newest and known.end is None and os.listdir(newest.path) and read_end(newest):
        return True
    return read_run(known.run).job_tag != known.record.job_tag


def _quiet_s(known: _Run) -> float:
    """Seconds since a file of the run was last touched; a file server's clock that is far off counts as long ago."""
    files: list[Path] = [known.run.record, *_job_logs(known.run)]
    if known.record.job_tag:
        files.append(known.run.job_answer(known.record.job_tag))
    if known.attempt:
        files += [known.attempt.path, known.attempt.ranks, known.attempt.claim]
    return abs(time.time() - max(_times(files), default=0.0))


def _times(files: Iterable[Path]) -> Iterator[float]:
    """Yield when each of the files that are there was last touched."""
    for path in files:
        try:
            yield os.stat(path).st_mtime
        except OSError:
            continue


def _last_line(known: _Run) -> str:
    """Quote the last line that the job, or Slurm for it, wrote."""
    for path in _job_logs(known.run):
        lines = read_tail(path).splitlines()
        if lines:
            return f'; {path.relative_to(known.run.path)} ends with "{lines[-1].strip()[:300]}"'
    return ""


def _why_wordless(known: _Run, job: Job) -> str:
    """Say what it usually means that a job has failed without a claim and without any output here.

    A newer slurmstepd makes a missing output directory on the node's own disk, and the batch script complains there.
    """
    if known.was_claimed or job.exit_code.partition(":")[0] not in {"", "1"} or _job_logs(known.run)[0].exists():
        return ""
    return "; its output is not to be seen here: usually its nodes do not see the run's directory"


def _job_logs(run: RunDir) -> tuple[Path, Path]:
    """The output of the batch script, and of srun."""
    return run.launcher_dir / "job.log", run.launcher_dir / "tasks.log"

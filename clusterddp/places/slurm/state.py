"""What Slurm knows of a run: the state of its job in queue and accounting, and the age of the run's files.

A job belongs to the run if its name or comment has the run's tag, or if it has the run's job id and was submitted in
the run's directory; an id alone proves nothing. When Slurm does not answer, the answer is `unknown`; an unanswered
query never makes a run LOST.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.places.slurm.explain import explain_end, explain_waiting
from clusterddp.places.slurm.queue import Job, Phase, Slurm, Wanted
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.record import RunRecord
from clusterddp.run.state import START_GRACE_S, Answer, Records, RunState
from clusterddp.system.files import read_tail

QUIET_GRACE_S = 30.0
"""How long after a run's last write queue and accounting may both lack its job: slurmdbd records jobs seconds late."""


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
        directory=record.job_directory
        or str((run.launcher_dir if record.array_index is None else run.path.parent).absolute()),
        since=record.created_ns / 1e9,
        noted=max(_times([run.record, run.job_answer(record.job_tag), run.path.parent / SWEEP_RECORD])),
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


def ask_slurm(records: Records, slurm: Slurm) -> Answer:
    """Say what queue and accounting know of the job of a run."""
    wanted = wanted_job(records.run, records.record)
    if wanted is None:
        return _without_job(records, "Slurm knows no job of it")
    try:
        job = slurm.find(wanted)
    except SlurmError as error:
        return _unanswered(records, error, slurm.last_known(wanted))
    if job and job.phase is not Phase.ENDED and job.source == "squeue":
        answer = _in_queue(records, job, slurm.answer_age_s(wanted))
    elif job and job.phase is Phase.ENDED and not _awaits_job(records):
        answer = _after_job(records, job)
    elif job:
        reports = f"the accounting reports {job.state}"
        return _without_job(records, f"the queue no longer knows job {job.job_id}, {reports}")
    else:
        who = "queue and accounting no longer know" if slurm.has_accounting else "Slurm no longer knows"
        name = f"job {records.record.job_id}" if records.record.job_id else "any job of this run"
        return _without_job(records, f"{who} {name}")
    twins = ", ".join(job.twins)
    note = (f"job {twins} has the tag of this run too: the newest job is shown",) if twins else ()
    return dataclasses.replace(answer, job=job, notes=answer.notes + note)


def _awaits_job(records: Records) -> bool:
    """Say whether the record does not name the job of the newest attempt yet: what is found is the job before it."""
    attempt = records.attempt
    is_next = attempt is not None and attempt.number > records.record.job_attempt
    return is_next and not records.was_handed_over


def _in_queue(records: Records, job: Job, answer_age_s: float) -> Answer:
    where = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
    if job.phase is Phase.UNKNOWN:
        return Answer(life="unknown", words=f"{where} is {job.state}, which clusterddp does not know")
    if job.phase is Phase.WAITING:
        claimed = records.is_claimed and records.end is None
        if claimed and _quiet_s(records) < answer_age_s + START_GRACE_S:
            return Answer(life="alive", words=f"{where} has started")  # since squeue was asked
        was_started = claimed or records.is_started or records.is_restart or records.end is not None
        return Answer(life="queued", words=explain_waiting(job, was_started=was_started))
    if records.is_started and records.end is None:
        does = {"RUNNING": "runs", "SUSPENDED": "is suspended: Slurm has stopped its processes"}
        return Answer(life="alive", words=f"{where} {does.get(job.state, f'is {job.state}')}")
    if job.phase is Phase.ENDING:
        return Answer(life="alive", words=f"{where} is ending ({job.state})")
    words = f"{where} is starting its ranks" if job.phase is Phase.RUNNING else f"{where}: its nodes are being prepared"
    if job.state not in {"RUNNING", "CONFIGURING"}:
        words += f" ({job.state})"
    return Answer(life="alive", words=words)


def _after_job(records: Records, job: Job) -> Answer:
    """Say how the job of a run ended; its processes may have recorded an end that is not visible yet."""
    began = records.is_claimed or records.is_started or records.end is not None or records.run.cancel_file.exists()
    words, last_line = explain_end(job, began=began), _last_line(records.run)
    if job.state == "REVOKED":
        return Answer(life="unknown", words=f"{words}: another cluster of the federation has it")
    may_record = records.is_claimed or records.is_started
    if may_record and min(_quiet_s(records), abs(time.time() - (job.ended or 0))) < START_GRACE_S:
        return Answer(life="alive", words=f"{words}; its end may be recorded soon")
    if job.state == "CANCELLED":
        return Answer(life="ended", words=words, outcome=RunState.CANCELLED)
    if records.end:
        return Answer(life="ended", words=f"{words}, and no job follows it")
    if job.state == "COMPLETED":
        return Answer(life="ended", words=words, notes=last_line)
    words += "" if last_line else _explain_no_output(records, job)
    return Answer(life="ended", words=words, notes=last_line, outcome=RunState.FAILED)


def _without_job(records: Records, words: str) -> Answer:
    """Say what is known of a run whose job Slurm does not know; `words` says so."""
    if os.geteuid() not in {0, os.stat(records.run.path).st_uid}:
        reason = f"belongs to another user, whose jobs Slurm may not show to you: {words}"
        return Answer(life="unknown", words=reason)
    quiet_s = _quiet_s(records)
    if records.run.cancel_file.exists():
        words = f"was cancelled; {words}"
        return Answer(life="ended", words=words, outcome=RunState.CANCELLED, quiet_s=quiet_s)
    if not records.was_handed_over:
        notes = ("Slurm knows no job of it", "resume queues it")
        return Answer(life="ended", words=words, notes=notes, quiet_s=quiet_s)
    if quiet_s < QUIET_GRACE_S:
        was = "running" if records.is_started and records.end is None else "waiting"
        return Answer(life="unknown", words=f"{words}; last known: {was}, {quiet_s:.0f} s ago")
    return Answer(life="ended", words=words, notes=(*_last_line(records.run), "resume queues it again"))


def _unanswered(records: Records, error: SlurmError, job: Job | None) -> Answer:
    if job:
        last = f"job {job.job_id} was {job.state}" + (f" on {job.nodes}" if job.nodes else "")
    elif records.end:
        last = f"was waiting to start again after: {records.end.reason}"
    elif records.is_started:
        last = "its ranks were started"
    elif records.record.job_id:
        last = f"it was queued as job {records.record.job_id}"
    else:
        last = "it was being submitted"
    words = f"Slurm could not be asked: {error.message}; last known: {last}"
    return Answer(life="unknown", words=words, job=job)


def _quiet_s(records: Records) -> float:
    """Return the seconds since a file of the run changed; a time in the future, from another clock, counts as past."""
    files: list[Path] = [records.run.record, *_job_logs(records.run)]
    if records.record.job_tag:
        files.append(records.run.job_answer(records.record.job_tag))
    if records.attempt:
        files += [records.attempt.path, records.attempt.ranks, records.attempt.claim]
    return abs(time.time() - max(_times(files), default=0.0))


def _times(files: Iterable[Path]) -> Iterator[float]:
    """Yield the modification time of each file that exists."""
    for path in files:
        try:
            yield os.stat(path).st_mtime
        except OSError:
            continue


def _last_line(run: RunDir) -> tuple[str, ...]:
    """Quote the last line of the job's logs, if there is one."""
    for path in _job_logs(run):
        lines = read_tail(path).splitlines()
        if lines:
            return (f'{path.relative_to(run.path)} ends with "{lines[-1].strip()[:300]}"',)
    return ()


def _explain_no_output(records: Records, job: Job) -> str:
    """Explain a job that failed without a claim and without output here.

    A newer slurmstepd creates a missing output directory on the node's own disk and writes the output there.
    """
    if records.is_claimed or job.state == "NODE_FAIL" or job.exit_code.partition(":")[0] not in {"", "1"}:
        return ""
    if _job_logs(records.run)[0].exists() or records.record.job_directory:
        return ""
    return "; its output is not here: usually its nodes do not share the run's directory"


def _job_logs(run: RunDir) -> tuple[Path, Path]:
    """Return the logs of the batch script and of srun."""
    return run.launcher_dir / "job.log", run.launcher_dir / "tasks.log"


_PATIENCE_S = 45.0
"""How long to retry when the controller does not answer."""
_LONGEST_PAUSE_S = 8.0
_POLL_S = 0.25


def find_job(run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> Job | None:
    """Query queue and accounting now for the job of a run."""
    wanted = wanted_job(run, record)
    return Slurm(environ, max_age_s=0.0).find(wanted) if wanted else None


def wait_for_job(run: RunDir, record: RunRecord, environ: Mapping[str, str], *, num_looks: int) -> Job | None:
    """Look up to `num_looks` times for a job that may be in the queue, with growing pauses; None if it never appears.

    Raises: SlurmError: the controller did not answer for 45 s.
    """
    give_up = time.monotonic() + _PATIENCE_S
    looks, pause_s = 0, 0.5
    while True:
        try:
            job = find_job(run, record, environ)
            looks += 1
            if job is not None or looks >= num_looks:
                return job
        except SlurmError as error:
            if not error.transient or time.monotonic() > give_up:
                raise
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def is_over(job: Job | None) -> bool:
    """Say whether a job has ended or was not found, so that it starts nothing more."""
    return job is None or job.phase is Phase.ENDED


def wait_for_end(run: RunDir, record: RunRecord, environ: Mapping[str, str], timeout_s: float) -> Job | None:
    """Wait until a job is over or `timeout_s` has passed; return its last state."""
    deadline = time.monotonic() + timeout_s
    while not is_over(job := find_job(run, record, environ)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return job

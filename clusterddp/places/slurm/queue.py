"""Finds the jobs of runs: one squeue for all of them, then one sacct for those that squeue does not know.

Answers and errors are cached for a few seconds, so a thousand runs cost as many commands as one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.jobs import SACCT_FIELDS, SEPARATOR, SQUEUE_FIELDS, Job, Phase, read_sacct, read_squeue

MAX_AGE_S = 4.0
_AGE_PER_QUERY_S = 5.0
"""How long an answer is cached for each second that the controller took."""
_LONG_WAIT_AGE_S = 15.0
"""The longest time in the cache for a process that waits for long: a minute of waiting adds a second, up to this."""
_NOTED_LATELY_S = 60.0
_IDS_PER_QUERY = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A query for the job of a run: its tag; the other fields help the accounting to find it."""

    tag: str
    array_index: int | None = None
    job_id: str | None = None
    since: float | None = None
    """Seconds since the epoch: it was not submitted before."""
    noted: float | None = None
    """Seconds since the epoch: when the submit was recorded. An older answer of squeue cannot have the job."""
    cluster: str | None = None
    owners: tuple[int, ...] = dataclasses.field(default_factory=lambda: (os.getuid(),))
    """The uids that the job may belong to."""


_Key = tuple[str, "int | None"]
_Source = tuple["str | None", tuple[int, ...]]


@dataclass(slots=True)
class _Answer:
    """The answer to one query, jobs or an error, and until when it is cached."""

    jobs: dict[_Key, Job] = field(default_factory=dict)
    error: SlurmError | None = None
    asked: float = field(default_factory=time.time)
    good_until: float = 0.0


class Slurm:
    """A cache of Slurm's answers; raises SlurmError when Slurm did not answer."""

    def __init__(self, environ: Mapping[str, str], *, max_age_s: float = MAX_AGE_S) -> None:
        self._environ = environ
        self._max_age_s = max_age_s
        self._born = time.monotonic()
        self._lock = threading.RLock()
        self._queues: dict[_Source, _Answer] = {}
        self._accounts: dict[Wanted, _Answer] = {}
        self._expected: dict[Wanted, None] = {}
        self._last: dict[_Key, Job] = {}
        self._looked_again: set[Wanted] = set()
        self.has_accounting: bool | None = None
        """None before the first sacct."""

    def job(self, tag: str, array_index: int | None = None) -> Job | None:
        """Return the newest job with this tag, as `find` does."""
        return self.find(Wanted(tag=tag, array_index=array_index))

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Announce the queries that will follow, so that one sacct serves all of them."""
        with self._lock:
            self._expected |= dict.fromkeys(wanted)

    def find(self, wanted: Wanted) -> Job | None:
        """Return the newest job of a run; None when neither the queue nor the accounting, where there is one, has it.

        A job that was found after its end is still returned when the queue has dropped it.
        Raises: SlurmError: squeue or sacct did not answer.
        """
        with self._lock:
            self._expected[wanted] = None
            known = self.last_known(wanted)
            ended = known if known and known.phase is Phase.ENDED else None
            try:
                job = self._queued(wanted) or ended or self._accounted(wanted)
            except SlurmError:
                if ended:
                    return ended
                raise
            if job:
                self._last[wanted.tag, wanted.array_index] = job
            return job

    def last_known(self, wanted: Wanted) -> Job | None:
        """Return the last job that `find` has found."""
        return self._last.get((wanted.tag, wanted.array_index))

    def answer_age_s(self, wanted: Wanted) -> float:
        """Return the age of squeue's answer for this job, in seconds."""
        answer = self._queues.get((wanted.cluster, wanted.owners))
        return time.time() - answer.asked if answer else 0.0

    def _queued(self, wanted: Wanted) -> Job | None:
        answer = self._queue(wanted)
        job = _pick(answer.jobs, wanted)
        if job is None and wanted.noted and wanted not in self._looked_again:
            self._looked_again.add(wanted)
            if answer.asked < wanted.noted < answer.asked + _NOTED_LATELY_S:
                answer.good_until = 0.0
                job = _pick(self._queue(wanted).jobs, wanted)
        return job

    def _queue(self, wanted: Wanted) -> _Answer:
        source = (wanted.cluster, wanted.owners)
        answer = self._queues.get(source)
        if answer is None or time.monotonic() >= answer.good_until:
            answer = self._queues[source] = self._ask(functools.partial(self._squeue, *source))
        if answer.error:
            raise answer.error
        return answer

    def _accounted(self, wanted: Wanted) -> Job | None:
        if self.has_accounting is False:
            return None
        answer = self._accounts.get(wanted)
        if answer is None or time.monotonic() >= answer.good_until:
            undecided = [other for other in self._expected if self._is_undecided(other, wanted)]
            answer = self._ask(functools.partial(self._sacct, undecided))
            self._accounts |= dict.fromkeys(undecided, answer)
        if answer.error:
            raise answer.error
        return _pick(answer.jobs, wanted)

    def _is_undecided(self, other: Wanted, like: Wanted) -> bool:
        source = (other.cluster, other.owners)
        return (
            source == (like.cluster, like.owners)
            and _pick(self._queues[source].jobs, other) is None
            and (other not in self._accounts or time.monotonic() >= self._accounts[other].good_until)
        )

    def _ask(self, question: Callable[[], list[Job]]) -> _Answer:
        begun = time.monotonic()
        answer = _Answer()
        try:
            answer.jobs = _newest(question())
        except SlurmError as error:
            answer.error = error
        now = time.monotonic()
        patience_s = min(_LONG_WAIT_AGE_S, (now - self._born) / 60)
        answer.good_until = now + max(self._max_age_s, _AGE_PER_QUERY_S * (now - begun), patience_s)
        return answer

    def _squeue(self, cluster: str | None, owners: tuple[int, ...]) -> list[Job]:
        argv = ["squeue", "--noheader", "--array", "--states=all", _of(owners)]
        return read_squeue(self._run([*argv, *_on(cluster), f"--format={SEPARATOR.join(SQUEUE_FIELDS)}"]))

    def _sacct(self, undecided: list[Wanted]) -> list[Job]:
        """Ask for all jobs by their ids, and once more by time for those whose id is not known."""
        cluster, owners = undecided[0].cluster, undecided[0].owners
        ids = sorted({wanted.job_id.partition("_")[0] for wanted in undecided if wanted.job_id})
        without_id = [wanted.since for wanted in undecided if not wanted.job_id]
        queries = [
            f"--jobs={','.join(ids[start : start + _IDS_PER_QUERY])}" for start in range(0, len(ids), _IDS_PER_QUERY)
        ]
        if without_id:
            since = min(time.time() - 86400 if moment is None else moment - 3600 for moment in without_id)
            queries.append(time.strftime("--starttime=%Y-%m-%dT%H:%M:%S", time.localtime(max(0, since))))
        argv = ["sacct", "--allocations", "--parsable2", "--noheader", "--duplicates", f"--delimiter={SEPARATOR}"]
        argv += [*_on(cluster), _of(owners), f"--format={','.join(SACCT_FIELDS)}"]
        try:
            jobs = [job for query in queries for job in read_sacct(self._run([*argv, query]))]
        except SlurmError as error:
            if error.reason not in {"accounting disabled", "no command"}:
                raise
            self.has_accounting = False
            return []
        self.has_accounting = True
        return jobs

    def _run(self, argv: list[str]) -> str:
        return run_slurm(argv, environ=self._environ)


def _on(cluster: str | None) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _of(owners: tuple[int, ...]) -> str:
    return f"--user={','.join(map(str, owners))}"


def _pick(jobs: Mapping[_Key, Job], wanted: Wanted) -> Job | None:
    """Find the job; sacct prints one line, without an index, for all tasks of an array that never started."""
    job = jobs.get((wanted.tag, wanted.array_index))
    return job or (jobs.get((wanted.tag, None)) if wanted.array_index is not None else None)


def _newest(jobs: list[Job]) -> dict[_Key, Job]:
    """Keep the newest job of each tag and task; the ids of the older ones become its `twins`."""
    found: dict[_Key, Job] = {}
    for job in sorted(jobs, key=_age):
        key = (job.tag, job.array_index)
        older = found.get(key)
        twins = () if older is None else older.twins
        if older is not None and older.job_id != job.job_id:
            twins = (*twins, older.job_id)
        found[key] = dataclasses.replace(job, twins=twins) if twins else job
    return found


def _age(job: Job) -> tuple[float, int]:
    return job.submitted or 0.0, int(job.job_id.partition("_")[0])

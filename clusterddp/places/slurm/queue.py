"""The jobs of runs, as squeue and sacct report them, and the phases of a run that Slurm's state words stand for.

One squeue asks for all jobs, then one sacct for those that squeue does not know. Answers and errors are cached for a
few seconds, so a thousand runs cost as many commands as one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pwd
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.run.job_tag import tag_of

SEPARATOR = "\x1f"
"""Separates fields. The job's name and comment, which may contain any text, are the last ones."""
SQUEUE_FIELDS = {
    "id": "%A", "array_id": "%F", "task": "%K", "state": "%T", "submitted": "%V", "started": "%S", "ended": "%e",
    "partition": "%P", "num_nodes": "%D", "nodes": "%N", "reason": "%r", "directory": "%Z",
    "name": "%j", "comment": "%k",
}  # fmt: skip
"""Without widths, so that squeue cuts no field."""
SACCT_FIELDS = {
    "job_id": "JobID", "state": "State", "exit_code": "ExitCode", "submitted": "Submit", "started": "Start",
    "ended": "End", "partition": "Partition", "num_nodes": "NNodes", "nodes": "NodeList", "directory": "WorkDir",
    "name": "JobName", "comment": "Comment",
}  # fmt: skip


class Phase(Enum):
    """What a state word means for a process that waits for the job."""

    WAITING = "waiting"
    STARTING = "starting"
    """It has its nodes, which are not ready yet."""
    RUNNING = "running"
    ENDING = "ending"
    """Slurm ends its processes, or cleans up after it."""
    ENDED = "ended"
    UNKNOWN = "unknown"
    """A word that is not in `_PHASES`."""


_PHASES = {
    Phase.WAITING: "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING",
    Phase.STARTING: "CONFIGURING POWER_UP_NODE",
    Phase.RUNNING: "RUNNING SUSPENDED STOPPED SIGNALING RESIZING UPDATE_DB",
    Phase.ENDING: "COMPLETING STAGE_OUT",
    Phase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE REVOKED "
    "LAUNCH_FAILED RECONFIG_FAIL",
}
_PHASE_OF_WORD = {word: phase for phase, words in _PHASES.items() for word in words.split()}
_MAX_DIGITS = 18
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, or one task of a job array, at the time of the query."""

    job_id: str
    """As people write it: `123`, or `123_7` for the task of an array."""
    tag: str
    """Empty for a job that has none, in its name or comment."""
    name: str = ""
    directory: str = ""
    """The working directory that it was submitted with."""
    array_index: int | None
    """None also for the tasks of an array that never started: sacct prints one line for them."""
    state: str
    """Slurm's own word."""
    cancelled_by: int | None = None
    """The uid of `CANCELLED by 0`; None when Slurm prints none."""
    reason: str = ""
    """Why it waits or ended, in Slurm's word; empty where there is none."""
    exit_code: str = ""
    """`3:0`: exit code and signal of the batch script; empty where Slurm prints none."""
    partition: str = ""
    num_nodes: int | None = None
    nodes: str = ""
    """Host list, as Slurm writes it; empty before the job has nodes."""
    submitted: float | None = None
    started: float | None = None
    """For a job that waits: when Slurm expects it to start."""
    ended: float | None = None
    """For a job that runs: when its time limit ends it."""
    source: Literal["squeue", "sacct"]
    twins: tuple[str, ...] = ()
    """Ids of older jobs with the same tag; normally none."""

    @property
    def phase(self) -> Phase:
        return _PHASE_OF_WORD.get(self.state, Phase.UNKNOWN)


def read_squeue(text: str) -> list[Job]:
    """Read squeue's output; skip lines that do not parse."""
    rows = _rows(text, SQUEUE_FIELDS)
    return [job for row in rows if (job := _job(row, row["array_id"], row["task"], "squeue"))]


def read_sacct(text: str) -> list[Job]:
    """Read sacct's output; each start of a requeued job is a job of its own."""
    rows = _rows(text, SACCT_FIELDS)
    return [job for row in rows if (job := _job(row, *row["job_id"].partition("_")[::2], "sacct"))]


def _job(row: Mapping[str, str], number: str, task: str, source: Literal["squeue", "sacct"]) -> Job | None:
    """Make the job of a row; `task`: its index in its array, or another text."""
    state = row["state"]
    if not _is_number(number) or not state:
        return None
    by = re.search(r" by (\d{1,10})\b", state)
    reason = row.get("reason", "")
    return Job(
        job_id=f"{number}_{task}" if _is_number(task) else number,
        tag=tag_of(row["name"], row["comment"]) or "",
        name=row["name"],
        directory=row["directory"],
        array_index=int(task) if _is_number(task) else None,
        state=state.split(maxsplit=1)[0].rstrip("+").upper(),  # `CANCELLED by 0` and `cancelled+` are CANCELLED
        cancelled_by=int(by[1]) if by else None,
        reason="" if reason == "None" else reason,
        exit_code=row.get("exit_code", ""),
        partition=row["partition"],
        num_nodes=int(row["num_nodes"]) if _is_number(row["num_nodes"]) else None,
        nodes="" if row["nodes"] == "None assigned" else row["nodes"],
        submitted=read_time(row["submitted"]),
        started=read_time(row["started"]),
        ended=read_time(row["ended"]),
        source=source,
    )


def read_time(text: str) -> float | None:
    """Read a local time, as seconds since the epoch; None for N/A, Unknown and the like."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups())
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _rows(text: str, names: Collection[str]) -> Iterator[dict[str, str]]:
    for line in text.split("\n"):
        *fields, rest = line.split(SEPARATOR, len(names) - 2)
        name, found, comment = rest.rpartition(SEPARATOR)
        if found and len(fields) == len(names) - 2:
            yield dict(zip(names, [*(field.strip() for field in fields), name, comment], strict=True))


MAX_AGE_S = 4.0
_AGE_PER_QUERY_S = 5.0
"""How long an answer is cached for each second that the controller took."""
_LONG_WAIT_AGE_S = 15.0
"""The longest time in the cache for a process that waits for long: a minute of waiting adds a second, up to this."""
_NOTED_LATELY_S = 60.0
_IDS_PER_QUERY = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A query for the job of a run: it has this tag, or this id and directory; `since` helps the accounting."""

    tag: str
    array_index: int | None = None
    job_id: str | None = None
    directory: str = ""
    """The working directory with which it was submitted."""
    since: float | None = None
    """Seconds since the epoch: it was not submitted before."""
    noted: float | None = None
    """Seconds since the epoch: when the submit was recorded. An older answer of squeue cannot have the job."""
    cluster: str | None = None
    owners: tuple[int, ...] = dataclasses.field(default_factory=lambda: (os.getuid(),))
    """The uids that the job may belong to."""


_Key = tuple[str, "int | None"]
"""The tag of a job, or the id of one without a tag; and its index in its array."""
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
        argv = ["squeue", "--noheader", "--array", "--states=all", *_of(owners)]
        argv += [*_on(cluster), f"--format={SEPARATOR.join(SQUEUE_FIELDS.values())}"]
        return read_squeue(run_slurm(argv, environ=self._environ))

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
        argv += [*_on(cluster), *_of(owners), f"--format={','.join(SACCT_FIELDS.values())}"]
        try:
            jobs = [job for query in queries for job in read_sacct(run_slurm([*argv, query], environ=self._environ))]
        except SlurmError as error:
            if error.reason not in {"accounting disabled", "no command"}:
                raise
            self.has_accounting = False
            return []
        self.has_accounting = True
        return jobs


def _on(cluster: str | None) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _of(owners: tuple[int, ...]) -> list[str]:
    """Select the jobs of these users; of all, where the user database lacks one of them: Slurm refuses its number."""
    try:
        return [f"--user={','.join(str(pwd.getpwuid(uid).pw_uid) for uid in owners)}"]
    except KeyError:
        return []


def scancel(name: str, job_id: str | None, cluster: str | None, environ: Mapping[str, str], *options: str) -> None:
    """Cancel or signal this user's job if it still has this name: Slurm may have reused its id for another job.

    Of one task of an array the name is not compared: scancel 22.05 with a name ends all tasks that wait.
    "Invalid job id" is no error here: the job may have ended since. A busy controller can give that answer for a job
    that exists; the caller waits for the end of the job and so detects it.
    """
    is_task = job_id is not None and "_" in job_id
    only = [*_on(cluster), *([] if is_task else [*_of((os.getuid(),)), f"--name={name}"]), *options]
    try:
        run_slurm(["scancel", *only, *([job_id] if job_id else [])], environ=environ)
    except SlurmError as error:
        if error.reason != "unknown job":
            raise


def _pick(jobs: Mapping[_Key, Job], wanted: Wanted) -> Job | None:
    """Find the job; sacct prints one line, without an index, for all tasks of an array that never started."""
    number = (wanted.job_id or "").partition("_")[0]
    for index in dict.fromkeys((wanted.array_index, None)):
        named, numbered = jobs.get((wanted.tag, index)), jobs.get((number, index))
        if numbered and (not wanted.directory or numbered.directory != wanted.directory):
            numbered = None  # Slurm reuses ids
        if found := [job for job in (named, numbered) if job]:
            return max(found, key=_age)
    return None


def _newest(jobs: list[Job]) -> dict[_Key, Job]:
    """Keep the newest job of each tag and task; the ids of the older ones become its `twins`."""
    found: dict[_Key, Job] = {}
    for job in sorted(jobs, key=_age):
        key = (job.tag or job.job_id.partition("_")[0], job.array_index)
        older = found.get(key)
        twins = () if older is None else older.twins
        if older is not None and older.job_id != job.job_id:
            twins = (*twins, older.job_id)
        found[key] = dataclasses.replace(job, twins=twins) if twins else job
    return found


def _age(job: Job) -> tuple[float, int]:
    return job.submitted or 0.0, int(job.job_id.partition("_")[0])

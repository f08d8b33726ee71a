"""The records of a run: its identity (`run.json`), the start of each attempt and each rank; attempts.py has the end.

Each file has one writer, or several of which the first wins (`end.json`). So no lock is needed, and the files can be
read after a crash at any point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from clusterddp.run.directory import SWEEP_RECORD, AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.job_tag import is_tag
from clusterddp.system.files import append_jsonl, build_record, read_last_jsonl, read_record, write_json
from clusterddp.system.processes import read_process

_T = TypeVar("_T")
_MAX_HISTORY_BYTES = 1 << 24
Restart = Literal["none", "here", "another job"]
"""Who starts the next attempt: no process, the same supervisors, or another start of the batch job."""
FOREIGN = "none"
"""The launcher of a run whose ranks torchrun, mpirun or another program has started; `job_id` names the program."""
WORKER = "worker"
"""The launcher of a run that `clusterddp worker` starts, typed on each of its nodes."""
BY_HAND = {
    FOREIGN: ("clusterddp worker SPEC", "started as before"),
    WORKER: ("clusterddp worker SPEC", "on each machine"),
    "join": ("clusterddp worker SPEC", "on each machine"),
}
"""Launchers that clusterddp cannot start again: the command that does, and where; `join`: of earlier versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from a later one with the same pid.

    `started` is the process's start time as the kernel of `host` counts it: seconds since the boot. Seconds since the
    epoch would change when the clock is set.
    """

    host: str
    boot: str
    pid: int
    started: float

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """Identify a process of this machine, by default this one."""
        process = read_process(os.getpid() if pid is None else pid)
        return cls(host=socket.gethostname(), boot=boot_id(), pid=process.pid, started=process.started)

    @classmethod
    def from_json(cls, data: Any) -> ProcessIdentity:
        """Read one from a record."""
        return build_record(cls, data, "the process of a record")

    def alive(self) -> bool | None:
        """Return whether the process lives; None if it is on another machine, which cannot be asked from here."""
        if self.host != socket.gethostname():
            return None
        if self.boot != boot_id():
            return False
        try:
            process = read_process(self.pid)
        except ProcessLookupError:
            return False
        return abs(process.started - self.started) < 1.0 and not process.zombie


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """`run.json`: written only by the submitting side."""

    run: str
    token: str = dataclasses.field(repr=False)
    name: str
    launcher: str
    created_ns: int
    parent: str | None = None
    """The run that this one repeats (`submit RUN`)."""
    job_id: str | None = None
    """The launcher's answer; None: not started, or the answer was lost. On Slurm it is in a `JobAnswer`."""
    submitter: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The `ProcessIdentity` of the process that submits; it shows whether a submit is under way or has died."""
    keeper: dict[str, Any] | None = None
    """The `ProcessIdentity` of the process that carries the run; None if a scheduler does."""
    base_attempt: int = 0
    """The attempt of the last submit or resume; `restarts` counts from it."""
    job_tag: str | None = None
    """On Slurm: the part of the job's name that no other job has (job_tag.py)."""
    job_attempt: int = 0
    """On Slurm: the first attempt of the job `job_id`; requeues of the job count on from it."""
    array_index: int | None = None
    """On Slurm: the task of a job array (a sweep) that carries this run; all its runs share job and tag."""
    variant: str = ""
    """In a sweep: the values of this run, `lr=0.1 seed=0`."""
    cluster: str | None = None
    """On Slurm: the cluster that sbatch named; None if it named none."""
    job_directory: str | None = None
    """On Slurm: where the job of a batch script starts; None: it is a job of our own script, below the run."""
    queued: bool = False
    """In a sweep without Slurm: the queue of the sweep has not started the newest attempt yet."""
    hold: str | None = None
    """The hold (planning/hold.py) that the run is in, a run beside it; its own name: it is a hold."""

    @property
    def is_hold(self) -> bool:
        return self.hold == self.run

    @property
    def in_hold(self) -> bool:
        """Whether it is in a hold, which outlives it."""
        return self.hold is not None and not self.is_hold


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAnswer:
    """`launcher/job-<tag>.json`: sbatch's answer to one submit.

    It is not in `run.json`: when the answer arrives, the job may have run and recorded its follow-up job there.
    """

    job_id: str | None
    """Of a sweep: that of the job array, in `sweep.json`; None: not submitted, or the answer was lost."""
    cluster: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How a rank ended, or a node and its ranks; the first one of an attempt that failed is its root cause.

    It is the same value from the rank's exit to `status`: the node makes it, the link carries it, end.json holds it.
    """

    rank: int | None
    """For a lost node the lowest of its ranks; None when it failed before any rank started."""
    host: str
    exit_code: int | None = None
    """As in a shell: 128 + signal for a rank that a signal ended."""
    error: str = ""
    """Of a rank: the exception, or another known cause, in one line; of a root cause: the whole sentence."""
    log: str | None = None
    """Of a root cause: where the rank has printed, relative to the run's directory."""
    traceback: str | None = None
    """The exception's; where there is none, the last lines of standard error."""
    signal: str | None = None
    last_line: str = ""
    """Of its standard error, where it exited with a code and no exception is known."""
    weight: int = 0
    """Whether it may follow from another rank's end (node/attempt.py); 0: it cannot."""
    on_order: bool = False
    """True when it ended after its supervisor had begun to end it."""
    restart: Restart = "none"
    """Which restart may help."""
    of_node: bool = False
    """True: the machine is at fault, as far as anybody can see; run/node_marks.py remembers it."""

    def spell(self, who: str) -> str:
        """Say how it ended; `who`: the rank and its host."""
        if self.signal is not None:
            return f"{who} was killed by {self.signal}" + (f" ({self.error})" if self.error else "")
        if self.error:
            return f"{who}: {self.error}"
        last = f"; the last line of its stderr: {self.last_line}" if self.last_line else ""
        return f"{who} exited with code {self.exit_code}{last}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """`ranks/003.json`: one rank of one attempt, written when it starts and once more when it has ended."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    pid: int
    interface: str | None
    master_addr: str
    master_port: int
    started: float
    process: dict[str, Any] | None = None
    """Its `ProcessIdentity`, if no supervisor watches it."""
    ended: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None

    @property
    def end_state(self) -> Literal["COMPLETED", "FAILED", "KILLED"] | None:
        """How the rank ended; None: no end is recorded."""
        if self.ended is None:
            return None
        if self.signal is not None:
            return "KILLED"
        return "COMPLETED" if self.exit_code == 0 else "FAILED"

    @property
    def end(self) -> RankEnd:
        """How the rank ended, once it has."""
        return RankEnd(
            rank=self.rank, host=self.host, exit_code=self.exit_code, signal=self.signal, error=self.error or ""
        )

    def at_end(self, end: RankEnd) -> RankRecord:
        """Return the record of the rank that has just ended."""
        error = "ended with the others" if end.on_order and end.signal is not None else end.error or None
        return dataclasses.replace(self, ended=time.time(), exit_code=end.exit_code, signal=end.signal, error=error)


@dataclass(frozen=True, slots=True)
class StartedPython:
    """The Python that runs the ranks of a node."""

    executable: str
    version: str | None = None
    """null where the node has not read it, as of `torch`: a key of the spec names the Python."""
    torch: str | None = None

    @property
    def text(self) -> str:
        """Its path, and what it is."""
        what = f" ({self.version}, {f'torch {self.torch}' if self.torch else 'no torch'})"
        return self.executable + (what if self.version else "")


class StartedNode(TypedDict, total=False):
    """A node in `start.json`: the keys that are read."""

    node_rank: int
    host: str
    interface: str | None
    import_s: float | None
    python: StartedPython | None


class Start(TypedDict, total=False):
    """`start.json`, the start of an attempt: the keys that are read."""

    started: float
    supervisor: ProcessIdentity
    master_addr: str | None
    master_port: int | None
    nodes: list[StartedNode]


class _Planned(TypedDict):
    """A key that every plan has."""

    gang: Gang


def write_run(directory: RunDir, record: RunRecord) -> None:
    write_json(directory.record, dataclasses.asdict(record))


def read_run(directory: RunDir) -> RunRecord:
    record = _read(RunRecord, directory.record)
    if record.job_id is not None or record.job_tag is None or not is_tag(record.job_tag):
        return record
    answer = read_record(JobAnswer, directory.job_answer(record.job_tag))
    if answer is None and record.array_index is not None:
        of_array = read_record(JobAnswer, directory.path.parent / SWEEP_RECORD)
        if of_array is not None and of_array.job_id is not None:
            answer = dataclasses.replace(of_array, job_id=f"{of_array.job_id}_{record.array_index}")
    if answer is None:
        return record
    return dataclasses.replace(record, job_id=answer.job_id, cluster=answer.cluster)


def write_job_answer(directory: RunDir, tag: str, answer: JobAnswer) -> None:
    write_json(directory.job_answer(tag), dataclasses.asdict(answer))


def read_gang(directory: RunDir, attempt: AttemptDir | None = None) -> Gang:
    """Read the gang of a run from its plan; of a step of a batch script from the step's newest start.

    `attempt`: the gang as it takes part in this attempt, once its ranks have started: nodes may have been replaced.
    Raises: ClusterddpError: the plan is invalid. FileNotFoundError: there is none.
    """
    if directory.step is not None:
        return _read(Gang, directory.newest_attempt().gang)
    gang = _read(_Planned, directory.plan)["gang"]
    if gang.min_nodes is not None and attempt is not None and (start := read_start(attempt)) is not None:
        with contextlib.suppress(ValueError, KeyError):  # a host may have written anything
            return gang.of_nodes(node["node_rank"] for node in start["nodes"])
    return gang


def read_start(attempt: AttemptDir) -> Start | None:
    """Read the start of an attempt; None: it has not started."""
    return read_record(Start, attempt.start)


def drop_secrets(run: RunDir) -> None:
    """Remove the values of the run's secrets, which no process needs any more."""
    with contextlib.suppress(OSError):
        folder = os.open(run.launcher_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.unlink(run.job_secrets.name, dir_fd=folder)
        finally:
            os.close(folder)


def write_rank(attempt: AttemptDir, record: RankRecord) -> None:
    write_json(attempt.rank_record(record.rank), dataclasses.asdict(record))


def read_ranks(attempt: AttemptDir) -> list[RankRecord]:
    """Read the records of the ranks that were started, by rank."""
    try:
        names = sorted(name for name in os.listdir(attempt.ranks) if name.endswith(".json") and ".error" not in name)
    except FileNotFoundError:
        return []
    return [_read(RankRecord, attempt.ranks / name) for name in names if not name.startswith(".")]


def read_rank(attempt: AttemptDir, rank: int) -> RankRecord | None:
    """Read the record of one rank; None: it was not started."""
    path = attempt.rank_record(rank)
    return _read(RankRecord, path) if path.exists() else None


def log_event(directory: RunDir, kind: str, **facts: Any) -> None:
    """Append an event and its time to the run's history; a failed write is ignored, since no code depends on it."""
    facts = facts if directory.step is None else {"step": directory.step, **facts}
    with contextlib.suppress(OSError):
        append_jsonl(directory.events, {"time": time.time(), "event": kind, **facts})


def read_events(directory: RunDir) -> list[dict[str, Any]]:
    """Read the history of a run, or of a step of it, oldest first; of a very long one its end.

    A host, or another user, may have written a row: one whose event, attempt or time is none is left out.
    Raises: ClusterddpError: it is no regular file.
    """
    return [
        row
        for row in read_last_jsonl(directory.events, _MAX_HISTORY_BYTES)
        if isinstance(row.get("event"), str)
        and isinstance(row.get("attempt"), int | None)
        and isinstance(row.get("time"), int | float | None)
        and (directory.step is None or row.get("step") == directory.step)
    ]


def boot_id() -> str:
    """Return an id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _read(kind: type[_T], path: Path) -> _T:
    record = read_record(kind, path)
    if record is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return record

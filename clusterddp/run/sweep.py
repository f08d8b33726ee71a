"""The directory of a sweep: its runs, their shared files, the task of the job array for each run, the queue.

runs/brisk-otter-3/                     one rename puts all of it in place
  sweep.json tasks.txt                  the record; the runs' names, in the order of the array's indices
  env.json environment.json code        shared by the runs, which have links
  queue.json CANCEL                     without Slurm: the process that starts the runs; the request to end it
  launcher/                             the options of sbatch, the batch script; the log of the queue
  brisk-otter-3.0/ brisk-otter-3.1/     the runs, each like any other

The queue, a resume of the run and a cancel may take a run out of the queue: the first of these processes to write the
attempt's `claim.json` has it.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import SWEEP_RECORD, Below, RunDir, is_run_name
from clusterddp.run.find import is_job, list_places, list_runs, newest_run, runs_of_spec
from clusterddp.run.record import ProcessIdentity
from clusterddp.run.seal import demand_sealed
from clusterddp.run.state import Answer, Records
from clusterddp.system.files import MAX_RECORD_BYTES, read_record, read_regular, write_json

QueueState = Literal["RUNNING", "ENDED", "GONE", "UNKNOWN"]


@dataclass(frozen=True, slots=True)
class SweepDir:
    """The files of one sweep."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    record = Below(SWEEP_RECORD, "The identity of the sweep: keys, throttle, job id.")
    tasks = Below(
        "tasks.txt",
        "One run per line; its name ends with SLURM_ARRAY_TASK_ID. The batch script receives this path.",
    )
    environment = Below("env.json", "As of a run; the runs have links to it.")
    job_environment = Below(
        "environment.json", "On Slurm: the variables that are passed from the submitting shell to the ranks."
    )
    code = Below("code", "As of a run; the runs have links to it.")
    queue = Below("queue.json", "The record of the queue, if Slurm does not start the runs.")
    queue_log = Below("launcher/queue.log", "The log of the queue.")
    queue_lock = Below("launcher/queue.lock", "The lock that the queue holds, so that there is never a second one.")
    cancel_file = Below("CANCEL", "Asks the queue to start no more runs, once it exists.")
    launcher_dir = Below("launcher", "")

    def run_names(self) -> list[str]:
        """List the names of all runs, in the order of their tasks.

        Raises: ClusterddpError: the file cannot be read, or a name is invalid or repeated.
        """
        try:
            names = read_regular(self.tasks, MAX_RECORD_BYTES).decode("ascii", errors="replace").split()
        except FileNotFoundError as error:
            raise ClusterddpError(f"{self.tasks}: the list of the sweep's runs is missing") from error
        invalid = next((name for name in names if not is_run_name(name)), None)
        if invalid is not None or len(set(names)) < len(names):
            what = "it names a run twice" if invalid is None else f"{invalid!r:.60} is not the name of a run"
            raise ClusterddpError(f"{self.tasks}: is not a list of runs: {what}")
        return names

    def runs(self) -> list[RunDir]:
        """List the runs in the order of their tasks, without deleted ones."""
        return [run for run in (RunDir(self.path / name) for name in self.run_names()) if run.record.is_file()]

    def demand_sealed(self) -> list[RunDir]:
        """Return the runs, to act on them. Raises: ClusterddpError: there are none, or one is not this user's own."""
        runs = self.runs()
        for run in runs or [RunDir(self.path)]:
            demand_sealed(run)
        return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """`sweep.json`: written only by the submitting side."""

    sweep: str
    token: str = dataclasses.field(repr=False)
    """The job's tag is computed from it; each run has a token of its own."""
    name: str
    launcher: str
    created_ns: int
    keys: tuple[str, ...]
    """The keys whose values differ between the runs."""
    size: int
    throttle: int | None = None
    job_id: str | None = None
    """The id of the job array, or the pid of the queue; None: not submitted, or the answer was lost."""
    job_tag: str | None = None
    cluster: str | None = None
    submitter: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_sweep(sweep: SweepDir, record: SweepRecord) -> None:
    write_json(sweep.record, dataclasses.asdict(record))


def read_sweep(sweep: SweepDir) -> SweepRecord:
    """Read the record of a sweep. Raises: ClusterddpError: it cannot be read."""
    record = read_record(SweepRecord, sweep.record)
    if record is None:
        raise ClusterddpError(f"{sweep.record}: is gone")
    return record


def task_of(run: str) -> int:
    """Return the number of a run in its sweep, which is that of its task in the job array."""
    return int(run.rpartition(".")[2])


def sweep_of(run: RunDir) -> SweepDir | None:
    """Return the sweep that a run belongs to; None if it belongs to none."""
    sweep = SweepDir(run.path.parent)
    return sweep if sweep.record.is_file() else None


def find_sweep(runs_dir: Path, name: str) -> SweepDir | None:
    """Find a sweep by its name, an unambiguous beginning of it, its directory, its spec's `name:`, or its job array.

    `@last`: the sweep of the newest run. None: it is not the name of a sweep; it may be that of a run.
    """
    if os.sep in name:
        sweep = SweepDir(Path(name).resolve())
        return sweep if is_run_name(sweep.name) and sweep.record.is_file() else None
    if name == "@last":
        newest = newest_run(list_runs(runs_dir))
        return sweep_of(newest) if newest else None
    places = list_places(runs_dir) if name else []
    exact = [place for place in places if place.name == name]
    matches = exact or [place for place in places if place.name.startswith(name)]
    if not matches and is_job(name):
        sweeps = [SweepDir(place) for place in places if SweepDir(place).record.is_file()]
        return next((sweep for sweep in sweeps if read_sweep(sweep).job_id == name), None)
    if not matches and name:
        return _find_sweep_of_spec(runs_dir, name)
    found = [SweepDir(place) for place in matches]
    return found[0] if len(found) == 1 and found[0].record.is_file() else None


def _find_sweep_of_spec(runs_dir: Path, name: str) -> SweepDir | None:
    """Find the sweep by the `name:` of its spec; None where a run may be meant."""
    runs = list_runs(runs_dir)
    if any(run.name.startswith(name) for run in runs):
        return None
    sweeps = {sweep_of(run) for run in runs_of_spec(runs, name)}
    return sweeps.pop() if len(sweeps) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRecord:
    """`queue.json`: written by the process that starts the queue, then by the queue; `queue_lock` orders them."""

    process: ProcessIdentity
    is_starting: bool = False
    """True: `process` is the one that starts the queue, not yet the queue."""
    waits_for: str = ""
    """Why the next run cannot start now; empty: no reason."""
    ended: float | None = None
    """Seconds since the epoch."""
    why: str = ""
    """Why it ended."""

    @property
    def state(self) -> QueueState:
        """RUNNING: it starts runs; GONE: it was killed; UNKNOWN: it is on a machine that cannot be asked from here."""
        if self.ended is not None:
            return "ENDED"
        alive = self.process.alive()
        return "UNKNOWN" if alive is None else "RUNNING" if alive else "GONE"


def write_queue(sweep: SweepDir, record: QueueRecord) -> None:
    write_json(sweep.queue, dataclasses.asdict(record))


def read_queue(sweep: SweepDir) -> QueueRecord | None:
    """Read the record of a sweep's queue; None: none was started.

    Raises: ClusterddpError: the record cannot be read.
    """
    return read_record(QueueRecord, sweep.queue)


def ask_queue(records: Records) -> Answer:
    """Say what the queue of a sweep knows of a run that it has not started yet."""
    sweep = SweepDir(records.run.path.parent)
    record = read_queue(sweep)
    state = record.state if record else "GONE"
    waits = f"waits in the queue of {sweep.name}"
    if record and state == "UNKNOWN":
        words = f"{waits} on {record.process.host}, which cannot be asked from here"
        return Answer(life="unknown", words=words)
    if record and state == "RUNNING":
        return Answer(life="alive") if records.is_claimed else Answer(life="queued", words=waits)
    what = f"has ended: {record.why}" if record and record.ended is not None else "is gone"
    words = f"the queue of {sweep.name} {what} (clusterddp resume {sweep.name} starts it again)"
    return Answer(life="ended", words=words)

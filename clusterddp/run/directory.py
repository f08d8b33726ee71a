"""The run directory: where each file of a run lies, and how a run is found by its name."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from clusterddp.errors import ClusterddpError, RunNotFoundError, UsageError
from clusterddp.system.files import is_file, read_record

_RUN_NAME, _TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), re.compile("[0-9a-f]{32}")
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_ATTEMPTS = 1_000_000
"""More than any run has."""
STAGING_PREFIX = ".staging-"
SWEEP_RECORD = "sweep.json"
"""What makes a directory of the runs directory a sweep: its runs lie in it (run/sweep_dir.py)."""


class _Created(TypedDict):
    created_ns: int


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt: one start of the run's ranks."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def start(self) -> Path:
        """How the attempt began: ranks, master address and port, supervisors."""
        return self.path / "start.json"

    @property
    def end(self) -> Path:
        """How the attempt ended; the first process to write it is right."""
        return self.path / "end.json"

    @property
    def stop_file(self) -> Path:
        """A process that creates this file asks the ranks to checkpoint and end (the stop contract)."""
        return self.path / "STOP"

    @property
    def stopped(self) -> Path:
        """Written by the ranks' program when it ended because of a stop: how far it came."""
        return self.path / "stopped.json"

    @property
    def stacks_request(self) -> Path:
        """A process that creates this file asks where the ranks are; the head removes it (run/stacks.py)."""
        return self.path / "STACKS"

    @property
    def stacks(self) -> Path:
        """Where the ranks were, when a command asked or the run showed no progress: a report each."""
        return self.path / "stacks"

    @property
    def claim(self) -> Path:
        """Who starts this attempt, where several could: a start of a job on Slurm; who takes it out of a queue."""
        return self.path / "claim.json"

    def is_claimed(self) -> bool:
        """Say whether a claim is there, from the directory's list: NFS may answer for one file from its cache."""
        return self.claim.name in os.listdir(self.path)

    @property
    def ranks(self) -> Path:
        """One record for each rank: host, pid, start, end, exit code."""
        return self.path / "ranks"

    @property
    def logs(self) -> Path:
        """What the ranks printed."""
        return self.path / "logs"

    def rank_record(self, rank: int) -> Path:
        """Start and end of one rank."""
        return self.ranks / f"{rank:03d}.json"

    def error_file(self, rank: int) -> Path:
        """What TORCHELASTIC_ERROR_FILE names: the rank's traceback, in torchelastic's own form."""
        return self.ranks / f"{rank:03d}.error.json"

    def stdout(self, rank: int) -> Path:
        """Standard output of one rank."""
        return self.logs / f"rank-{rank:03d}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of one rank."""
        return self.logs / f"rank-{rank:03d}.err"

    def nccl(self, rank: int) -> Path:
        """What NCCL itself says, unless the user's NCCL_DEBUG sends that elsewhere."""
        return self.logs / f"rank-{rank:03d}.nccl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        """The spec as resolved: overrides and profile included."""
        return self.path / "spec.yaml"

    @property
    def plan(self) -> Path:
        """The plan that was carried out, as `submit -n -o json` prints it."""
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        """What the run is: name, launcher, job id, when it was submitted and by which process."""
        return self.path / "run.json"

    @property
    def environment(self) -> Path:
        """Packages, git commit, Python, torch, GPUs and driver of the machine that submitted."""
        return self.path / "env.json"

    @property
    def code(self) -> Path:
        """A link to the snapshot of the code, which runs with the same content share."""
        return self.path / "code"

    @property
    def events(self) -> Path:
        """The history of the run, a row for each event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """What the trainer measured; docs/metrics.md has the keys."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The trainer's result, when it came to its end."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints, each with a manifest that has its sum."""
        return self.path / "checkpoints"

    @property
    def output(self) -> Path:
        """Where an entry puts its results that names no other place."""
        return self.path / "output"

    @property
    def tensorboard(self) -> Path:
        """The same figures for TensorBoard."""
        return self.path / "tb"

    @property
    def launcher_dir(self) -> Path:
        """What the launcher itself keeps: submitit's folder, supervisors' own logs."""
        return self.path / "launcher"

    @property
    def job_environment(self) -> Path:
        """On Slurm: the variables that go from the submitting shell to the ranks; mode 0600, like all files."""
        return self.launcher_dir / "environment.json"

    @property
    def job_secrets(self) -> Path:
        """On Slurm: the values of the spec's secrets, from the submit to the run's end, when they are removed."""
        return self.launcher_dir / "secrets.json"

    def job_answer(self, tag: str) -> Path:
        """On Slurm: what sbatch answered to the submit of the job with this tag."""
        return self.launcher_dir / f"job-{tag}.json"

    @property
    def cancel_file(self) -> Path:
        """A process that creates this file asks the supervisors to end the run at once."""
        return self.path / "CANCEL"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / str(number))

    def attempts(self) -> list[AttemptDir]:
        """List the attempts so far, oldest first.

        It opens the directory, which makes NFS ask the server: a file that another host has made is seen.
        Raises: OSError: the run's directory is away.
        """
        try:
            names = [name for name in os.listdir(self.path / "attempts") if _NUMBER.fullmatch(name)]
        except FileNotFoundError:
            os.stat(self.path)
            return []
        return [self.attempt(number) for number in sorted(map(int, names))]

    def newest_attempt(self) -> AttemptDir:
        """Return the newest attempt of a run that has one.

        Raises: OSError: the run's directory is away, or has lost its attempts.
        """
        attempts = self.attempts()
        if not attempts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / "attempts"))
        return attempts[-1]


def is_of_another_user(path: Path) -> bool:
    """Say whether a run's directory, or a sweep's, is another user's; to root each is its own."""
    return os.geteuid() not in {0, os.stat(path).st_uid}


def is_run_name(name: str) -> bool:
    """Say whether another process may name a run so: it is one directory below that of all runs."""
    return _RUN_NAME.fullmatch(name) is not None


def is_token(text: str) -> bool:
    """Say whether this is the token of a run."""
    return _TOKEN.fullmatch(text) is not None


def list_runs(runs_dir: Path) -> list[RunDir]:
    """List the runs in `runs_dir`, those of sweeps too, oldest first; a directory without a record is no run."""
    runs: list[RunDir] = []
    for place in list_places(runs_dir):
        runs += [RunDir(place)] if is_file(RunDir(place).record) else list_runs(place)
    return sorted(runs, key=lambda run: (created_ns(run), run.name))


def list_places(runs_dir: Path) -> list[Path]:
    """List the directories in `runs_dir` that are runs or sweeps, in no order; what may not be seen is left out."""
    try:
        paths = [Path(entry.path) for entry in os.scandir(runs_dir) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in paths if is_file(RunDir(path).record) or is_file(path / SWEEP_RECORD)]


def make_attempt_dirs(attempt: AttemptDir) -> None:
    """Make what is missing of an attempt's directories.

    Raises: OSError: the run's own directory is away; it is never made anew.
    """
    for path in (attempt.path.parent, attempt.path, attempt.ranks, attempt.logs):
        path.mkdir(mode=0o700, exist_ok=True)


def find_run(runs_dir: Path, name: str) -> RunDir:
    """Find a run by its name, an unambiguous beginning of it, `@last`, or the path of its directory.

    Raises: RunNotFoundError: there is none. UsageError: several runs begin so.
    """
    if os.sep in name and RunDir(Path(name)).record.is_file():
        return RunDir(Path(name).resolve())
    runs = list_runs(runs_dir)
    if name == "@last" and runs:
        return runs[-1]
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if name and run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        few = ", ".join(run.name for run in matches[:8]) + (", ..." if len(matches) > 8 else "")
        raise UsageError(f"{name}: {len(matches)} runs begin so: {few}")
    raise RunNotFoundError(
        f"{name}: no such run in {runs_dir}",
        hint="clusterddp list shows the runs; CLUSTERDDP_RUNS or --runs names another directory",
    )


def created_ns(run: RunDir) -> int:
    """Read when a run was made; one whose record is damaged must not hide all the others: it counts as the oldest."""
    try:
        found = read_record(_Created, run.record)
    except (ClusterddpError, OSError):
        return 0
    return found["created_ns"] if found else 0

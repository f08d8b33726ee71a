"""The run directory: where each file of a run is, and which run and attempt a rank belongs to."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError

_RUN_NAME, _TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), re.compile("[0-9a-f]{32}")
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_ATTEMPTS = 1_000_000
"""More than any run has."""
ASKED = "ASKED"
"""The file that a rank makes beside STOP when its program first asks whether to stop."""
STAGING_PREFIX = ".staging-"
STORE_NAME = ".code"
"""The directory of snapshots of the code, in a runs directory."""
SWEEP_RECORD = "sweep.json"
"""A directory with this file is a sweep, which contains its runs (run/sweep.py)."""


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
    def usage(self) -> Path:
        """What the ranks use, and how fast they are (run/rank_usage.py)."""
        return self.path / "usage.json"

    @property
    def asked(self) -> Path:
        """Made when the ranks' program first asks whether to stop: it takes part in the stop contract."""
        return self.path / ASKED

    @property
    def claim(self) -> Path:
        """The process or job that starts this attempt, if several could: on Slurm, and from the queue of a sweep."""
        return self.path / "claim.json"

    def is_claimed(self) -> bool:
        """Return whether the claim exists; it lists the directory, since NFS may answer for one file from its cache."""
        return self.claim.name in os.listdir(self.path)

    @property
    def ranks(self) -> Path:
        """One record for each rank: host, pid, start, end, exit code."""
        return self.path / "ranks"

    @property
    def results(self) -> Path:
        """What a function from Python has returned, a file for each rank (run/call.py)."""
        return self.path / "results"

    def result(self, rank: int) -> Path:
        """What the function has returned, or the traceback of its exception, pickled."""
        return self.results / f"{rank:03d}.pkl"

    @property
    def logs(self) -> Path:
        """What the ranks printed."""
        return self.path / "logs"

    def rank_record(self, rank: int) -> Path:
        """Start and end of one rank."""
        return self.ranks / f"{rank:03d}.json"

    def error_file(self, rank: int) -> Path:
        """The file of TORCHELASTIC_ERROR_FILE: the rank's traceback in torchelastic's format."""
        return self.ranks / f"{rank:03d}.error.json"

    def stdout(self, rank: int) -> Path:
        """Standard output of one rank."""
        return self.logs / f"rank-{rank:03d}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of one rank."""
        return self.logs / f"rank-{rank:03d}.err"

    def log_times(self, node_rank: int) -> Path:
        """How long the logs of a node's ranks were at which time (run/log_times.py)."""
        return self.logs / f"node-{node_rank:03d}.times"

    def nccl(self, rank: int) -> Path:
        """NCCL's own log, unless the user sets NCCL_DEBUG, NCCL_DEBUG_SUBSYS or NCCL_DEBUG_FILE."""
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
        """The identity of the run: name, launcher, job id, when and by which process it was submitted."""
        return self.path / "run.json"

    @property
    def submission(self) -> Path:
        """A function from Python with its arguments, pickled (run/call.py)."""
        return self.path / "submission.pkl"

    @property
    def environment(self) -> Path:
        """Packages, git commit, Python, torch, GPUs and driver of the machine that submitted."""
        return self.path / "env.json"

    @property
    def code(self) -> Path:
        """The copy of the code in which the ranks work; of the trainer, and over SSH, a link to the snapshot."""
        return self.path / "code"

    @property
    def snapshot(self) -> Path:
        """A link to the snapshot of the code, where `code` is a copy of it; runs with the same code share one."""
        return self.path / "snapshot"

    @property
    def events(self) -> Path:
        """The history of the run, a row for each event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """What the trainer measured, or a script logged; docs/metrics.md has the keys."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The trainer's result, written at its end."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page about the run that `clusterddp report` has written."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the trainer, or of `clusterddp.checkpoint`, each with a manifest that has its sum."""
        return self.path / "checkpoints"

    @property
    def output(self) -> Path:
        """The default directory for the results of an entry."""
        return self.path / "output"

    @property
    def tensorboard(self) -> Path:
        """The same figures for TensorBoard."""
        return self.path / "tb"

    @property
    def launcher_dir(self) -> Path:
        """The launcher's own files: submitit's folder, the logs of supervisors."""
        return self.path / "launcher"

    @property
    def notices(self) -> Path:
        """The messages of `notify` that a process has claimed: an empty file each (run/notices.py)."""
        return self.path / "notices"

    @property
    def job_environment(self) -> Path:
        """On Slurm: the variables that are passed from the submitting shell to the ranks; mode 0600, as all files."""
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

        Opening the directory makes NFS ask the server, so an attempt that another host has made is seen.
        Raises: OSError: the run's directory cannot be reached.
        """
        try:
            names = [name for name in os.listdir(self.path / "attempts") if _NUMBER.fullmatch(name)]
        except FileNotFoundError:
            os.stat(self.path)
            return []
        return [self.attempt(number) for number in sorted(map(int, names))]

    def newest_attempt(self) -> AttemptDir:
        """Return the newest attempt of a run that has one.

        Raises: OSError: the run's directory cannot be reached, or has lost its attempts.
        """
        attempts = self.attempts()
        if not attempts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / "attempts"))
        return attempts[-1]


def is_of_another_user(path: Path) -> bool:
    """Return whether the directory of a run or sweep belongs to another user; False for root."""
    return os.geteuid() not in {0, os.stat(path).st_uid}


def is_run_name(name: str) -> bool:
    """Return whether a name from another process can be a run's: one directory below that of all runs."""
    return _RUN_NAME.fullmatch(name) is not None


def is_token(text: str) -> bool:
    """Return whether a text has the form of a run's token."""
    return _TOKEN.fullmatch(text) is not None


def make_attempt_dirs(attempt: AttemptDir) -> None:
    """Make the missing directories of an attempt.

    Raises: OSError: the run's own directory does not exist; it is never made here.
    """
    for path in (attempt.path.parent, attempt.path, attempt.ranks, attempt.logs):
        path.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The run and the attempt that this process belongs to, and the file that requests a stop."""

    run: RunDir
    attempt: AttemptDir
    stop_file: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Assignment:
        """Read the variables.

        Raises: ClusterddpError: no run is named.
        """
        try:
            run = RunDir(Path(environ["CLUSTERDDP_RUN_DIR"]))
        except KeyError as error:
            raise ClusterddpError(
                "CLUSTERDDP_RUN_DIR is not set", hint="clusterddp submit starts the trainer"
            ) from error
        attempt = run.attempt(int(environ.get("CLUSTERDDP_ATTEMPT", "0")))
        stop_file = environ.get("CLUSTERDDP_STOP_FILE")
        return cls(run=run, attempt=attempt, stop_file=Path(stop_file) if stop_file else attempt.stop_file)


def refuse_if_stale(run: RunDir, attempt: int) -> None:
    """Refuse to let an attempt write what belongs to the run as a whole once a later one has begun.

    Raises: ClusterddpError: it has.
    """
    newest = max((each.number for each in run.attempts()), default=attempt)
    if newest > attempt:
        raise ClusterddpError(f"attempt {newest} of the run has begun, this is attempt {attempt}")

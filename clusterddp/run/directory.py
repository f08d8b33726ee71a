"""The run directory: where each file of a run is, and which run and attempt a rank belongs to."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import STEP

_RUN_NAME, _TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), re.compile("[0-9a-f]{32}")
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
MAX_ATTEMPTS = 1_000_000
"""More than any run has."""
ASKED = "ASKED"
"""The file that a rank makes beside STOP when its program first asks whether to stop."""
STAGING_PREFIX = ".staging-"
STORE_NAME = ".code"
"""The directory of snapshots of the code, in a runs directory."""
STEPS = "steps"
SWEEP_RECORD = "sweep.json"
"""A directory with this file is a sweep, which contains its runs (run/sweep.py)."""


class Below:
    """A file or a directory at the same place in each directory of a kind; `__doc__`: what it is."""

    def __init__(self, path: str, doc: str) -> None:
        self._path = path
        self.__doc__ = doc

    def __get__(self, directory: Any, kind: type) -> Path:
        return Path(directory.path, self._path)


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt: one start of the run's ranks, or of one step of a batch script in that attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.parents[1].name if self.is_step else self.path.name)

    @property
    def is_step(self) -> bool:
        return self.path.parent.name == STEPS

    @property
    def run_path(self) -> Path:
        """The directory of its run."""
        return self.path.parents[3 if self.is_step else 1]

    start = Below("start.json", "How the attempt began: ranks, master address and port, supervisors.")
    end = Below("end.json", "How the attempt ended; the first process to write it is right.")
    stop_file = Below(
        "STOP", "A process that creates this file asks the ranks to checkpoint and end (the stop contract)."
    )
    stopped = Below("stopped.json", "Written by the ranks' program when it ended because of a stop: how far it came.")
    stacks_request = Below(
        "STACKS", "Created to ask where the ranks are; node 0's supervisor removes it (run/stacks.py)."
    )
    stacks = Below("stacks", "Where the ranks were, when a command asked or the run showed no progress: a report each.")
    usage = Below("usage.json", "What the ranks use, and how fast they are (run/rank_usage.py).")
    asked = Below(ASKED, "Made when the ranks' program first asks whether to stop: it takes part in the stop contract.")
    claim = Below(
        "claim.json",
        "The process or job that starts this attempt, if several could: on Slurm, and from the queue of a sweep.",
    )

    def is_claimed(self) -> bool:
        """Return whether the claim exists; it lists the directory, since NFS may answer for one file from its cache."""
        return self.claim.name in os.listdir(self.path)

    steps = Below("steps", "Of a batch script: a directory for each command that started ranks, like an attempt's.")
    step = Below("step.json", "Of a step: the command, its line in the script, its place (run/steps.py).")
    gang = Below("gang.json", "Of a step: its ranks and nodes, as the launcher has placed them.")
    ranks = Below("ranks", "One record for each rank: host, pid, start, end, exit code.")
    results = Below("results", "What a function from Python has returned, a file for each rank (run/call.py).")

    def result(self, rank: int) -> Path:
        """What the function has returned, or the traceback of its exception, pickled."""
        return self.results / f"{rank:03d}.pkl"

    logs = Below("logs", "What the ranks printed.")

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

    def setup_log(self, node_rank: int) -> Path:
        """What the setup lines of a node have printed."""
        return self.logs / f"setup-{node_rank:03d}.log"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run; of a batch script also as one of its steps sees them."""

    path: Path
    step: str | None = None
    """The directory of the step below `attempts/N/steps`; its files take the place of the attempt's."""

    @property
    def name(self) -> str:
        return self.path.name

    spec = Below("spec.yaml", "The spec as resolved: overrides and profile included.")
    plan = Below("plan.json", "The plan that was executed, as `submit -n -o json` prints it.")
    record = Below(
        "run.json", "The identity of the run: name, launcher, job id, when and by which process it was submitted."
    )
    submission = Below("submission.pkl", "A function from Python with its arguments, pickled (run/call.py).")
    environment = Below(
        "env.json", "Packages, git commit, Python, torch, GPUs and driver of the machine that submitted."
    )
    code = Below(
        "code", "The copy of the code in which the ranks work; of the trainer, and over SSH, a link to the snapshot."
    )
    snapshot = Below(
        "snapshot",
        "A link to the snapshot of the code, where `code` is a copy of it; runs with the same code share one.",
    )
    events = Below("events.jsonl", "The history of the run, a row for each event.")
    metrics = Below("metrics.jsonl", "What the trainer measured, or a script logged; docs/metrics.md has the keys.")
    summary = Below("summary.json", "The trainer's result, written at its end.")
    report = Below("report.html", "The page about the run that `clusterddp report` has written.")
    checkpoints = Below(
        "checkpoints",
        "Checkpoints of the trainer, or of `clusterddp.checkpoint`, each with a manifest that has its sum.",
    )
    output = Below("output", "The default directory for the results of an entry.")
    tensorboard = Below("tb", "The same figures for TensorBoard.")
    launcher_dir = Below("launcher", "The launcher's own files: submitit's folder, the logs of supervisors.")
    batch_script = Below("launcher/slurm_script", "The batch script as submitted; Slurm gives its copy this name, too.")
    commands = Below("launcher/bin", "What stands before srun, torchrun and the like in the PATH of a batch script.")
    notices = Below(
        "notices", "The messages of `notify` that a process has claimed: an empty file each (run/notices.py)."
    )
    job_environment = Below(
        "launcher/environment.json",
        "On Slurm: the variables that are passed from the submitting shell to the ranks; mode 0600, as all files.",
    )
    job_secrets = Below(
        "launcher/secrets.json",
        "On Slurm: the values of the spec's secrets, from the submit to the run's end, when they are removed.",
    )

    requests = Below("launcher/requests", "Of a hold on Slurm: a file for each run in it, in their order.")

    def job_answer(self, tag: str) -> Path:
        """On Slurm: what sbatch answered to the submit of the job with this tag."""
        return self.launcher_dir / f"job-{tag}.json"

    cancel_file = Below("CANCEL", "A process that creates this file asks the supervisors to end the run at once.")

    def attempt(self, number: int) -> AttemptDir:
        attempt = AttemptDir(self.path / "attempts" / str(number))
        return attempt if self.step is None else AttemptDir(attempt.steps / self.step)

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
        attempts = [self.attempt(number) for number in sorted(map(int, names))]
        return attempts if self.step is None else [attempt for attempt in attempts if attempt.path.is_dir()]

    def newest_attempt(self) -> AttemptDir:
        """Return the newest attempt of a run that has one.

        Raises: OSError: the run's directory cannot be reached, or has lost its attempts.
        """
        attempts = self.attempts()
        if not attempts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / "attempts"))
        return attempts[-1]


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
            run = RunDir(Path(environ["CLUSTERDDP_RUN_DIR"]), step=environ.get(STEP))
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
    newest = max((each.number for each in RunDir(run.path).attempts()), default=attempt)
    if newest > attempt:
        raise ClusterddpError(f"attempt {newest} of the run has begun, this is attempt {attempt}")

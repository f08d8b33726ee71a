"""The steps of a batch script: each command of it that started ranks (srun, torchrun, mpirun), with a record.

A step has the files of an attempt, in `attempts/N/steps/K`. `RunDir(path, step="K")` is the run as this step sees it:
its attempts are those of the step, all other files are those of the whole run. A torchrun that starts its workers again
starts the next round of the same step: `K.1`. The token of a step is `<token of the run>.K`, so the end of one step
leaves the processes of the others alone, and a cleanup of the run by `<token>.` finds them all.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import is_file, read_json, read_record, read_regular, write_json

_MAX_SCRIPT_BYTES = 4 << 20
"""sbatch's own limit (max_script_size) is 4 MB by default."""
_NAME = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """`step.json`: a command of a batch script that started ranks; what looks like a secret is hidden in it."""

    command: tuple[str, ...]
    """The launcher and its options: `srun --ntasks=8`."""
    program: tuple[str, ...]
    """What each of its tasks runs: `python train.py --lr 0.1`."""
    line: int | None = None
    """Of the script; None: it is not known, as in a script of another shell than bash."""
    working_dir: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables whose values differ from those at the start of the job, without secrets and without ours.

    `$NAME` in a list of directories stands for the value of NAME at the start: `/env/bin:$PATH`.
    """
    started: float = 0.0
    inside: str | None = None
    """The step whose task ran the command: torchrun in an srun."""


def new_step(run: RunDir, attempt: int, record: StepRecord) -> RunDir:
    """Make the directory of the next step; return the run as that step sees it.

    Raises: OSError, ClusterddpError: the storage does not take it.
    """
    steps = RunDir(run.path).attempt(attempt).steps
    steps.mkdir(mode=0o700, exist_ok=True)
    number = len(_names(steps))
    while True:
        step = RunDir(run.path, step=str(number))
        try:
            step.attempt(attempt).path.mkdir(mode=0o700)
        except FileExistsError:  # another command of the script was faster
            number += 1
            continue
        write_json(step.attempt(attempt).step, dataclasses.asdict(record))
        return step


def next_round(step: RunDir, attempt: int, number: int) -> RunDir:
    """Return the step in its round with this number, and make its directory; 0 is the step itself."""
    assert step.step is not None
    if number == 0:
        return step
    later = RunDir(step.path, step=f"{step.step}.{number}")
    if record := read_step(step.attempt(attempt)):
        later.attempt(attempt).path.mkdir(mode=0o700, exist_ok=True)
        write_json(later.attempt(attempt).step, dataclasses.asdict(record))
    return later


def read_step(attempt: AttemptDir) -> StepRecord | None:
    """Read the record of a step; None: there is none."""
    return read_record(StepRecord, attempt.step)


def steps_of(run: RunDir, attempt: int) -> list[RunDir]:
    """List the steps of an attempt of a batch script, in the order of their start."""
    names = _names(RunDir(run.path).attempt(attempt).steps)
    return [RunDir(run.path, step=name) for name in sorted(names, key=lambda name: [*map(int, name.split("."))])]


def steps_with_ranks(run: RunDir, attempt: int) -> list[RunDir]:
    """List the steps whose tasks are ranks: without one whose task has only started another launcher."""
    steps = steps_of(run, attempt)
    records = [read_step(step.attempt(attempt)) for step in steps]
    outer = {record.inside for record in records if record}
    return [step for step in steps if step.step not in outer]


def running_steps(run: RunDir, attempt: int) -> list[RunDir]:
    """List the steps whose ranks run."""
    steps = [(step, step.attempt(attempt)) for step in steps_with_ranks(run, attempt)]
    return [step for step, directory in steps if is_file(directory.start) and read_end(directory) is None]


def shown_step(run: RunDir, attempt: int | None) -> RunDir:
    """Return the run as one of its steps sees it: the newest that runs, else the first that failed, else the newest.

    A run without steps is returned as it is.
    """
    steps = [] if attempt is None or run.step is not None else steps_with_ranks(run, attempt)
    if attempt is None or not steps:
        return run
    ends = [(read_end(step.attempt(attempt)), step) for step in steps]
    running = running_steps(run, attempt)
    failed = [(end.ended, step) for end, step in ends if end is not None and end.outcome == "FAILED"]
    return running[-1] if running else min(failed, key=lambda each: each[0])[1] if failed else steps[-1]


def job_output(attempt: AttemptDir) -> tuple[Path, ...]:
    """Return the files with the output of a batch script, and of all that it runs; empty: they are not known here."""
    claim = read_json(attempt.claim) or {}
    paths = dict.fromkeys(str(claim.get(name) or "") for name in ("stdout", "stderr"))
    return tuple(Path(path) for path in paths if path.startswith("/") and is_file(Path(path)))


def read_batch_script(run: RunDir) -> bytes:
    """Read the script of a run. Raises: ClusterddpError, OSError: it is no regular file, or too long for sbatch."""
    return read_regular(run.batch_script, _MAX_SCRIPT_BYTES)


def is_batch_script(run: RunDir) -> bool:
    """Return whether the run is a batch script, whose ranks are those of its steps."""
    return is_file(run.batch_script)


def is_whole_script(run: RunDir) -> bool:
    """Return whether this is a batch script itself, none of its steps."""
    return run.step is None and is_batch_script(run)


def _names(steps: Path) -> list[str]:
    try:
        return [name for name in os.listdir(steps) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []

"""Where a script runs: in which run and attempt, as which rank, and which directories are its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterddp.ranks.environment import OUTPUT_DIR, STOP_FILE
from clusterddp.run.directory import Assignment, RunDir
from clusterddp.run.stop import record_question, stop_requested
from clusterddp.train.checkpoint import Store, newest_attempt, newest_manifest

_RUN_DIR = "CLUSTERDDP_RUN_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What an attempt goes on from."""

    attempt: int
    """The attempt before this one, or the one that wrote the checkpoint."""
    checkpoint: Path | None
    """The newest file that `checkpoint.save` wrote; None: none, or none that this host sees."""
    step: int | None
    """The step of the checkpoint."""


def output_dir() -> Path:
    """Return the directory for the script's own results, which is made: `entry.output_dir`, else `output/` of the run.

    Outside of a run it is `output/` in the working directory.
    """
    named = os.environ.get(OUTPUT_DIR)
    path = Path(named) if named else _home().output
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def resumed_from() -> Resumed | None:
    """Return what this attempt goes on from; None when it is the first one.

    Outside of a run: the newest checkpoint in `checkpoints/` of the working directory.
    """
    store = find_store()
    manifest = newest_manifest(store)
    if manifest is not None:
        path = store.directory / manifest.file
        return Resumed(attempt=manifest.attempt, checkpoint=path, step=manifest.step)
    if store.attempt == 0 or find_assignment() is None:
        return None
    return Resumed(attempt=store.attempt - 1, checkpoint=None, step=None)


def should_stop() -> bool:
    """Say, in a script that is a run's entry, whether the run was asked to checkpoint and end (one stat call).

    Ranks may see it at different steps: agree on one, for example by an all-reduce of the answer, or ask
    `checkpoint.due`, which does. Outside of a run the answer is False.
    """
    stop_file = os.environ.get(STOP_FILE)
    if stop_file is None:
        return False
    record_question(Path(stop_file))
    return stop_requested(Path(stop_file))


def find_assignment() -> Assignment | None:
    """Return the run and attempt of this process; None outside of a run."""
    return Assignment.from_environment(os.environ) if _RUN_DIR in os.environ else None


def is_first_rank() -> bool:
    """Say whether this is rank 0 of the script's process group; before there is one, by RANK."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def find_store() -> Store:
    """Return where the checkpoints of this attempt lie, of which `keep` stay.

    Outside of a run each start is an attempt of its own: it overwrites no file of an earlier one.
    """
    assignment = find_assignment()
    if assignment is not None:
        return Store(run=assignment.run, attempt=assignment.attempt.number, keep=2)
    here = Store(run=_home(), attempt=0, keep=2)
    before = newest_attempt(here)
    return here if before is None else dataclasses.replace(here, attempt=before + 1)


def say(text: str) -> None:
    """Print a line for people; a full disk under the log ends no script."""
    with contextlib.suppress(OSError):
        print(f"clusterddp: {text}", file=sys.stderr, flush=True)


def _home() -> RunDir:
    """Return the run's directory; outside of a run the working directory takes its place."""
    assignment = find_assignment()
    return RunDir(Path.cwd()) if assignment is None else assignment.run

"""Runs that a host keeps on its disk, made old by their times."""

from __future__ import annotations

import os
import time
from pathlib import Path

from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, write_run

DAY_S = 86_400.0
TOKEN = "3f9a12bc" * 4
RUN = "brisk-otter-3.3f9a12bc"
COMPLETED = AttemptEnd(outcome="COMPLETED", reason="all ranks are done")


def make_run(root: Path, *, end: AttemptEnd | None, age_days: float = 40, name: str = RUN) -> Path:
    """Make a run with a checkpoint of 8 kB, whose last word is that old."""
    run = RunDir(root / "runs" / name)
    run.attempt(0).path.mkdir(parents=True)
    run.checkpoints.mkdir()
    (run.checkpoints / "step-100.pt").write_bytes(b"x" * 8192)
    write_run(run, RunRecord(run="brisk-otter-3", token=TOKEN, name="job", launcher="ssh", created_ns=1))
    if end is not None:
        write_end(run.attempt(0), end)
    age(run.path, age_days)
    return run.path


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for folder, _, names in os.walk(path, topdown=False):
        for each in [*(os.path.join(folder, name) for name in names), folder]:
            os.utime(each, (then, then))

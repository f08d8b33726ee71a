"""The real squeue and sacct of a rack, for code that runs in the test's own process; and jobs for runs made by hand."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from clusterddp.places.slurm.queue import Slurm
from clusterddp.run.directory import RunDir
from tests.support.handmade_slurm_runs import name_of_job, update_record
from tests.support.waiting import wait_until
from tests.testbed.rack import Rack

COMMANDS = ("squeue", "sacct")


def reach_slurm(rack: Rack, bin_dir: Path, *, max_age_s: float = 0.0) -> Slurm:
    """Return a `Slurm` whose commands are those of the rack's head."""
    bin_dir.mkdir(exist_ok=True)
    for name in COMMANDS:
        command = bin_dir / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join(rack.argv("head", [name]))} "$@"\n')
        command.chmod(0o755)
    return Slurm({"PATH": f"{bin_dir}:/usr/bin:/bin"}, max_age_s=max_age_s)


def submit_job(rack: Rack, run: RunDir, *options: str, script: str = "sleep 300", name: str = "") -> str:
    """Queue a job that carries the run's tag, note its id in the record, and return it."""
    argv = ["sbatch", "--parsable", "-J", name or name_of_job(run), "-o", str(run.launcher_dir / "job.log")]
    job_id = rack.run("head", [*argv, *options, "--wrap", script]).stdout.strip()
    update_record(run, job_id=job_id)
    return job_id


def await_state(rack: Rack, job_id: str, *states: str, within_s: float = 60) -> None:
    """Wait until squeue gives a job one of these states; `gone`: until it does not know it."""
    query = ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"]

    def reached() -> bool:
        done = rack.run("head", query, check=False)
        return (done.stdout.strip() or "gone") in states

    wait_until(reached, within_s)


def eventually(is_true: Callable[[], bool], within_s: float = 150) -> None:
    wait_until(is_true, within_s)

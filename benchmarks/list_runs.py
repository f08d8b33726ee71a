"""How long `clusterddp list` takes over many runs on Slurm, the start of Python and the questions to Slurm included.

    python benchmarks/list_runs.py [--runs 1000] [--repeat 7] [--rack]

Of ten runs four are completed, two failed, two wait, one runs, and one is forgotten by Slurm. By default a squeue and
a sacct of two lines of shell answer at once, and what is measured is clusterddp; with --rack (as root) the jobs are
tasks of an array in a real Slurm, and a real squeue answers. `floor` is the same without any run.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterddp.places.slurm.queue import SEPARATOR
from clusterddp.run.directory import RunDir
from tests.support.handmade_runs import train
from tests.support.handmade_slurm_runs import age, begin_attempt, end_attempt, make_slurm_run, name_of_job
from tests.support.paths import ROOT
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

TAG = "0123456789abcdef0123"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--rack", action="store_true", help="ask a real Slurm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = [make_one(Path(directory) / "runs", number) for number in range(options.runs)]
        if options.rack:
            with running_rack(RackPlan(nodes=["node1"])) as rack:
                submit_array(rack, runs)
                measure(Path(directory), options, rack)
        else:
            bin_dir = write_fakes(Path(directory), runs)
            os.environ["PATH"] = f"{bin_dir}:{os.environ['PATH']}"
            measure(Path(directory), options, None)
    return 0


def make_one(runs_dir: Path, number: int) -> RunDir:
    run = make_slurm_run(
        runs_dir, f"run-{number:04d}", job_id=f"7_{number}", job_tag=TAG, array_index=number, created_ns=10**18 + number
    )
    kind = kind_of(number)
    if kind != "waits":
        train(run, steps=20)
        attempt = begin_attempt(run)
        if kind in {"completed", "failed"}:
            end_attempt(attempt, kind.upper())
    age(run)
    return run


def kind_of(number: int) -> str:
    return [*["completed"] * 4, *["failed"] * 2, *["waits"] * 2, "runs", "forgotten"][number % 10]


def write_fakes(directory: Path, runs: list[RunDir]) -> Path:
    lines = []
    for number, run in enumerate(runs):
        state = {"waits": "PENDING", "runs": "RUNNING"}.get(kind_of(number))
        if state:
            moment = "2026-01-02T03:04:05"
            fields = ["7", "7", str(number), state, moment, "N/A", "N/A", "gpu", "2", "", "Priority", name_of_job(run)]
            lines.append(SEPARATOR.join(fields) + "\n")
    (directory / "queue").write_text("".join(lines))
    bin_dir = directory / "bin"
    bin_dir.mkdir()
    (bin_dir / "squeue").write_text(f"#!/bin/sh\ncat {directory / 'queue'}\n")
    (bin_dir / "sacct").write_text("#!/bin/sh\n")
    for command in bin_dir.iterdir():
        command.chmod(0o755)
    return bin_dir


def submit_array(rack: Rack, runs: list[RunDir]) -> None:
    """Let Slurm know the runs that wait or run; those that run are held too, which asks as much of list."""
    tasks = ",".join(str(number) for number in range(len(runs)) if kind_of(number) in {"waits", "runs"})
    rack.run("head", ["scontrol", "update", "nodename=node1", "state=drain", "reason=benchmark"])
    rack.run("head", ["sbatch", "--hold", f"--array={tasks}", "-J", name_of_job(runs[0]), "--wrap", "true"])


def measure(directory: Path, options: argparse.Namespace, rack: Rack | None) -> None:
    (directory / "none").mkdir()
    full = [list_once(directory / "runs", options.runs, rack) for _ in range(options.repeat)]
    floor = [list_once(directory / "none", options.runs, rack) for _ in range(options.repeat)]
    where = "a rack's squeue" if rack else "a fake squeue"
    states = ", ".join(f"{count} {state}" for state, count in sorted(full[0][1].items()))
    print(f"{options.runs} runs ({states}), {where}, n={options.repeat}")
    for name, taken in (("list", full), ("floor", floor)):
        seconds = [second for second, _ in taken]
        print(f"{name:>6}  median {statistics.median(seconds):.3f} s, slowest {max(seconds):.3f} s")


def list_once(runs_dir: Path, limit: int, rack: Rack | None) -> tuple[float, dict[str, int]]:
    argv = [sys.executable, "-m", "clusterddp", "list", "-n", str(limit), "--runs", str(runs_dir)]
    variables = {"PYTHONPATH": str(ROOT)}
    if rack:
        argv = rack.argv("head", argv, env=variables)
    before = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=os.environ | variables)
    taken = time.monotonic() - before
    found: dict[str, int] = {}
    for line in done.stdout.splitlines()[1:]:
        state = re.split(r"\s+", line)[1]
        found[state] = found.get(state, 0) + 1
    return taken, found


if __name__ == "__main__":
    sys.exit(main())

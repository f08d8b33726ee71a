"""Sweeps for tests: planned with a scontrol of two lines, or submitted on a rack as a user does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from clusterddp.run.directory import RunDir
from clusterddp.run.sweep_dir import SweepDir
from clusterddp.spec.sweep import load_sweep
from clusterddp.sweep.plan import SweepPlan, plan_sweep
from tests.support.slurm_runs import environment
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

SPEC = "name: job\nlauncher: slurm\nresources: {procs_per_node: 1}\nentry: {script: entry.py}\n"
CONFIG = "MaxArraySize            = 1001\nMaxJobCount             = 10000\n"


def fake_scontrol(directory: Path, config: str = CONFIG) -> dict[str, str]:
    """Return an environment whose scontrol tells this configuration."""
    bin_dir = directory / "bin"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "config").write_text(config)
    (bin_dir / "scontrol").write_text(f"#!/bin/sh\ncat {bin_dir}/config\n")
    (bin_dir / "scontrol").chmod(0o755)
    return {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(directory)}


def plan_one(
    directory: Path, *arguments: str, text: str = SPEC, environ: Mapping[str, str] | None = None, **changes: Path
) -> SweepPlan:
    """Plan a sweep of a script that says hello, submitted from `directory`."""
    for name in ("entry.py", "two.py"):
        (directory / name).write_text("print('hello')\n")
    spec = load_sweep(text, arguments, sweep=bool(arguments), environ={})
    environ = fake_scontrol(directory) if environ is None else environ
    return plan_sweep(spec, **{"runs_dir": directory / "runs", "working_dir": directory, "environ": environ} | changes)


class Place:
    """A directory on the storage that the rack's hosts share, from which a user submits."""

    def __init__(self, rack: Rack, name: str, code: str, *, more: str = "") -> None:
        self.rack = rack
        self.path = rack.dir / "shared" / name
        self.path.mkdir()
        (self.path / "job.yaml").write_text(f"{SPEC}{more}\n")
        (self.path / "entry.py").write_text(code)
        self.path_first = ""

    def run(self, *arguments: str, check: bool = True) -> CompletedProcess[str]:
        """Run clusterddp on the head."""
        environ = environment()
        if self.path_first:
            environ["PATH"] = f"{self.path_first}:{environ['PATH']}"
        argv = [sys.executable, "-m", "clusterddp", *arguments]
        return self.rack.run(HEAD, argv, cwd=self.path, env=environ, check=check)

    def submit(self, *arguments: str) -> SweepDir:
        answer = json.loads(self.run("submit", "job.yaml", *arguments, "--sweep", "-o", "json").stdout)
        return SweepDir(self.path / "runs" / answer["sweep"])

    def states(self, sweep: SweepDir) -> list[str]:
        answer = json.loads(self.run("status", sweep.name, "-o", "json").stdout)
        return [run["state"] for run in answer["runs"]]


def log_of(run: RunDir) -> str:
    return run.attempts()[-1].stdout(0).read_text()

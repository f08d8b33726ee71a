"""Sweeps for tests: planned with a scontrol of two lines, or submitted on a rack as a user does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.sweep import SweepDir
from clusterddp.spec.sweep import load_sweep
from clusterddp.submission.sweep_plan import SweepPlan, plan_sweep
from tests.support.person import Person
from tests.support.slurm_runs import environment
from tests.testbed.rack import Rack

SPEC = "name: job\nlauncher: slurm\nresources: {procs_per_node: 1}\nentry: {script: entry.py}\n"
CONFIG = "MaxArraySize            = 1001\nMaxJobCount             = 10000\n"


def fake_scontrol(directory: Path, config: str = CONFIG) -> dict[str, str]:
    """Return an environment whose scontrol prints this configuration."""
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


class SweepPerson(Person):
    """A user on the head of a rack who submits sweeps."""

    @classmethod
    def at(cls, rack: Rack, name: str, code: str, *, more: str = "") -> SweepPerson:
        """Give a user a new directory on shared storage, with a spec whose entry is this code."""
        path = rack.dir / "shared" / name
        path.mkdir()
        (path / "job.yaml").write_text(f"{SPEC}{more}\n")
        (path / "entry.py").write_text(code)
        return cls(rack=rack, path=path, environ=environment())

    def put_first(self, directory: Path) -> None:
        """Have commands of a directory found before all others."""
        self.environ["PATH"] = f"{directory}:{self.environ['PATH']}"

    def states(self, sweep: SweepDir) -> list[str]:
        return [run["state"] for run in self.status(sweep)["runs"]]


def log_of(run: RunDir) -> str:
    return run.attempts()[-1].stdout(0).read_text()

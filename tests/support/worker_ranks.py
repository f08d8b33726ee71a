"""Ranks that a test starts as other launchers do: a place with a spec, and the command `clusterddp worker` in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

REPORT = """\
import json, os, sys
from pathlib import Path
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
report = {name: os.environ[name] for name in names} | {"run": os.environ["CLUSTERDDP_RUN"], "pid": os.getpid()}
report |= {"interface": os.environ["GLOO_SOCKET_IFNAME"], "torch": "torch" in sys.modules}
report |= {"attempt": os.environ["CLUSTERDDP_ATTEMPT"]}
Path(sys.argv[1], f"report-{report['RANK']}.json").write_text(json.dumps(report))
"""
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OF_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "CLUSTERDDP_", "MASTER_")


@dataclass
class Place:
    """A directory from which ranks are started."""

    path: Path
    start_timeout: str = "1:00"

    def write(self, code: str = REPORT, more: str = "") -> Place:
        """Write the spec `job.yaml`, whose entry is this code; more lines of it may follow."""
        (self.path / "entry.py").write_text(code)
        text = f"name: job\nentry: {{script: entry.py, args: [{self.path}]}}\nsnapshot: false\n"
        (self.path / "job.yaml").write_text(f"{text}network: {{start_timeout: '{self.start_timeout}'}}\n{more}\n")
        return self

    def run(self, *command: str, timeout_s: float = 120, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.path,
            env=environment(environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE * timeout_s,
            check=False,
        )

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=environment(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def by_hand(self, ranks: Sequence[int], world_size: int, *arguments: str, **environ: str) -> list[Ended]:
        """Start these ranks by hand, and wait for all of them."""
        processes = [
            self.start(
                *worker(*arguments), **{"RANK": str(rank), "WORLD_SIZE": str(world_size), **meeting(), **environ}
            )
            for rank in ranks
        ]
        return wait_for(processes)

    def clusterddp(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "clusterddp", *arguments)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.clusterddp("status", "-o", "json").stdout)
        return status

    def reports(self) -> list[dict[str, Any]]:
        """Return what the ranks have reported, by rank."""
        files = sorted(self.path.glob("report-*.json"), key=lambda path: int(path.stem[7:]))
        return [json.loads(file.read_text()) for file in files]

    def values(self, name: str) -> list[str]:
        return [report[name] for report in self.reports()]

    @property
    def only_run(self) -> RunDir:
        (run,) = list_runs(self.path / "runs")
        return run


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def wait_for(processes: Sequence[subprocess.Popen[str]], timeout_s: float = 120) -> list[Ended]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE * timeout_s)
            ended.append(Ended(process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


def worker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "clusterddp", "worker", "job.yaml", *arguments]


def meeting(offset: int = 0) -> dict[str, str]:
    """Name where ranks on this machine meet: a port of this test process's own."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(10_000 + (os.getpid() * 7 + offset) % 20_000)}


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what launchers leave in it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return own | {"PYTHONPATH": str(ROOT), **MPI_AS_ROOT} | more


def demand(tool: str) -> str:
    """Return the path of a tool, or skip the test where it is not installed."""
    path = shutil.which(tool)
    if path is None and os.environ.get("CLUSTERDDP_TEST_RACK") == "required":
        pytest.fail(f"{tool} is not installed: tests/testbed/install")
    if path is None:
        pytest.skip(f"{tool} is not installed: tests/testbed/install")
    return path


def demand_open_mpi_4() -> str:
    """Return the path of Open MPI's mpirun, or skip the test: since version 5 its ranks receive no other host."""
    path = demand("mpirun.openmpi")
    words = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout.split()
    version = next(word for word in words if word[0].isdigit())
    if int(version.split(".")[0]) > 4:
        pytest.skip(
            "Open MPI names no hosts since version 5: over hosts it needs MASTER_ADDR, or an allocation of Slurm's"
        )
    return path

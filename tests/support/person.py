"""A user who types clusterddp: on this machine, or on the head of a rack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.record import RunRecord, read_run
from clusterddp.run.sweep import SweepDir
from clusterddp.system.files import read_jsonl
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
IN_CHECKOUT = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def state_of(rack: Rack) -> Path:
    """Return the state directory of the user on a rack: other racks have nodes of the same names."""
    return rack.dir / "shared" / "state"


@dataclass(kw_only=True)
class Person:
    """Works in a directory, with variables of their own."""

    path: Path
    rack: Rack | None = None
    """On whose head; None: on this machine, with the variables of the tests."""
    environ: dict[str, str] = field(default_factory=dict)
    checks: bool = True
    """A command that fails fails the test, if the test says nothing else."""

    @property
    def runs_dir(self) -> Path:
        return self.path / "runs"

    def variables(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        given = dict(os.environ) if self.rack is None else IN_CHECKOUT | {"XDG_STATE_HOME": str(state_of(self.rack))}
        return {**given, **self.environ, **(more or {})}

    def command(self, *arguments: str) -> list[str]:
        return [*CLUSTERDDP, *arguments]

    def clusterddp(
        self,
        *arguments: str,
        check: bool | None = None,
        timeout_s: float = 150,
        stdin: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        argv, environ = self.command(*arguments), self.variables(environ)
        check = self.checks if check is None else check
        if self.rack is not None:
            return self.rack.run(HEAD, argv, cwd=self.path, env=environ, check=check, timeout_s=timeout_s, stdin=stdin)
        done = subprocess.run(
            argv,
            cwd=self.path,
            env=environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE * timeout_s,
            check=False,
        )
        assert not (check and done.returncode), done.stderr
        return done

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command without waiting for it, in a session of its own."""
        argv, environ = self.command(*arguments), self.variables(environ)
        if self.rack is not None:
            argv = self.rack.argv(HEAD, argv, cwd=self.path, env=environ)
        return subprocess.Popen(
            argv,
            cwd=self.path if self.rack is None else None,
            env=environ if self.rack is None else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def submit(self, text: str, *arguments: str) -> RunDir:
        """Write a spec and submit it; return the run's directory."""
        (self.path / "job.yaml").write_text(text)
        done = self.clusterddp("submit", "job.yaml", "-o", "json", *arguments, check=True)
        return RunDir(Path(json.loads(done.stdout)["run_dir"]))

    def submit_sweep(self, *arguments: str, environ: Mapping[str, str] | None = None) -> SweepDir:
        """Submit `job.yaml`, which is there, as a sweep."""
        done = self.clusterddp("submit", "job.yaml", *arguments, "--sweep", "-o", "json", environ=environ, check=True)
        return SweepDir(self.runs_dir / json.loads(done.stdout)["sweep"])

    def run_dir(self) -> RunDir:
        """Return the directory of the newest run."""
        return list_runs(self.runs_dir)[-1]

    def record(self, run: RunDir | None = None) -> RunRecord:
        return read_run(run or self.run_dir())

    def end(self, run: RunDir | None = None) -> AttemptEnd | None:
        return read_end((run or self.run_dir()).attempts()[-1])

    def events(self, run: RunDir | None = None) -> list[str]:
        return [str(row["event"]) for row in read_jsonl((run or self.run_dir()).events)]

    def status(self, run: RunDir | SweepDir | None = None) -> dict[str, Any]:
        """Ask for the status of a run or a sweep, by default of the newest run."""
        return dict(json.loads(self.clusterddp("status", (run or self.run_dir()).name, "-o", "json").stdout))

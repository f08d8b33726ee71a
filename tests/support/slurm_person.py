"""A person on the head of a rack who submits runs: for tests of the slurm launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.run.directory import RunDir, list_runs
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import RunRecord, read_run
from clusterddp.system.files import read_jsonl
from tests.support.paths import ROOT
from tests.testbed.files import slurm_year
from tests.testbed.plan import HEAD
from tests.testbed.rack import SYSTEM_PATH, Rack

LOST_REPLY = 'exec strace -o /dev/null -e inject=recvfrom:error=ECONNRESET:when=5 /usr/bin/sbatch "$@"'
"""sbatch never reads the controller's answer: it reports a failure for a job that is queued (up to Slurm 22.05)."""
HELD = "slurm: {hold: true}"


@dataclass(kw_only=True)
class Person:
    """Somebody who works in a directory of a rack's shared storage."""

    rack: Rack
    place: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def runs_dir(self) -> Path:
        return self.place / "runs"

    def write_spec(self, more: str = HELD, *, resources: str = "{nodes: 2, procs_per_node: 2}") -> None:
        """Write job.yaml, by default for a job that waits until it is released."""
        (self.place / "entry.py").write_text("print('hello')\n")
        text = f"name: job\nlauncher: slurm\nresources: {resources}\nentry: {{script: entry.py}}\n{more}\n"
        (self.place / "job.yaml").write_text(text)

    def clusterddp(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "clusterddp", *arguments]
        return self.rack.run(HEAD, argv, cwd=self.place, env=self._variables(environ), check=False, timeout_s=150)

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command without waiting for it."""
        argv = [sys.executable, "-m", "clusterddp", *arguments]
        command = self.rack.argv(HEAD, argv, cwd=self.place, env=self._variables(environ))
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def slurm(self, *command: str, check: bool = True) -> str:
        return self.rack.run(HEAD, list(command), cwd=self.place, check=check).stdout

    def run(self) -> RunDir:
        """Return the newest run."""
        return list_runs(self.runs_dir)[-1]

    def record(self) -> RunRecord:
        return read_run(self.run())

    def end(self) -> AttemptEnd | None:
        return read_end(self.run().attempts()[-1])

    def events(self) -> list[str]:
        return [str(row["event"]) for row in read_jsonl(self.run().events)]

    def jobs(self, tag: str | None = None) -> list[tuple[str, str]]:
        """List the ids and states of all jobs with this tag; without one, of the newest run's job."""
        tag = tag or self.record().job_tag
        lines = self.slurm("squeue", "--noheader", "--states=all", "--format=%A %T %j").splitlines()
        # Other tests' jobs have names with blanks and line breaks, or none.
        rows = [words for line in lines if len(words := line.split()) == 3]
        return [(words[0], words[1]) for words in rows if words[2].endswith(f".{tag}")]

    def job(self, job_id: str) -> dict[str, str]:
        """Return what slurmctld says of a job; values with blanks are cut."""
        words = self.slurm("scontrol", "show", "job", "-o", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.clusterddp("status", "-o", "json").stdout))

    def wrap_sbatch(self, script: str) -> dict[str, str]:
        """Put an sbatch before Slurm's on PATH; return the variables that do so."""
        wrapper = self.place / "bin" / "sbatch"
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f"#!/bin/sh\n{script}\n")
        wrapper.chmod(0o755)
        return {"PATH": f"{wrapper.parent}:{SYSTEM_PATH}"}

    def _variables(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **self.environ, **(more or {})}


def interrupt(person: Person) -> None:
    """Press Ctrl-C: the command and the sbatch that it waits for get the signal, as from a terminal."""
    person.slurm("pkill", "-INT", "-f", f"clusterddp submit|{person.place}/bin/sbatch")


def lost_reply() -> str:
    """Return LOST_REPLY for the Slurm that is here: newer ones receive less often before."""
    return LOST_REPLY if slurm_year() < 24 else LOST_REPLY.replace("when=5", "when=2")

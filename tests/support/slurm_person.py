"""A person on the head of a rack who submits runs: for tests of the slurm launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.run.directory import RunDir
from tests.support.person import Person, state_of
from tests.support.waiting import wait_until
from tests.testbed.files import slurm_year
from tests.testbed.plan import HEAD, SYSTEM_PATH
from tests.testbed.rack import Rack

LOST_REPLY = 'exec strace -o /dev/null -e inject=recvfrom:error=ECONNRESET:when=5 /usr/bin/sbatch "$@"'
"""sbatch never reads the controller's answer: it reports a failure for a job that is queued (up to Slurm 22.05)."""
HELD = "slurm: {hold: true}"
ALL_REDUCE = """\
import os, signal, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print("sum", total.item(), "over", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
while True:
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.02)
    if rank == 5 and os.path.exists(sys.argv[1]):
        how = open(sys.argv[1]).read()
        if how == "raise":
            raise ValueError("the loss is nan")
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""A gang that reduces until a file asks rank 5 to raise or to be killed."""


@dataclass(kw_only=True)
class SlurmPerson(Person):
    """A user on the head of a rack, in a directory of the storage that its hosts share."""

    rack: Rack

    @classmethod
    def at(cls, rack: Rack, name: str) -> SlurmPerson:
        """Give a new user a directory; they know nothing of the nodes that earlier users' runs have met."""
        path = rack.dir / "shared" / name
        path.mkdir()
        return cls(rack=rack, path=path, environ={"XDG_STATE_HOME": str(state_of(rack) / name)})

    def write_spec(self, more: str = HELD, *, resources: str = "{nodes: 2, procs_per_node: 2}") -> None:
        """Write job.yaml, by default for a job that waits until it is released."""
        (self.path / "entry.py").write_text("print('hello')\n")
        text = f"name: job\nlauncher: slurm\nresources: {resources}\nentry: {{script: entry.py}}\n{more}\n"
        (self.path / "job.yaml").write_text(text)

    def slurm(self, *command: str, check: bool = True) -> str:
        return self.rack.run(HEAD, list(command), cwd=self.path, check=check).stdout

    def await_status(
        self, run: RunDir, wanted: Callable[[dict[str, Any]], bool], within_s: float = 120
    ) -> dict[str, Any]:
        """Ask until the status is as wanted; return it."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            seen.clear()
            seen.update(self.status(run))
            return wanted(seen)

        wait_until(look, within_s, what=lambda: seen, interval_s=1.0)  # each question starts a Python
        return seen

    def queue(self) -> list[str]:
        """List the ids and states of the jobs that Slurm has in its queue."""
        return self.slurm("squeue", "-h", "-o", "%i %T").splitlines()

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

    def processes(self, run: RunDir, with_variable: str = "") -> list[str]:
        """List what is left of a run on any host that is on: every one of its processes names its token."""
        token = self.record(run).token.encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = (process / "environ").read_bytes()
                if token in environ and with_variable.encode() in environ:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or is the kernel's
                continue
        return found

    def wrap_sbatch(self, script: str) -> dict[str, str]:
        """Put an sbatch before Slurm's on PATH; return the variables that do so."""
        wrapper = self.path / "bin" / "sbatch"
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f"#!/bin/sh\n{script}\n")
        wrapper.chmod(0o755)
        return {"PATH": f"{wrapper.parent}:{SYSTEM_PATH}"}


def interrupt(person: SlurmPerson) -> None:
    """Press Ctrl-C: the command and the sbatch that it waits for get the signal, as from a terminal."""
    person.slurm("pkill", "-INT", "-f", f"clusterddp submit|{person.path}/bin/sbatch")


def lost_reply() -> str:
    """Return LOST_REPLY for the Slurm that is here: versions differ in how often they receive before the answer."""
    year = slurm_year()
    when = 3 if year < 21 else 5 if year < 24 else 2
    return LOST_REPLY.replace("when=5", f"when={when}")

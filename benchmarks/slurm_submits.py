"""Submit to a real Slurm that loses answers, with launchers and the controller killed; count doubled and lost runs.

    python benchmarks/slurm_submits.py [SEED [COUNT]]        (root: it starts a rack, tests/testbed/README.md)

Each of COUNT (500) submits is one of a job that is held, so that none ever runs. Two in five of them never read the
controller's answer (strace makes sbatch's fifth recvfrom fail), one in four is killed with SIGKILL at a random moment,
half of those with the sbatch that it waits for, and slurmctld is killed and started again once in about twenty. When
all is quiet, right is: no run has two jobs; no job is there without its run; every run that has a job is found PENDING;
and of a run that has none its state says so, in words (FAILED, CANCELLED, LOST).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import SYSTEM_PATH, Rack, running_rack

SPEC = """
name: chaos
launcher: slurm
device: cpu
resources: {cpus_per_task: 1, memory_gb: 0.001}
snapshot: false
slurm: {hold: true}
entry: {script: entry.py}
"""
LOST_REPLY = """#!/bin/sh
exec strace -o /dev/null -e inject=recvfrom:error=ECONNRESET:when=5 /usr/bin/sbatch "$@"
"""
NUM_WORKERS = 3
QUIET_S = 40.0
"""Longer than a run whose job is gone may be called UNKNOWN."""
ENDED = {"FAILED", "CANCELLED", "LOST"}


@dataclass
class Chaos:
    """One rack, and what was done to it."""

    rack: Rack
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    usual_s: float = 2.0
    """How long the last submits took that no fault disturbed: the moment of a kill is drawn from it."""

    @property
    def place(self) -> Path:
        return self.rack.dir / "shared"

    def submit(self, number: int) -> None:
        """Submit once, in one of the ways."""
        with self.lock:
            loses_reply, is_killed = self.chance.random() < 0.4, self.chance.random() < 0.25
            takes_sbatch, kills_controller = self.chance.random() < 0.5, self.chance.random() < 0.05
            after_s, down_s = self.chance.uniform(0.2, 1.1) * self.usual_s, self.chance.uniform(0, 4.0)
        began = time.monotonic()
        process = self._start(loses_reply=loses_reply)
        if kills_controller:
            self._kill_controller(after_s, down_s)
        if is_killed:
            time.sleep(after_s)
            kill_family(process.pid, with_children=takes_sbatch)
        _, talk = process.communicate()
        answer = "killed" if process.returncode == -signal.SIGKILL or not talk else str(process.returncode)
        with self.lock:
            if not (is_killed or kills_controller or loses_reply):
                self.usual_s += 0.3 * (time.monotonic() - began - self.usual_s)
            self.done[f"submits that ended with {answer}"] += 1
            self.done["answers lost"] += loses_reply
            self.done["controllers killed"] += kills_controller
        if number % 50 == 49:
            print(f"{number + 1:4d} submits", flush=True)

    def ask(self, *command: str) -> str:
        """Ask Slurm until it answers."""
        while True:
            done = self.rack.run(HEAD, list(command), check=False)
            if done.returncode == 0:
                return done.stdout
            time.sleep(1)

    def clusterddp(self, *arguments: str) -> str:
        argv = [sys.executable, "-m", "clusterddp", *arguments]
        return self.rack.run(HEAD, argv, cwd=self.place, env={"PYTHONPATH": str(ROOT)}, timeout_s=300).stdout

    def _start(self, *, loses_reply: bool) -> subprocess.Popen[str]:
        path = f"{self.place}/lossy:{SYSTEM_PATH}" if loses_reply else SYSTEM_PATH
        argv = [sys.executable, "-m", "clusterddp", "submit", "job.yaml"]
        command = self.rack.argv(HEAD, argv, cwd=self.place, env={"PYTHONPATH": str(ROOT), "PATH": path})
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _kill_controller(self, after_s: float, down_s: float) -> None:
        time.sleep(after_s)
        with self.lock:  # one at a time
            self.rack.run(HEAD, ["pkill", "-KILL", "-x", "slurmctld"], check=False)
            time.sleep(down_s)
            self.rack.run(HEAD, ["slurmctld"], check=False)


def kill_family(nsenter: int, *, with_children: bool) -> None:
    """Kill the launcher, which nsenter has started in the rack, and maybe the sbatch that it waits for."""
    for launcher in children_of(nsenter):
        victims = [launcher, *(children_of(launcher) if with_children else [])]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def judge(chaos: Chaos) -> list[str]:
    """Say of each run and each job what is wrong with it."""
    time.sleep(QUIET_S)
    lines = chaos.ask("squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED", "--format=%j").splitlines()
    jobs = Counter(line.rpartition(".")[2] for line in lines)
    listed = json.loads(chaos.clusterddp("list", "-n", "100000", "-o", "json"))
    wrong = []
    tags = set()
    for run in listed:
        record = json.loads((chaos.place / "runs" / run["run"] / "run.json").read_text())
        tag = record["job_tag"]
        tags.add(tag)
        num_jobs = jobs[tag]
        chaos.done[f"runs that are {run['state']}, with {num_jobs} jobs"] += 1
        if num_jobs > 1:
            wrong.append(f"{run['run']}: doubled, it has {num_jobs} jobs")
        elif num_jobs == 1 and run["state"] != "PENDING":
            wrong.append(f"{run['run']}: has a job and is {run['state']} ({run['reason']})")
        elif num_jobs == 0 and (run["state"] not in ENDED or not run["reason"]):
            wrong.append(f"{run['run']}: lost, it has no job and is {run['state']} ({run['reason']})")
    wrong += [f"job .{tag}: belongs to no run" for tag in jobs if tag not in tags]
    return wrong


def main() -> int:
    seed, count = [int(argument) for argument in (sys.argv[1:] + ["1", "500"][len(sys.argv) - 1 :])]
    began = time.monotonic()
    with running_rack(RackPlan(nodes=["node1"])) as rack:
        chaos = Chaos(rack=rack, chance=random.Random(seed))
        (chaos.place / "job.yaml").write_text(SPEC)
        (chaos.place / "entry.py").write_text("")
        lossy = chaos.place / "lossy" / "sbatch"
        lossy.parent.mkdir()
        lossy.write_text(LOST_REPLY)
        lossy.chmod(0o755)
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            list(pool.map(chaos.submit, range(count)))
        wrong = judge(chaos)
    for what, how_many in sorted(chaos.done.items()):
        print(f"{how_many:5d}  {what}")
    for line in wrong:
        print(f"WRONG  {line}")
    took_min = (time.monotonic() - began) / 60
    print(f"{len(wrong)} wrong after {count} submits in {took_min:.1f} minutes (seed {seed})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

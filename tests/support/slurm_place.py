"""Runs on a rack as a person starts them: the command on the head, specs and runs on storage that all share."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clusterddp.run.directory import RunDir
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE
from tests.testbed.rack import Rack

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
"""A gang that reduces until rank 5 is told by a file to raise or to be killed."""


class Place:
    """A directory on a rack's shared storage from which runs are submitted."""

    def __init__(self, rack: Rack, name: str) -> None:
        self.rack = rack
        self.path = rack.dir / "shared" / name
        self.path.mkdir()

    def clusterddp(
        self, *arguments: str, check: bool = True, timeout_s: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command on the head."""
        return self.rack.run(
            "head",
            self.command(*arguments),
            cwd=self.path,
            check=check,
            timeout_s=timeout_s,
            env={"PYTHONPATH": str(ROOT)},
            **options,
        )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "clusterddp", *arguments]

    def submit(self, text: str, *arguments: str) -> RunDir:
        """Write a spec and submit it; return the run's directory."""
        (self.path / "job.yaml").write_text(text)
        submitted = json.loads(self.clusterddp("submit", "job.yaml", "-o", "json", *arguments).stdout)
        return RunDir(Path(submitted["run_dir"]))

    def status(self, run: RunDir) -> dict[str, Any]:
        return dict(json.loads(self.clusterddp("status", run.name, "-o", "json").stdout))

    def await_status(
        self, run: RunDir, wanted: Callable[[dict[str, Any]], bool], within_s: float = 120
    ) -> dict[str, Any]:
        """Ask until the status is as wanted; return it."""
        deadline = time.monotonic() + PATIENCE * within_s
        while not wanted(status := self.status(run)):
            assert time.monotonic() < deadline, status
            time.sleep(0.3)
        return status

    def jobs(self) -> list[str]:
        """List the ids and states of the jobs that Slurm has in its queue."""
        return self.rack.run("head", ["squeue", "-h", "-o", "%i %T"]).stdout.splitlines()

    def processes(self, run: RunDir, with_variable: str = "") -> list[str]:
        """List what is left of a run on any host that is on: every one of its processes names its token."""
        token = json.loads(run.record.read_text())["token"].encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = (process / "environ").read_bytes()
                if token in environ and with_variable.encode() in environ:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended, or is the kernel's
                continue
        return found


def write_cifar10(folder: Path, *, count: int = 64) -> None:
    """Write a small set in CIFAR-10's python layout: `count` random images in each of its six files."""
    directory = folder / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        random = np.random.default_rng(number)
        batch = {
            b"labels": random.integers(0, 10, count).tolist(),
            b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
        }
        (directory / name).write_bytes(pickle.dumps(batch, protocol=4))

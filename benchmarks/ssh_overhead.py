"""From `submit` to the first training step on two hosts over SSH: clusterddp against torchrun started by hand on both.

    python benchmarks/ssh_overhead.py [PAIRS [RANKS_PER_HOST]] [--phases]    (root: it starts a rack)

Both start the same script: it imports torch, joins a gloo group, wraps 18 convolutions in DDP, makes one
step, and rank 0 prints the time. The hosts share nothing. By hand: the script lies on both hosts already, two ssh start
`torchrun --nnodes 2 --node-rank N --master-addr ... --master-port ...`, with GLOO_SOCKET_IFNAME set, since
both hosts have a docker0 with the same address. clusterddp: `submit` in a directory with that script. The clock starts
before the command; it is the same for all hosts of a rack. Pairs are run in turns, the order within a pair alternates;
the figure is the median of the pairs' ratios.

`--phases` also prints what a submit spends its time on: every question to the hosts, and the marks of the ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.run.directory import RunDir
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/opt/bare/bin/python"
STEP = """\
import time
marks = {"script": time.time()}
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
marks["torch"] = time.time()
torch.set_num_threads(1)
dist.init_process_group("gloo")
marks["group"] = time.time()
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 256, 3, stride=4, padding=1)]
for _ in range(18):  # as many parameters as ResNet-18
    layers += [torch.nn.Conv2d(256, 256, 3, padding=1), torch.nn.BatchNorm2d(256), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10))
model = DistributedDataParallel(net)
loss = torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, dtype=torch.long))
loss.backward()
marks["step"] = time.time()
if dist.get_rank() == 0:
    import json
    print("marks", json.dumps(marks), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SPEC = """\
name: overhead
launcher: ssh
device: cpu
resources: {{procs_per_node: {ranks}}}
ssh: {{hosts: [node1, node2], python: {python}}}
entry: {{script: step.py}}
"""
BY_HAND = (
    "cd /root/byhand && GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {python} -m torch.distributed.run --nnodes 2 "
    "--nproc-per-node {ranks} --node-rank {node} --master-addr {address} --master-port {port} step.py"
)
TRACED = """
import json, sys, time
rows, begun = [], time.time()

def trace(owner, name, show=None):
    function = getattr(owner, name)
    def traced(*words, **facts):
        start = time.time()
        try:
            return function(*words, **facts)
        finally:
            rows.append((start, time.time() - start, show(*words) if show else name))
    setattr(owner, name, traced)

import clusterddp.cli.main
import clusterddp.cli.submit
import clusterddp.submission.submit as submit
from clusterddp.places.ssh import connections
from clusterddp.places.ssh import launcher as ssh
from clusterddp.places.ssh import sessions
from clusterddp.places.ssh import session
rows.append((begun, time.time() - begun, "import clusterddp"))
trace(submit, "make_run")
for name in ("open_host_sessions", "preflight", "upload_run", "lease_gpus", "settle_network", "_prepare"):
    trace(ssh, name)
trace(connections.Connector, "connect", lambda self, host, *rest: f"  connect {host}")
trace(session.Session, "start_agent", lambda self, *rest: f"  boot {self.host}")
trace(session.Session, "ask", lambda self, do, *rest: f"  {do} {self.host}")
trace(sessions.HostSessions, "close")
try:
    clusterddp.cli.main.main()
finally:
    print(json.dumps(sorted(rows)), file=sys.stderr)
"""


@dataclass(kw_only=True)
class Bench:
    """Two hosts, and two ways to start the script on them."""

    place: SshPlace
    ranks: int
    rows: list[list[float | str]] = field(default_factory=list)
    """Of the last submit, with `--phases`: start, seconds, what."""

    @property
    def rack(self) -> Rack:
        return self.place.rack

    def with_clusterddp(self, phases: bool = False) -> dict[str, float]:
        began = time.time()
        if phases:
            command = [sys.executable, "-c", TRACED, "submit", "job.yaml"]
            done = self.rack.run(HEAD, command, cwd=self.place.path, env={"PYTHONPATH": str(ROOT)})
            self.rows = json.loads(done.stderr.splitlines()[-1])
        else:
            self.place.clusterddp("submit", "job.yaml", environ={"PYTHONDONTWRITEBYTECODE": ""})
        left = time.time() - began
        run = self.place.run_dir()
        there = self.place.host_run_dir("node1", run)
        marks = self.await_marks(there.attempt(0).stdout(0), began)
        wait_until(lambda: self.place.all_processes() == [], 60)
        self.forget(run)
        return {"submit left": left, **marks}

    def by_hand(self) -> dict[str, float]:
        began = time.time()
        port = 20_000 + int(began) % 10_000
        words = {"python": PYTHON, "ranks": self.ranks, "address": self.rack.plan.address("node1"), "port": port}
        log = self.place.path / "byhand.out"
        with log.open("w") as out, log.with_suffix(".err").open("w") as err:
            shells = [
                subprocess.Popen(
                    self.rack.argv(HEAD, ["ssh", f"node{node + 1}", BY_HAND.format(node=node, **words)]),
                    stdout=out,
                    stderr=err,
                )
                for node in range(2)
            ]
            marks = self.await_marks(log, began)
            assert [shell.wait() for shell in shells] == [0, 0]
        return marks

    def await_marks(self, log: Path, began: float) -> dict[str, float]:
        def line() -> str | None:
            lines = log.read_text().splitlines() if log.exists() else []
            return next((each for each in lines if each.startswith("marks ") and each.endswith("}")), None)

        wait_until(lambda: line() is not None, 120)
        marks = json.loads(str(line()).removeprefix("marks "))
        return {name: when - began for name, when in marks.items()}

    def forget(self, run: RunDir) -> None:
        """Keep the directories of runs from growing: a run that has ended plays no part in the next one."""
        for node in self.rack.plan.nodes:
            shutil.rmtree(self.place.host_run_dir(node, run).path, ignore_errors=True)
        shutil.rmtree(run.path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=int, nargs="?", default=5)
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    parser.add_argument("--phases", action="store_true")
    arguments = parser.parse_args()
    ratios, ours, theirs = [], [], []
    with two_hosts(arguments.ranks) as bench:
        bench.by_hand()  # once for the page cache
        bench.with_clusterddp()  # and once for what stays on hosts: the package, the code
        for number in range(arguments.pairs):
            if number % 2:
                ours.append(bench.with_clusterddp())
                theirs.append(bench.by_hand())
            else:
                theirs.append(bench.by_hand())
                ours.append(bench.with_clusterddp())
            ratios.append(ours[-1]["step"] / theirs[-1]["step"])
            print(f"clusterddp {spell(ours[-1])}   by hand {spell(theirs[-1])}   {ratios[-1]:.3f}", flush=True)
        if arguments.phases:
            for start, took_s, what in phases_of(bench):
                print(f"{start:7.3f} s  {took_s:7.3f} s  {what}")
    for name, rows in (("clusterddp", ours), ("by hand", theirs)):
        medians = {mark: statistics.median(row[mark] for row in rows) for mark in rows[0]}
        print(f"median {name:10} {spell(medians)}")
    print(
        f"2 x {arguments.ranks} ranks, {arguments.pairs} pairs: median ratio {statistics.median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}"
    )


def spell(marks: dict[str, float]) -> str:
    return "  ".join(f"{mark} {when_s:.2f}" for mark, when_s in marks.items())


def phases_of(bench: Bench) -> Iterator[tuple[float, float, str]]:
    print(spell(bench.with_clusterddp(phases=True)))
    first = float(bench.rows[0][0])
    for start, took_s, what in bench.rows:
        yield float(start) - first, float(took_s), str(what)


@contextmanager
def two_hosts(ranks: int) -> Iterator[Bench]:
    plan = RackPlan(nodes=["node1", "node2"], private_hosts=True, slurm=False)
    with running_rack(plan) as rack, ssh_place_on(rack) as place:
        (place.path / "job.yaml").write_text(SPEC.format(python=PYTHON, ranks=ranks))
        there = [rack.outside(node, "/root/byhand") for node in plan.nodes]
        for directory in (place.path, *there):
            directory.mkdir(exist_ok=True)
            (directory / "step.py").write_text(STEP)
        yield Bench(place=place, ranks=ranks)


if __name__ == "__main__":
    main()

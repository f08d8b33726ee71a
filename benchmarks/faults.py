"""The effective training time ratio of a run that meets a fault a minute, over SSH and on Slurm, and under torchrun.

    python benchmarks/faults.py WAY --data-dir DIR [--seed 1] [--minutes 30] [--epochs 60]    (root: it starts a rack)

WAY is ssh, slurm or torchrun: two nodes of two ranks each and a third host as a spare train fastnet at an eighth of its
width on CIFAR-10 (DIR has cifar-10-batches-py). Faults, drawn by the seed: SIGKILL of a rank, of a supervisor (of
torchrun: the agent), a host's power for 30 s, its cable for 30 s, on Slurm its slurmd for 30 s; of node 0's host with
--with-node-0. --minutes 0 has none: the undisturbed run. `clusterddp wait` stays open, over which a host that was
switched on again comes back. 20 s after a run has ended it is resumed, as a person does; an agent of torchrun is
started again, or all where no step was taken for two minutes. torchrun's script saves a checkpoint as often as the
trainer (every 3 s), but on storage that its hosts share. One line of JSON for each fault, then a summary:
`ratio_of_rows` is the share of the time between rows of metrics that counts, `effective` what `status` says.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.paths import ROOT
from tests.support.ssh_place import SshPlace
from tests.support.ssh_traces import command_of
from tests.testbed.plan import BARE, RackPlan
from tests.testbed.rack import Rack, running_rack

NODES, FOLDER = ("node1", "node2", "node3"), "cifar-10-batches-py"
SPEC = """\
name: faults
launcher: {launcher}
device: cpu
resources: {{nodes: 2, procs_per_node: 2, cpus_per_task: 1{resources}}}
restarts: 100
elastic: {{spares: 1}}
network: {{host_silence: "0:03", heartbeat_timeout: "0:10"}}
{place}
train:
  {{dataset: cifar10, data_dir: {data}, model: fastnet, epochs: {epochs}, batch_size: 125, width: 0.125, lr: 0.1,
   augment: none, precision: fp32, kernels: native, checkpoint_minutes: 0.05, eval_every: {epochs}, log_every: 5}}
"""
ON_SSH = {"place": "ssh: {hosts: [node1, node2, node3], fetch: none}\npython: /opt/bare/bin/python", "resources": ""}
ON_SLURM = {"place": "snapshot: false", "resources": ', memory_gb: 4, time: "4:00:00"'}
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from clusterddp.train.data.cifar10 import read_cifar10
from clusterddp.train.data.dataset import epoch_order
from clusterddp.train.models.fastnet import FastNet
def scaled(images):
    return (images.float() / 255 - 0.47) / 0.25
dist.init_process_group("gloo")
rank, size, checkpoint = dist.get_rank(), 125 * dist.get_world_size(), Path("checkpoint.pt")
(images, labels), test, _ = read_cifar10(Path(), download=False)
torch.manual_seed(0)
net = FastNet(width=0.125)
net.whiten_patches(scaled(images[:1000]))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
per_epoch = len(images) // size
total, step, saved_at, attempt = int(sys.argv[1]) * per_epoch, 0, time.time(), str(time.time())
if checkpoint.exists():
    saved = torch.load(checkpoint)
    step = saved["step"]
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
while step < total:
    epoch, place = divmod(step, per_epoch)
    mine = epoch_order(len(images), 0, epoch)[place * size + rank * 125 :][:125]
    optimizer.param_groups[0]["lr"] = 0.1 * size / 128 * min(step / total / 0.2, (1 - step / total) / 0.8)
    optimizer.zero_grad()
    cross_entropy(model(scaled(images[mine])), labels[mine], label_smoothing=0.1).backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 5 == 0:
        with open("rows.jsonl", "a") as rows:
            rows.write(json.dumps({"time": time.time(), "attempt": attempt, "step": step}) + "\\n")
    if rank == 0 and (time.time() > saved_at + 3 or step == total):
        torch.save({"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, "new.pt")
        os.replace("new.pt", checkpoint)
        saved_at = time.time()
if rank == 0:
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(scaled(some)).argmax(1) for some in test[0].split(500)])
    Path("result.json").write_text(json.dumps({"accuracy": (found == test[1]).float().mean().item()}))
dist.barrier()
"""
"""Plain, for torchrun, in a directory that the hosts share; the order of the images and the net are the trainer's."""
QUIET_S = 12.0
"""After so long without a row of metrics it is asked what has become of the run."""
OUT_S, PERSON_S, STUCK_S = 30.0, 20.0, 120.0
KINDS = ("rank", "supervisor", "power", "cable")
SLURMD = "[ ! -w $0 ] || echo $$ >$0; exec env --default-signal=INT,QUIT unshare --cgroup slurmd"


class Fault(NamedTuple):
    """What is hit, how long after the first step, and which node, 0 to 1: the first to the last that takes part."""

    at_s: float
    kind: str
    which: float


class Row(NamedTuple):
    """A row of metrics."""

    time: float
    attempt: str
    step: int


def draw_faults(seed: int, minutes: int, kinds: tuple[str, ...]) -> list[Fault]:
    """Draw a fault for each minute; every kind comes about equally often."""
    chance = random.Random(seed)
    deck: list[str] = []
    while len(deck) < minutes:
        deck += chance.sample(kinds, len(kinds))
    times = [60 * number + chance.uniform(20, 40) for number in range(minutes)]
    return [Fault(at_s, kind, chance.random()) for at_s, kind in zip(times, deck, strict=False)]


class Ours:
    """The run under clusterddp."""

    def __init__(self, rack: Rack, launcher: str, data: Path, epochs: int) -> None:
        self.rack, self._launcher = rack, launcher
        path = rack.dir / ("shared" if launcher == "slurm" else "home/root") / "faults"
        path.mkdir()
        self._place = SshPlace(rack=rack, path=path)
        more = ON_SLURM if launcher == "slurm" else ON_SSH
        self._run = self._place.submit(SPEC.format(launcher=launcher, **more, data=data, epochs=epochs))
        self._waits = self._place.start("wait", self._run.name)

    def _views(self) -> list[RunDir]:
        """Return the run as each host has it."""
        if self._launcher == "slurm":
            return [self._run]
        return [self._place.host_run_dir(node, self._run) for node in NODES]

    def rows(self) -> list[Row]:
        rows = [row for run in self._views() for row in read_jsonl(run.metrics) if row.get("kind") == "train"]
        return sorted({Row(row["time"], str(row["attempt"]), row["step"]) for row in rows})

    def hosts(self) -> list[str]:
        """Return the hosts of the newest attempt that has started, that of node 0 first."""
        return [str(node["host"]) for node in self._start()["nodes"]]

    def _start(self) -> dict[str, Any]:
        attempts = [attempt for run in self._views() for attempt in run.attempts()]
        return max(filter(None, (read_json(each.start) for each in attempts)), key=lambda start: start["started"])

    def kill(self, host: str, kind: str) -> None:
        """Kill the first rank of the run on a host, or its supervisor; nothing where no process of the run is."""
        start, found = self._start(), self._place.processes(host, self._place.record(self._run).token)
        rank = next(node["ranks"][0] for node in start["nodes"] if node["host"] == host)
        records = [read_json(run.attempt(start["attempt"]).rank_record(rank)) for run in self._views()]
        if kind == "rank" and found:
            inside = [str(record["pid"]) for record in records if record and record["ended"] is None]
            self.rack.run(host, ["kill", "-KILL", *inside], check=False)
        for each in found if kind == "supervisor" else ():
            if each.role.startswith("s"):
                os.kill(each.pid, signal.SIGKILL)

    def state(self, quiet_s: float) -> str:
        if quiet_s < QUIET_S:
            return "RUNNING"
        done = self._place.clusterddp("status", self._run.name, "-o", "json", check=False)
        return str(json.loads(done.stdout)["state"]) if done.stdout else "UNKNOWN"

    def mend(self) -> bool:
        """Resume the run as a person does; False: it could not be."""
        reason = self._place.status(self._run)["reason"]
        done = self._place.clusterddp("resume", self._run.name, check=False)
        print(json.dumps({"ended": reason, "resume": done.returncode, "said": done.stderr[-400:]}), flush=True)
        if self._waits.poll() is not None:
            self._waits = self._place.start("wait", self._run.name)
        return done.returncode == 0

    def figures(self) -> dict[str, Any]:
        self._waits.kill()
        status = self._place.status(self._run)
        summary = next(filter(None, (read_json(run.summary) for run in self._views())), {})
        found = {name: summary.get(name) for name in ("accuracy", "params_sha256")}
        return found | {name: status[name] for name in ("attempt", "effective")}


class Torchrun:
    """The same net in a plain script under torchrun, with an agent on each host."""

    def __init__(self, rack: Rack, data: Path, epochs: int) -> None:
        self.rack, self._epochs = rack, str(epochs)
        self._data, self._shared = data, rack.outside(NODES[0], data)
        (self._shared / "train.py").write_text(SCRIPT)
        shutil.copytree(ROOT / "clusterddp", self._shared / "clusterddp")
        self._agents = {host: self._agent(host) for host in NODES}

    def _agent(self, host: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host."""
        options = ["--nnodes=2:2", "--nproc-per-node=2", "--max-restarts=1000", "--rdzv-backend=c10d", "--rdzv-id=1"]
        options += ["--rdzv-endpoint=10.77.0.11:29500", f"--rdzv-conf=is_host={int(host == NODES[0])}"]
        options += [f"--local-addr={self.rack.plan.address(host)}"]
        command = [str(BARE / "bin/python"), "-m", "torch.distributed.run", *options, "train.py", self._epochs]
        argv = self.rack.argv(host, command, cwd=self._data, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"})
        with (self.rack.dir / "log" / f"{host}.torchrun").open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def rows(self) -> list[Row]:
        return [Row(**row) for row in read_jsonl(self._shared / "rows.jsonl")]

    def hosts(self) -> list[str]:
        """Return the hosts that have ranks; the first one has the store of all."""
        return [host for host in NODES if host in self.rack.powered and self._pids(host, "rank")]

    def _pids(self, host: str, kind: str) -> list[int]:
        named = {pid: command_of(pid) for pid in self.rack.pids(host) if b"train.py" in command_of(pid)}
        return [pid for pid, command in named.items() if (b"distributed.run" in command) == (kind == "supervisor")]

    def kill(self, host: str, kind: str) -> None:
        for pid in self._pids(host, kind)[:1]:
            os.kill(pid, signal.SIGKILL)

    def state(self, quiet_s: float) -> str:
        if (self._shared / "result.json").exists():
            return "COMPLETED"
        return "LOST" if self._ended() or quiet_s > STUCK_S else "RUNNING"

    def _ended(self) -> list[str]:
        return [host for host in self._agents if host in self.rack.powered and self._agents[host].poll() is not None]

    def mend(self) -> bool:
        """Start agents as a person does: those that have ended, or all where no step is taken."""
        if not self._ended():
            for host in self.rack.powered.keys() & set(NODES):
                self.kill(host, "supervisor")
            time.sleep(1.0)
        ended = self._ended()
        self._agents |= {host: self._agent(host) for host in ended}
        print(json.dumps({"started": ended}), flush=True)
        return bool(ended)

    def figures(self) -> dict[str, Any]:
        return read_json(self._shared / "result.json") or {}


def strike(way: Ours | Torchrun, fault: Fault, *, with_node_0: bool) -> tuple[str, Callable[[], object]]:
    """Cause a fault; return the host, and what puts it right."""
    hosts, rack = way.hosts()[0 if with_node_0 else 1 :] or [NODES[1]], way.rack
    host = hosts[int(fault.which * len(hosts))]
    if host not in rack.powered:
        return f"{host} is off", lambda: None
    if fault.kind == "power":
        rack.power_off(host)
    elif fault.kind == "cable":
        rack.pull_cable(host)
    elif fault.kind == "slurmd":
        os.kill(next(pid for pid in rack.pids(host) if command_of(pid).startswith(b"slurmd")), signal.SIGKILL)
    else:
        way.kill(host, fault.kind)
    slurmd = ["sh", "-c", SLURMD, "/sys/fs/cgroup/freezer/cgroup.procs"]
    put_right = {"power": rack.power_on, "cable": rack.plug_cable, "slurmd": lambda host: rack.run(host, slurmd)}
    return host, functools.partial(put_right.get(fault.kind, str), host)


def play(way: Ours | Torchrun, faults: list[Fault], *, with_node_0: bool, limit_s: float) -> dict[str, Any]:
    """Play a run with its faults to the end; return its figures."""
    while not way.rows():
        time.sleep(0.5)
    began = time.time()
    due, struck, persons = collections.deque(faults), list[tuple[float, str]](), 0
    mending: list[tuple[float, Callable[[], object]]] = []
    state, ask_at, person_at = "RUNNING", began, float("inf")
    while state != "COMPLETED" and (now := time.time()) < began + limit_s:
        for mend in [each for each in mending if each[0] <= now]:
            mending.remove(mend)
            mend[1]()
        if due and now >= began + due[0].at_s:
            fault = due.popleft()
            struck.append((time.time(), fault.kind))
            host, put_right = strike(way, fault, with_node_0=with_node_0)
            mending.append((time.time() + OUT_S, put_right))
            print(json.dumps({"s": round(now - began), "fault": fault.kind, "host": host}), flush=True)
        if now >= ask_at:
            state, ask_at = way.state(now - way.rows()[-1].time), time.time() + 5
            ended = state in ("FAILED", "LOST", "CANCELLED")
            person_at = min(person_at, now + PERSON_S) if ended else float("inf")
        if now >= person_at:
            persons, person_at = persons + way.mend(), float("inf")
        time.sleep(0.5)
    rows = way.rows()
    minutes = round((rows[-1].time - rows[0].time) / 60, 1)
    figures = {"state": state, "persons": persons, "minutes": minutes, "ratio_of_rows": ratio(rows)}
    return figures | {"next_step_s": next_steps(rows, struck)} | way.figures()


def ratio(rows: list[Row]) -> float:
    """Return the share of the time that went into steps that count; between two rows, evaluations included."""
    reached, counts = -1, 0.0
    for before, row in itertools.pairwise(rows):
        reached = max(reached, before.step)
        if row.attempt == before.attempt and row.step > reached:
            counts += (row.time - before.time) * min(1.0, (row.step - reached) / (row.step - before.step))
    return round(counts / (rows[-1].time - rows[0].time), 3)


def next_steps(rows: list[Row], struck: list[tuple[float, str]]) -> dict[str, Any]:
    """Return the seconds from a fault to the next row with steps that count, by kind: n, median, the most."""
    found = collections.defaultdict(list)
    for moment, kind in struck:
        reached = max((row.step for row in rows if row.time <= moment), default=-1)
        later = [row.time for row in rows if row.time > moment and row.step > reached]
        for name in (kind, "all"):
            found[name].append(round(later[0] - moment, 1) if later else float("inf"))
    return {kind: [len(some), round(statistics.median(some), 1), max(some)] for kind, some in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("ssh", "slurm", "torchrun"))
    parser.add_argument("--data-dir", type=Path, required=True)
    for name, default in {"seed": 1, "minutes": 30, "epochs": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--with-node-0", action="store_true")
    given = parser.parse_args()
    slurm = given.way == "slurm"
    plan = RackPlan(nodes=NODES, private_hosts=True, slurm=False, shares={"/data": NODES})
    with running_rack(RackPlan(nodes=NODES, slurmd_timeout_s=5) if slurm else plan) as rack:
        data = given.data_dir.resolve() if slurm else Path("/data")
        if not slurm:
            shutil.copytree(given.data_dir / FOLDER, rack.outside(NODES[0], data) / FOLDER)
        torchrun = given.way == "torchrun"
        way = Torchrun(rack, data, given.epochs) if torchrun else Ours(rack, given.way, data, given.epochs)
        faults = draw_faults(given.seed, given.minutes, (*KINDS, "slurmd") if slurm else KINDS)
        figures = play(way, faults, with_node_0=given.with_node_0, limit_s=60 * (given.minutes or 30) + 600)
    print(json.dumps({"way": given.way, "seed": given.seed, "epochs": given.epochs} | figures))
    return 0 if figures["state"] == "COMPLETED" else 1


if __name__ == "__main__":
    sys.exit(main())

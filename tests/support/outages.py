"""Outages that a run has to survive, drawn with a seed: cables that are out for a while, processes that are stopped.

`benchmarks/outages.py` plays many, `test_outages.py` a few. A run trains on two hosts; right is that it completes in
its first attempt with the parameters of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.slurm_runs import make_slurm_run, start_run
from tests.support.ssh_kill_kinds import LAN, NODES
from tests.support.ssh_place import ssh_place_on
from tests.support.ssh_traces import command_of
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

CUT, STOP, SUSPEND = "cable out", "supervisor stopped", "job suspended"
KINDS = [
    *((CUT, node, seconds) for seconds in (5, 9, 15, 25) for node in (0, 1)),
    *((STOP, node, 20) for node in (0, 1)),
    (SUSPEND, 0, 90),
]
SPEC = """\
name: outage
launcher: {launcher}
device: cpu
resources: {{nodes: 2, procs_per_node: 1, cpus_per_task: 1}}
{more}
train:
  {{model: fastnet, width: 0.125, precision: fp32, kernels: native, samples: 320, batch_size: 16,
   epochs: 10, lr: 0.2, log_every: 5}}
"""
SSH = "ssh: {hosts: [node1, node2]}\npython: /opt/bare/bin/python"
ENDS_WITHIN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Outage:
    """One outage: what happens to which node's host, for how long, how many steps after the start."""

    kind: str
    node: int
    seconds: float
    step: int

    @property
    def host(self) -> str:
        return NODES[self.node]


def draw_outages(seed: int, count: int, kinds: tuple[str, ...] = ()) -> list[Outage]:
    """Draw outages: every kind comes about equally often, in random order."""
    chance = random.Random(seed)
    wanted = [kind for kind in KINDS if not kinds or kind[0] in kinds]
    deck: list[tuple[str, int, int]] = []
    while len(deck) < count:
        deck += chance.sample(wanted, len(wanted))
    return [
        Outage(kind=kind, node=node, seconds=seconds, step=chance.randrange(5, 60))
        for kind, node, seconds in deck[:count]
    ]


class Theatre:
    """The racks that runs are played on, and the parameters of undisturbed runs, by launcher."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._racks: dict[str, Rack] = {}
        self._undisturbed: dict[str, str] = {}
        self._runs = 0

    def __enter__(self) -> Theatre:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def undisturbed(self, launcher: str) -> str:
        """Return the parameters that a run without an outage ends with."""
        if launcher not in self._undisturbed:
            with self._start(launcher) as (_, run, _job):
                self._undisturbed[launcher] = _end_of(run)["params_sha256"]
        return self._undisturbed[launcher]

    def play(self, outage: Outage) -> dict[str, Any]:
        """Play one outage; return its line."""
        launcher = "slurm" if outage.kind == SUSPEND else "ssh"
        expected = self.undisturbed(launcher)
        with self._start(launcher) as (rack, run, job):
            wait_until(lambda: any(row["step"] >= outage.step for row in read_jsonl(run.metrics)), 120)
            began = time.monotonic()
            with _STRIKES[outage.kind](rack, run, outage, job):
                time.sleep(outage.seconds)
            ended = read_end(run.attempt(0))
            over = time.monotonic() - began
            end = _end_of(run)
            line = {
                "right": end["outcome"] == "COMPLETED" and end["attempts"] == 1 and end["params_sha256"] == expected,
                "kind": outage.kind,
                "host": outage.host,
                "seconds": outage.seconds,
                "step": outage.step,
                "out_s": round(over, 1),
                "ended_in_it": ended is not None,
                **end,
            }
            if not line["right"]:
                line["logs"] = _logs(rack, run, launcher)
            return line

    @contextlib.contextmanager
    def _start(self, launcher: str) -> Iterator[tuple[Rack, RunDir, str]]:
        """Start a run and yield the rack, the run as its first host has it, and on Slurm its job."""
        rack = self._rack(launcher)
        self._runs += 1
        if launcher == "slurm":
            run = make_slurm_run(rack, f"outage-{self._runs}", text=SPEC.format(launcher=launcher, more=""))
            yield rack, run, start_run(rack, run)
            return
        with ssh_place_on(rack) as place:
            run = place.submit(SPEC.format(launcher=launcher, more=SSH))
            yield rack, place.host_run_dir(NODES[0], run), ""

    def _rack(self, launcher: str) -> Rack:
        if launcher not in self._racks:
            plan = LAN if launcher == "ssh" else RackPlan(nodes=NODES)
            self._racks[launcher] = self._stack.enter_context(running_rack(plan))
        return self._racks[launcher]


def _end_of(run: RunDir) -> dict[str, Any]:
    wait_until(lambda: read_end(run.attempts()[-1]) is not None, ENDS_WITHIN_S)
    end = read_end(run.attempts()[-1])
    assert end is not None
    summary = read_json(run.summary) or {}
    cause = end.root_cause.error if end.root_cause else None
    facts = {"outcome": end.outcome, "cause": cause, "attempts": len(run.attempts())}
    return facts | {"params_sha256": str(summary.get("params_sha256"))}


def _logs(rack: Rack, run: RunDir, launcher: str) -> str:
    runs = [run]
    if launcher == "ssh":
        runs.append(RunDir(rack.outside(NODES[1], run.path.relative_to(rack.outside(NODES[0], "/")))))
    paths = [path for each in runs for path in sorted(each.path.glob("launcher/*.log"))]
    paths += [path for each in runs for path in sorted(each.path.glob("attempts/*/logs/*.err"))]
    return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


@contextlib.contextmanager
def _cut(rack: Rack, run: RunDir, outage: Outage, job: str) -> Iterator[None]:
    rack.pull_cable(outage.host)
    try:
        yield
    finally:
        rack.plug_cable(outage.host)


@contextlib.contextmanager
def _stop(rack: Rack, run: RunDir, outage: Outage, job: str) -> Iterator[None]:
    pids = [pid for pid in rack.pids(outage.host) if _is_supervisor(pid)]
    assert len(pids) == 1, pids
    os.kill(pids[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pids[0], signal.SIGCONT)


@contextlib.contextmanager
def _suspend(rack: Rack, run: RunDir, outage: Outage, job: str) -> Iterator[None]:
    rack.run(HEAD, ["scontrol", "suspend", job])
    try:
        yield
    finally:
        rack.run(HEAD, ["scontrol", "resume", job])


def _is_supervisor(pid: int) -> bool:
    return b"supervisor\0" in command_of(pid)


_STRIKES: dict[str, Callable[[Rack, RunDir, Outage, str], contextlib.AbstractContextManager[None]]] = {
    CUT: _cut,
    STOP: _stop,
    SUSPEND: _suspend,
}

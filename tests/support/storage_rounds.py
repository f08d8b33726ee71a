"""Faults of the storage of a run on a rack, and whether each was borne as it should be; seen from outside.

`benchmarks/storage_faults.py` makes many rounds, `test_storage_rack.py` a few.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.run.directory import RunDir
from tests.support.gang_runs import processes_with
from tests.support.launch_runs import read_plan
from tests.support.slurm_runs import environment, make_slurm_run, start_run
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.support.storage_faults import Disk, away, shared_disk
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack, RackError

NODES = ("node1", "node2")
RANKS = """\
import os, time
print("up", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
if os.path.exists({fail!r}) and os.environ["RANK"] == "1":
    os._exit(3)
"""
CAUSE = re.compile(r"rank 1 on node\d exited with code 3")  # Slurm takes any node that is free
SSH_SPEC = """\
name: job
launcher: ssh
device: cpu
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
resources: {procs_per_node: 1}
entry: {script: entry.py}
"""
SSH_RUNS = Path("/root/.clusterddp/runs")
WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    launcher: Literal["slurm", "ssh"]
    what: Literal["away", "full", "read-only"]
    seconds: float = 0.0
    """How long storage is away; what is full or read-only stays so."""
    host: str = "node1"
    """Over SSH: whose disk it is. On Slurm all hosts share one."""
    ends: bool = False
    """With `away`: the ranks end meanwhile; otherwise afterwards."""
    delay_s: float = 0.0
    """After all ranks are up."""


def draw_faults(seed: int, count: int) -> Iterator[Fault]:
    """Draw faults: in turn the launcher, and what happens; by chance where, when, and whether the ranks end then."""
    chance = random.Random(seed)
    kinds = [("away", 2.0), ("away", 10.0), ("away", 25.0), ("full", 0.0), ("read-only", 0.0)]
    for number in range(count):
        what, seconds = kinds[number // 2 % len(kinds)]
        yield Fault(
            launcher="ssh" if number % 2 else "slurm",
            what=what,  # type: ignore[arg-type]
            seconds=seconds,
            host=chance.choice(NODES),
            ends=what == "away" and chance.random() < 0.5,
            delay_s=round(chance.uniform(0.0, 3.0), 2),
        )


def play_round(rack: Rack, fault: Fault) -> tuple[dict[str, Any], str]:
    """Play one round; return its line, and the logs when it was borne otherwise than it should be."""
    with (
        tempfile.TemporaryDirectory(dir=rack.dir / "shared", prefix="storage-") as place,
        contextlib.ExitStack() as stack,
    ):
        kind = _OnSlurm if fault.launcher == "slurm" else _OverSsh
        round_ = kind(rack, fault, Path(place), stack)
        began = time.monotonic()
        wrong: list[str] = []
        try:
            round_.play()
        except (AssertionError, RackError, OSError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
        line = {"right": not wrong, **asdict(fault), "took_s": round(time.monotonic() - began, 1), **round_.facts}
        return line | ({"wrong": wrong} if wrong else {}), round_.logs() if wrong else ""


class _Round:
    """A run, its fault, and what has to come of it."""

    def __init__(self, rack: Rack, fault: Fault, place: Path, stack: contextlib.ExitStack) -> None:
        self.rack = rack
        self.fault = fault
        self.place = place
        self.stack = stack
        self.facts: dict[str, Any] = {}
        self.run: RunDir
        """As this machine sees it; over SSH the copy on the laptop."""
        self.disk: Disk | None = None

    def play(self) -> None:
        """Start the run, break its storage, look."""
        self.start()
        files = self.files()
        wait_until(lambda: files[0].attempt(0).start.exists() and self.is_up(files), WITHIN_S, what="not up")
        token = str(read_plan(self.run)["token"])
        before = self.ranks(token)
        assert len(before) == len(NODES), f"its ranks are {before}"
        time.sleep(self.fault.delay_s)
        if self.fault.what == "away":
            self._take_away()
            if not self.fault.ends:
                self.await_state("RUNNING")
                assert self.ranks(token) == before, "its ranks are not those of before"
                self.go(fail=False)
            self.await_state("COMPLETED")
        else:
            assert self.disk is not None
            self.disk.fill() if self.fault.what == "full" else self.disk.make_read_only()
            self.go(fail=True)
            status = self.await_state("FAILED")
            cause = status["root_cause"] or {}
            assert CAUSE.fullmatch(cause.get("error", "")), f"the cause is {cause or status['reason']}"
        wait_until(lambda: not processes_with(token), WITHIN_S, what="some of it is left")

    def _take_away(self) -> None:
        with away(self.storage()) as elsewhere:
            if self.fault.ends:
                self.go(fail=False)
            time.sleep(self.fault.seconds)
            assert not self.storage().exists(), "its directory was made anew"
        assert not elsewhere.exists()

    def is_up(self, files: list[RunDir]) -> bool:
        return all(files[rank].attempt(0).stdout(rank).read_text() for rank in (0, 1))

    def ranks(self, token: str) -> set[int]:
        return {pid for pid, command in processes_with(f"{token}.n") if "node.rank" in command}

    def await_state(self, state: str) -> dict[str, Any]:
        status: dict[str, Any] = {}

        def ask() -> bool:
            status.clear()
            status.update(self.status())
            return status["state"] == state or status["state"] in {"FAILED", "LOST", "COMPLETED", "CANCELLED"}

        wait_until(ask, WITHIN_S, what=f"it is not {state}", interval_s=1.0)  # each question starts a Python
        self.facts |= {"state": status["state"], "reason": status["reason"]}
        assert status["state"] == state, f"it is {status['state']}: {status['reason']} {status.get('root_cause')}"
        return status

    def logs(self) -> str:
        texts = []
        for run in self.files():
            for pattern in ("launcher/*.log", "events.jsonl", "attempts/*/*.json", "attempts/*/logs/*"):
                texts += [f"== {path}\n{path.read_text(errors='replace')[-4000:]}" for path in run.path.glob(pattern)]
        return "\n".join(texts)

    def start(self) -> None:
        raise NotImplementedError

    def files(self) -> list[RunDir]:
        """Return the directory of the run that each rank's host sees, as paths of this machine."""
        raise NotImplementedError

    def storage(self) -> Path:
        """Name the directory that goes away."""
        raise NotImplementedError

    def go(self, *, fail: bool) -> None:
        """Let the ranks end."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        raise NotImplementedError


class _OnSlurm(_Round):
    def start(self) -> None:
        if self.fault.what != "away":
            disk = self.stack.enter_context(shared_disk(self.rack, self.place / "disk"))
            self.disk = disk
        home = self.rack.dir / "home"
        self._go, self._fail = (home / f"{self.place.name}.{what}" for what in ("go", "fail"))
        name = f"{self.place.name}/disk"
        self.run = make_slurm_run(self.rack, name, RANKS.format(go=str(self._go), fail=str(self._fail)))
        start_run(self.rack, self.run)

    def files(self) -> list[RunDir]:
        return [self.run, self.run]

    def storage(self) -> Path:
        return self.run.path.parent

    def go(self, *, fail: bool) -> None:
        if fail:
            self._fail.touch()
        self._go.touch()

    def status(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "clusterddp", "status", str(self.run.path), "-o", "json"]
        done = self.rack.run(HEAD, argv, env=environment(), check=False)
        return dict(json.loads(done.stdout)) if done.stdout else {"state": None, "reason": done.stderr}


class _OverSsh(_Round):
    def start(self) -> None:
        self.ssh: SshPlace = self.stack.enter_context(ssh_place_on(self.rack))
        go, fail = (f"/tmp/{self.place.name}.{what}" for what in ("go", "fail"))
        (self.ssh.path / "entry.py").write_text(RANKS.format(go=go, fail=fail))
        if self.fault.what != "away":
            on = shared_disk(self.rack, self.place / "disk", at=SSH_RUNS, hosts=[self.fault.host])
            self.disk = self.stack.enter_context(on)
        self.run = self.ssh.submit(SSH_SPEC)

    def files(self) -> list[RunDir]:
        there = [self.ssh.host_run_dir(node, self.run) for node in NODES]
        if self.disk is not None:
            there[NODES.index(self.fault.host)] = RunDir(self.disk.path / there[0].path.name)
        return there

    def storage(self) -> Path:
        return self.rack.outside(self.fault.host, SSH_RUNS)

    def go(self, *, fail: bool) -> None:
        for what in (["fail"] if fail else []) + ["go"]:
            for node in NODES:
                self.rack.run(node, ["touch", f"/tmp/{self.place.name}.{what}"])

    def status(self) -> dict[str, Any]:
        return self.ssh.status(self.run)

"""Hangs on purpose, and work that only looks like one: what a rank does in the 30th step, and what is reported."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from tests.support.person import Person

HANGS = ("sleeps", "stops", "spins", "skips", "loads", "locks")
NO_HANGS = ("evaluates", "saves", "compiles")
START_KIND = "wrong_size"
"""Every rank waits in its own init_process_group; no rank is the culprit."""
SLOW_KIND = "drags"
"""Each step of one rank takes longer: no hang, and the rank is reported as a straggler."""
AFTER_S = 60.0
"""When a hang is due without `hang_after`."""
SCRIPT = """\
import os, signal, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
kind, culprit = sys.argv[1], int(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ones = torch.ones(1000)
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(3600)
def step():
    dist.all_reduce(ones)
def sleeps():
    time.sleep(3600)
def stops():
    os.kill(os.getpid(), signal.SIGSTOP)
def spins():
    sum(iter(int, 1))  # C code that keeps the GIL
def skips():
    while True:
        time.sleep(0.1)  # as an evaluation that the other ranks do not enter
def loads():
    next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
def locks():
    first, second = threading.Lock(), threading.Lock()
    def other():
        with second:
            time.sleep(0.5)
            first.acquire()
    with first:
        threading.Thread(target=other, daemon=True).start()
        time.sleep(0.2)
        second.acquire()
def drags():
    global pause
    pause = 0.1
def evaluates():
    until = time.monotonic() + 90
    while time.monotonic() < until:
        torch.randn(200, 200) @ torch.randn(200, 200)
def saves():
    with open(f"checkpoint-{os.environ['CLUSTERDDP_RUN']}.pt", "wb") as file:
        for _ in range(120):
            file.write(bytes(1 << 20))
            file.flush()
            time.sleep(1)
def compiles():
    if not began:
        evaluates()
began = kind != "compiles"
pause = 0
dist.init_process_group("gloo", rank=rank, world_size=size + (kind == "wrong_size"))
for number in range(100000):
    if rank == culprit and number == (30 if began else 0):
        with open(f"began-{os.environ['CLUSTERDDP_RUN']}", "w") as file:
            file.write(str(time.time()))
        globals()[kind]()
    step()
    time.sleep((0.02 if number < 60 else 0.2) + pause)
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a run's history has of a hang, or of a straggler."""

    after_s: float
    """Seconds from the moment in which the culprit began; over SSH from the last sign of progress."""
    ranks: tuple[int, ...]
    text: str


def spec_of(kind: str, culprit: int, *, head: str, hang_after: str = "") -> str:
    """Return the spec of a run in which a rank hangs; `head`: the lines that say where it runs."""
    after = f'hang_after: "{hang_after}"\n' if hang_after else ""
    entry = f"entry: {{script: hang.py, args: [{kind}, {culprit}]}}"
    return f"name: {kind.replace('_', '-')}\ndevice: cpu\n{head}\n{after}{entry}\n"


def submit_hang(person: Person, kind: str, culprit: int, *, head: str, hang_after: str = "") -> RunDir:
    """Submit a run in which a rank hangs."""
    (person.path / "hang.py").write_text(SCRIPT)
    return person.submit(spec_of(kind, culprit, head=head, hang_after=hang_after))


def hang_events(run: RunDir) -> list[dict[str, Any]]:
    """List what the history of a run has of hangs."""
    return [row for row in read_jsonl(run.events) if row["event"] == "hang"]


def seen_of(run: RunDir, began: Path) -> Seen | None:
    """Return the first hang, or straggler, of a run.

    `began`: what the culprit has written, which stays on a host over SSH; a straggler counts from the start there.
    """
    rows = list(read_jsonl(run.events))
    found = next((row for row in rows if row["event"] in {"hang", "straggler"}), None)
    if found is None:
        return None
    start = next(row["time"] for row in rows if row["event"] == "attempt_started")
    at = float(began.read_text()) if began.exists() else float(found.get("since", start))
    ranks = tuple(found["ranks"]) if found["event"] == "hang" else (found["rank"],)
    return Seen(after_s=float(found["time"]) - at, ranks=ranks, text=str(found["text"]))


def await_seen(person: Person, run: RunDir, within_s: float) -> Seen | None:
    """Ask for the status of a run until it shows a hang; None: there was none in this time."""
    deadline = time.monotonic() + within_s
    began = person.path / f"began-{run.name}"
    while (seen := seen_of(run, began)) is None and time.monotonic() < deadline:
        time.sleep(2.0)
        person.clusterddp("status", run.name, check=False)  # which brings what hosts have written
    return seen

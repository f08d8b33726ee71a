"""What the ranks of a node use: cores, memory, GPU; and their pace: steps, and when they entered their collectives.

The head asks; nothing here blocks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.node.processes import start_into_memory
from clusterddp.node.rank_probe import AskedRank, children_of, find_memory
from clusterddp.node.stack_hook import PACE
from clusterddp.rendezvous.connection import Message
from clusterddp.system.processes import read_cpu_and_memory
from clusterddp.wire import read_object

PATIENCE_S = 3.0
"""How long a node takes at most; a rank that has not answered by then holds its GIL."""
_QUERY_GPUS = ("--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_QUERY_APPS = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
_GPUS_AGAIN_S = 600.0
_MAX_ENTERED = 3200
"""Collectives in one report, which has to fit into a message."""


class NodeUsage:
    """The ranks of one node."""

    def __init__(self, report: Callable[[Message], None], *, on_cpu: bool) -> None:
        self._report = report
        self._on_cpu = on_cpu
        self._look: _Look | None = None
        self._cpu_s: dict[int, float] = {}
        """By pid: seconds of a core at the last look."""
        self._looked_at = math.nan
        self._gpus_at = 0.0
        """By the monotonic clock: until then nvidia-smi is not asked, for it did not answer."""

    @property
    def asking(self) -> bool:
        """True while ranks answer."""
        return self._look is not None

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""
        if self._look is not None:
            self._look.close()
            self._look = None

    def ask(self, asked_at: float, most: int, pids: Mapping[int, int]) -> None:
        """Begin to look at ranks (rank -> pid); `tick` reports them.

        `asked_at`: by the head's clock; `most`: of the newest collectives of each rank.
        """
        received = time.time()
        if self._look is None and pids:
            with_gpus = not self._on_cpu and time.monotonic() >= self._gpus_at
            self._look = _Look.begin(
                asked_at, received, pids, most=min(most, _MAX_ENTERED // len(pids)), with_gpus=with_gpus
            )

    def tick(self, pids: Mapping[int, int]) -> None:
        """Report what was asked for, once all ranks have answered or had their time."""
        look = self._look
        if look is None or not look.step():
            return
        self._look = None
        own = {rank: pid for rank, pid in look.pids.items() if pids.get(rank) == pid}
        children = children_of(set(own.values()))
        cores, memory = self._read_processes(own, children)
        if look.waits_for_gpus:
            self._gpus_at = time.monotonic() + _GPUS_AGAIN_S
        gpus = look.read_gpus(own, children)
        ranks = {
            str(rank): look.read_pace(rank)
            | {"cpu": cores.get(rank), "memory": memory[rank]}
            | dict(zip(("gpu", "gpu_memory"), gpus.get(rank, (None, None)), strict=True))
            for rank in own
        }
        clocks = {"asked": look.asked_at, "received": look.received, "sent": time.time()}
        self._report({"kind": "usage", **clocks, "ranks": ranks})

    def _read_processes(
        self, pids: Mapping[int, int], children: Mapping[int, list[int]]
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Return the cores that each rank used since the last look, if there was one, and its memory."""
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        before, self._cpu_s = self._cpu_s, {}
        cores, memory = {}, {}
        for rank, pid in pids.items():
            used_s, memory[rank] = 0.0, 0
            for each in (pid, *children.get(pid, ())):
                seconds, resident, private = read_cpu_and_memory(each)
                self._cpu_s[each] = seconds
                used_s += max(0.0, seconds - before.get(each, 0.0))
                memory[rank] += resident if each == pid else private
            if pid in before:
                cores[rank] = round(used_s / passed_s, 2)
        return cores, memory


@dataclass(kw_only=True, slots=True)
class _Look:
    """One look at the ranks of a node."""

    asked_at: float
    """When the head asked, by its clock; seconds since the epoch."""
    received: float
    until: float
    """By the monotonic clock."""
    pids: dict[int, int]
    most: int
    asked: dict[int, AskedRank]
    gpus: int | None
    """Memory that gets the list of GPUs; None: there is no nvidia-smi, or no GPU is used."""
    apps: int | None
    """The same for the processes on them."""

    @classmethod
    def begin(cls, asked_at: float, received: float, pids: Mapping[int, int], *, most: int, with_gpus: bool) -> _Look:
        found = {rank: find_memory(pid) for rank, pid in pids.items()}
        # The processes first: that they are there cannot be seen, since there may be none.
        apps = start_into_memory("nvidia-smi", *_QUERY_APPS) if with_gpus else None
        return cls(
            asked_at=asked_at,
            received=received,
            until=time.monotonic() + PATIENCE_S,
            pids=dict(pids),
            most=most,
            asked={rank: AskedRank(memory[1], PACE) for rank, memory in found.items() if memory is not None},
            gpus=start_into_memory("nvidia-smi", *_QUERY_GPUS) if with_gpus else None,
            apps=apps,
        )

    @property
    def waits_for_gpus(self) -> bool:
        """True while nvidia-smi has printed nothing; it prints nothing of processes where there are none."""
        return self.gpus is not None and os.fstat(self.gpus).st_size == 0

    def step(self) -> bool:
        """Read what has arrived; True once that is all, or the time is up."""
        for asked in self.asked.values():
            asked.step()
        late = time.monotonic() >= self.until
        if late:
            self._close_connections()
        return late or not (self.waits_for_gpus or any(not asked.done for asked in self.asked.values()))

    def close(self) -> None:
        """Give up."""
        self._close_connections()
        for memory in (self.gpus, self.apps):
            _read_and_close(memory)

    def _close_connections(self) -> None:
        for asked in self.asked.values():
            asked.close()

    def read_pace(self, rank: int) -> dict[str, Any]:
        """Return how far a rank is, times as microseconds since the look began; empty: it did not answer."""
        asked = self.asked.get(rank)
        try:
            answer = read_object(asked.data) if asked is not None else {}
            newest = answer.get("entered", [])[-self.most :]
            entered = [[number, kind, round(at / 1e3 - self.received * 1e6)] for number, kind, at in newest]
            return {"step": answer.get("step"), "own_step_s": answer.get("own_step_s"), "entered": entered}
        except (ValueError, TypeError):
            return {}

    def read_gpus(
        self, pids: Mapping[int, int], children: Mapping[int, list[int]]
    ) -> dict[int, tuple[float | None, int | None]]:
        """Return how busy the GPU of each rank is, and the bytes in use on it.

        nvidia-smi knows processes by the host's pids. Where that leaves a rank without a GPU, and there are as many
        GPUs as ranks, each has the one of its place.
        """
        gpus = parse_gpus(_read_and_close(self.gpus))
        owners = {each: rank for rank, pid in pids.items() for each in (pid, *children.get(pid, ()))}
        found = {}
        for uuid, pid in parse_apps(_read_and_close(self.apps)):
            if pid in owners and uuid in gpus:
                found[owners[pid]] = gpus[uuid]
        if not found and len(gpus) == len(self.pids):
            found = dict(zip(sorted(self.pids), gpus.values(), strict=True))
        return found


def parse_gpus(text: str) -> dict[str, tuple[float | None, int | None]]:
    """Return by UUID how busy each GPU is (0..1), and the bytes in use on it; a MIG device does not say how busy."""
    found = {}
    for line in text.splitlines():
        uuid, _, rest = line.partition(",")
        busy, _, used = (part.strip() for part in rest.partition(","))
        percent, mebibytes = (int(part) if part.isascii() and part.isdigit() else None for part in (busy, used))
        if uuid:
            found[uuid] = (
                None if percent is None else percent / 100,
                None if mebibytes is None else mebibytes << 20,
            )
    return found


def parse_apps(text: str) -> list[tuple[str, int]]:
    """Return the UUID and the pid of each process on a GPU."""
    rows = (line.partition(",") for line in text.splitlines())
    return [(uuid, int(pid)) for uuid, _, pid in rows if pid.strip().isdigit()]


def _read_and_close(memory: int | None) -> str:
    if memory is None:
        return ""
    try:
        return os.pread(memory, 1 << 16, 0).decode("utf-8", errors="replace")
    finally:
        os.close(memory)

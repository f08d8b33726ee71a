"""What a node reports of where its ranks are: their stacks when the head asks, and for how long they show no progress.

It also notes when their logs grow.

Signs of progress are new output, bytes read or written, and a further collective. All of it is read from outside the
ranks, so it holds for scripts that know nothing of clusterddp; collectives are asked for while all else is silent.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping

from clusterddp.node.rank_probe import AskedRank, Probes, children_of, find_memory
from clusterddp.rendezvous.connection import Message
from clusterddp.run.directory import AttemptDir
from clusterddp.run.log_times import LogTimesWriter
from clusterddp.system.processes import read_usage

LOOK_EVERY_S = 2.5
SILENT_S = 10.0
"""A node reports its silence when it is longer, and again with each look."""
_CHILDREN_S = 5.0
"""After so long without a sign, what ranks have started is looked at, too: finding it reads the whole process table."""
_MIN_BYTES = 64 * 1024
"""What ranks move between two looks without a sign of progress: their stacks, a line of a log of their own."""


class NodeStacks:
    """The ranks of one node: their stacks, and their signs of progress."""

    def __init__(self, host: str, node_rank: int, report: Callable[[Message], None]) -> None:
        self._host = host
        self._node_rank = node_rank
        self._report = report
        self._probes: Probes | None = None
        self._signs = _Signs(node_rank)

    @property
    def asking(self) -> bool:
        """True while ranks write their stacks."""
        return self._probes is not None

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""
        self._probes, self._signs = None, _Signs(self._node_rank)

    def ask(self, report_id: str, pids: Mapping[int, int]) -> None:
        """Ask ranks (rank -> pid) for their stacks; `tick` reports them."""
        self._probes = Probes.begin(report_id, pids)

    def tick(self, attempt: AttemptDir, pids: Mapping[int, int], now: float) -> None:
        """Report stacks that are complete; look for signs of progress if it is time to."""
        if self._probes is not None and self._probes.step():
            probes, self._probes = self._probes, None
            for each in probes.results(self._host, self._signs.cpus):
                self._report({"kind": "stack", "id": probes.id, "stack": dataclasses.asdict(each)})
            self._report({"kind": "stacks_done", "id": probes.id})
        silent_s = self._signs.look(attempt, pids, now)
        if silent_s is not None:
            self._report({"kind": "silent", "silent_s": silent_s})


class _Signs:
    """The signs of progress of a node's ranks."""

    def __init__(self, node_rank: int) -> None:
        self._node_rank = node_rank
        self.cpus: dict[int, float] = {}
        """The cores that each rank, and what it started, used between the last two looks."""
        self._look_at = 0.0
        self._looked_at = -math.inf
        self._sign_at = math.nan
        self._sizes: dict[str, int] = {}
        """Of the logs, by name."""
        self._log_times = LogTimesWriter()
        self._used: dict[int, tuple[float, int]] = {}
        """By pid."""
        self._collectives: dict[int, int] = {}
        self._asked: dict[int, AskedRank] = {}
        self._keys: dict[int, str] = {}
        """By pid: of the socket at which a rank answers."""
        self._reported = False

    def look(self, attempt: AttemptDir, pids: Mapping[int, int], now: float) -> float | None:
        """Return the seconds without a sign, if they are worth a report; 0: there was one after a report."""
        if self._read_collectives():
            self._sign_at = now
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_EVERY_S
        logs = (path for rank in pids for path in (attempt.stdout(rank), attempt.stderr(rank)))
        sizes = {path.name: _size(path) for path in logs}
        self._log_times.note(attempt.log_times(self._node_rank), sizes, now)
        moved = self._read_usage(pids, now)
        if math.isnan(self._sign_at) or sizes != self._sizes or moved >= _MIN_BYTES:
            self._sign_at = now
        self._sizes = sizes
        silent_s = now - self._sign_at
        if silent_s > 0:
            self._ask_for_collectives(pids)
        if silent_s < SILENT_S and not self._reported:
            return None
        self._reported = silent_s >= SILENT_S
        return silent_s if self._reported else 0.0

    def _read_usage(self, pids: Mapping[int, int], now: float) -> int:
        """Note the cores that ranks use; return the bytes that they have moved since the last look."""
        passed_s, self._looked_at = now - self._looked_at, now
        owners = {pid: rank for rank, pid in pids.items()}
        if now - self._sign_at >= _CHILDREN_S:
            for pid, children in children_of(set(owners)).items():
                owners |= dict.fromkeys(children, owners[pid])
        used = {pid: read_usage(pid) for pid in owners}
        self.cpus = dict.fromkeys(pids, 0.0)
        moved = 0
        for pid, (seconds, moved_bytes) in used.items():
            before_s, bytes_before = self._used.get(pid, (seconds, moved_bytes))
            self.cpus[owners[pid]] += max(0.0, seconds - before_s) / passed_s
            moved += max(0, moved_bytes - bytes_before)
        self._used = used
        return moved

    def _ask_for_collectives(self, pids: Mapping[int, int]) -> None:
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()
        for rank, pid in pids.items():
            if pid not in self._keys and (found := find_memory(pid)) is not None:
                self._keys[pid] = found[1]
            if pid in self._keys:
                self._asked[rank] = AskedRank(self._keys[pid])

    def _read_collectives(self) -> bool:
        """Read what ranks have answered; True when one of them has come further."""
        advanced = False
        for rank, asked in list(self._asked.items()):
            asked.step()
            if not asked.done:
                continue
            if asked.answer is not None:
                total = sum(each.enqueued + each.completed for each in asked.answer.collectives.values())
                advanced |= total != self._collectives.get(rank, 0)
                self._collectives[rank] = total
            del self._asked[rank]
        return advanced


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

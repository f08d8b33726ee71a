"""Watches the ranks of a node: whether they connect to the master, what transport NCCL uses, which are stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.network.connections import was_connected
from clusterddp.network.nccl_log import Transport, merge, read_transport
from clusterddp.node.log import log_line
from clusterddp.node.rank_network import RankNetwork
from clusterddp.run.cleanup import Cleanup
from clusterddp.run.directory import AttemptDir
from clusterddp.run.record import RankRecord
from clusterddp.system.processes import is_stopped

_FIRST_S = 1.0
_EVERY_S = 20.0
"""The kernel lists a connection for 60 s after its end, unless it was reset."""
_FIRST_LOOK_S, _LAST_LOOK_S = 2.0, 300.0
"""After the start of the ranks: NCCL chooses when they first communicate, and opens links as it needs them."""
_MAX_BYTES = 1 << 20
LOOK_EVERY_S = 5.0
"""A rank is reported that is stopped at two looks: the ranks of a suspended job may resume a moment after us."""


class ConnectionWatch:
    """Looks for a connection of this node's ranks to the master: ranks that never connect train apart."""

    def __init__(self, address: str, port: int, now: float) -> None:
        self._address = address
        self._port = port
        self._wait_s = _FIRST_S
        self._next = now + self._wait_s
        self.seen = False
        """True also where it cannot be known."""

    def tick(self, now: float) -> None:
        """Look when it is due, until a connection was seen."""
        if not self.seen and now >= self._next:
            self._wait_s = min(2 * self._wait_s, _EVERY_S)
            self._next = now + self._wait_s
            self.look()

    def look(self) -> None:
        """Look now."""
        self.seen = self.seen or was_connected(self._address, self._port) is not False


class NcclWatch:
    """Reads the transport from NCCL's logs, at growing intervals; it changes as NCCL opens links."""

    def __init__(self, logs: Sequence[Path], now: float) -> None:
        self._logs = logs
        self._begun = now
        self._look_at = now + _FIRST_LOOK_S
        self._last: Transport | None = None

    def look(self, now: float) -> Transport | None:
        """Return the transport when it is new."""
        if now < self._look_at or now > self._begun + _LAST_LOOK_S:
            return None
        self._look_at = now + max(_FIRST_LOOK_S, (now - self._begun) / 2)
        found = [transport for log in self._logs if (transport := read_transport(_read(log)))]
        if len(found) < len(self._logs) or (merged := merge(found)) == self._last:
            return None
        self._last = merged
        return merged


class StoppedRanks:
    """Finds ranks that SIGSTOP has stopped: they hold up the whole gang, and no error reports it."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._seen: frozenset[int] = frozenset()

    def look(self, records: Sequence[RankRecord], now: float) -> list[RankRecord]:
        """Return, and log, the records that change: their ranks were stopped, or have resumed."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY_S
        changed = []
        seen = {record.rank for record in records if is_stopped(record.pid)}
        for record in records:
            if record.rank in seen & self._seen and record.stopped is None:
                changed.append(dataclasses.replace(record, stopped=time.time()))
            elif record.rank not in seen and record.stopped is not None:
                changed.append(dataclasses.replace(record, stopped=None))
        for record in changed:
            what = "was stopped by a signal" if record.stopped else "goes on"
            log_line(f"rank {record.rank} (pid {record.pid}) {what}")
        self._seen = frozenset(seen)
        return changed


def _read(log: Path) -> str:
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    return ""


@dataclass(slots=True)
class LocalEnding:
    """The end of the node's ranks, once it is ordered."""

    kill_at: float
    give_up_at: float
    cleanup: Cleanup
    killed: bool = False


@dataclass(slots=True)
class LocalAttempt:
    """The node's part of the attempt that runs now."""

    dir: AttemptDir
    network: RankNetwork
    master_port: int
    oom_kills: int | None
    watch: ConnectionWatch
    running: set[int] = field(default_factory=set)
    """Ranks that have started and whose end was not reported."""
    records: dict[int, RankRecord] = field(default_factory=dict)
    started: bool = False
    """True once all ranks have started, and the head has the report."""
    stop_seen: bool = False
    stop_wanted: str | None = None
    """The reason of a request to stop that the run's storage, which is away, has not taken yet."""
    ending: LocalEnding | None = None
    stopped: StoppedRanks = field(default_factory=StoppedRanks)
    nccl: NcclWatch | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Of the ranks that run, none of which was reaped."""
        return {rank: self.records[rank].pid for rank in self.running}

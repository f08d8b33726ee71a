"""The records of a node's ranks on their way to the run's storage, which may be away for a while."""

from __future__ import annotations

import dataclasses
import time

from clusterddp.errors import ClusterddpError
from clusterddp.node.failure import RankEnd
from clusterddp.run.directory import AttemptDir
from clusterddp.run.gang import Node
from clusterddp.run.record import RankRecord, write_rank
from clusterddp.system.storage import storage_timeout_s


class RankRecords:
    """Records that are still to be written, by attempt and rank; a refused write is retried."""

    def __init__(self) -> None:
        self._unwritten: dict[tuple[AttemptDir, int], RankRecord] = {}
        self._write_by = float("inf")
        """When the storage must have taken them, once it has refused one."""

    def put(self, attempt: AttemptDir, *records: RankRecord) -> None:
        """Take records over; a newer one of the same rank replaces an older one."""
        self._unwritten |= {(attempt, record.rank): record for record in records}

    def write(self, now: float) -> bool:
        """Write what is left; False when the storage refuses, and is to be tried again.

        Raises: ClusterddpError: it has refused for the storage timeout; the records are dropped.
        """
        try:
            for attempt, rank in list(self._unwritten):
                write_rank(attempt, self._unwritten[attempt, rank])
                del self._unwritten[attempt, rank]
        except ClusterddpError:
            self._write_by = min(self._write_by, now + storage_timeout_s())
            if now < self._write_by:
                return False
            self._unwritten.clear()
            raise
        self._write_by = float("inf")
        return True


def new_record(rank: int, pid: int, node: Node, *, interface: str | None, master: tuple[str, int]) -> RankRecord:
    """Return the record of a rank that has just started."""
    return RankRecord(
        rank=rank,
        node_rank=node.node_rank,
        local_rank=node.ranks.index(rank),
        host=node.host,
        pid=pid,
        interface=interface,
        master_addr=master[0],
        master_port=master[1],
        started=time.time(),
    )


def with_end(record: RankRecord, end: RankEnd) -> RankRecord:
    """Return the record of a rank that has ended."""
    error = "ended with the gang" if end.on_order and end.signal is not None else end.error
    return dataclasses.replace(
        record, stopped=None, ended=time.time(), exit_code=end.exit_code, signal=end.signal, error=error
    )

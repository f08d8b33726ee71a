"""The records of an attempt: its start, its ranks, and the events between; run/outcome.py has its end.

The run's storage may be away for a while; a write that it refuses is retried until its time is up.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.outcome import AttemptEnd
from clusterddp.run.record import ProcessIdentity, RankRecord, log_event, write_rank
from clusterddp.system.files import write_json
from clusterddp.system.storage import storage_timeout_s

if TYPE_CHECKING:
    from clusterddp.node.failure import RankEnd
    from clusterddp.node.rank_network import RankNetwork, Rendezvous
    from clusterddp.rendezvous.connection import Message
    from clusterddp.run.gang import Gang, Node


def make_next_attempt(run: RunDir, number: int) -> bool:
    """Make the next attempt's directory; False: another start of the job has made it, while this one was cut off."""
    try:
        run.attempt(number).path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        log_line(f"the next attempt's directory cannot be made: {error}")
    return True


class StartRecord:
    """The record that the ranks of an attempt were started by the calling process, the head."""

    def __init__(self, attempt: AttemptDir, gang: Gang, rendezvous: Rendezvous) -> None:
        self.nodes: dict[int, Message] = {}
        """For each node whose ranks run, by node rank: the interface, its address, and why it was chosen."""
        self.written = False
        """True also after the write was given up."""
        self._attempt = attempt
        self._gang = gang
        self._rendezvous = rendezvous
        self._write_by = float("inf")
        """When the storage must have taken the record, once it has refused it."""

    @property
    def is_due(self) -> bool:
        """True when the ranks of all nodes run and the record is not written."""
        return len(self.nodes) == len(self._gang.nodes) and not self.written

    def write(self, now: float, *, last_try: bool) -> str | None:
        """Write the record; return why it is given up: the time is up, or this was the last try."""
        try:
            make_attempt_dirs(self._attempt)
            write_json(self._attempt.start, self._facts())
        except (ClusterddpError, OSError) as error:
            self._write_by = min(self._write_by, now + storage_timeout_s())
            if now < self._write_by and not last_try:
                return None  # the next tick retries
            self.written = True
            return str(error)
        self.written = True
        return None

    def _facts(self) -> dict[str, Any]:
        return {
            "attempt": self._attempt.number,
            "started": time.time(),
            "world_size": self._gang.world_size,
            "master_addr": self._rendezvous.address,
            "master_port": self._rendezvous.port,
            "backend": self._gang.backend,
            "supervisor": dataclasses.asdict(ProcessIdentity.of()),
            "nodes": [
                {"node_rank": node.node_rank, "host": node.host, "ranks": node.ranks}
                | self.nodes.get(node.node_rank, {})
                for node in self._gang.nodes
            ],
        }


class RankRecords:
    """The records of a node's ranks that are not written yet."""

    def __init__(self) -> None:
        self._unwritten: dict[tuple[AttemptDir, int], RankRecord] = {}
        self._write_by = float("inf")
        """When the storage must have taken all records, once it has refused one."""

    def put(self, attempt: AttemptDir, *records: RankRecord) -> None:
        """Add records; a newer one of the same rank replaces an older one."""
        self._unwritten |= {(attempt, record.rank): record for record in records}

    def write(self, now: float) -> bool:
        """Write all records; False when the storage refuses one, and the write is to be retried.

        Raises: ClusterddpError: the storage has refused for the storage timeout; the records are dropped.
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


def new_record(rank: int, pid: int, node: Node, network: RankNetwork, master_port: int) -> RankRecord:
    """Return the record of a rank that has just started."""
    return RankRecord(
        rank=rank,
        node_rank=node.node_rank,
        local_rank=node.ranks.index(rank),
        host=node.host,
        pid=pid,
        interface=network.interface,
        master_addr=network.gang.master_addr,
        master_port=master_port,
        started=time.time(),
    )


def with_end(record: RankRecord, end: RankEnd) -> RankRecord:
    """Return the record of a rank that has ended."""
    error = "ended with the gang" if end.on_order and end.signal is not None else end.error
    return dataclasses.replace(
        record, stopped=None, ended=time.time(), exit_code=end.exit_code, signal=end.signal, error=error
    )


def log_end(run: RunDir, attempt: int, end: AttemptEnd) -> None:
    """Log the end of an attempt, and which rank failed first if one did."""
    if end.root_cause is not None:
        log(run, "rank_failed", attempt=attempt, rank=end.root_cause.rank, error=end.root_cause.error)
    facts: dict[str, Any] = {"outcome": end.outcome, "reason": end.reason, "will_restart": end.will_restart}
    log(run, "attempt_ended", attempt=attempt, **facts)


def log(run: RunDir, event: str, **facts: Any) -> None:
    """Log an event in the supervisor's log and in the run's history."""
    log_line(f"{event} {facts}")
    log_event(run, event, **facts)

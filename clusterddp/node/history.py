"""What the head, or whoever takes its place, writes of an attempt: its start, its end, and the events in between."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.outcome import AttemptEnd, write_end
from clusterddp.run.record import ProcessIdentity, drop_secrets, log_event
from clusterddp.run.spool import spool_end
from clusterddp.system.files import write_json
from clusterddp.system.storage import is_outage, storage_timeout_s

if TYPE_CHECKING:
    from clusterddp.node.rendezvous import Rendezvous
    from clusterddp.rendezvous.connection import Message
    from clusterddp.run.gang import Gang

_RETRY_S = 0.5
_FULL_S = 10.0
"""How long a disk that is full has to get room for the record of an end."""


def record_start(attempt: AttemptDir, gang: Gang, rendezvous: Rendezvous, nodes: Mapping[int, Message]) -> None:
    """Record that the ranks of an attempt were started, and by whom: the calling process, the head.

    `nodes`: for each node whose ranks run, the interface, its address, and why it was chosen.

    Raises: ClusterddpError, OSError: it cannot be written.
    """
    make_attempt_dirs(attempt)
    facts = {
        "attempt": attempt.number,
        "started": time.time(),
        "world_size": gang.world_size,
        "master_addr": rendezvous.address,
        "master_port": rendezvous.port,
        "backend": gang.backend,
        "supervisor": dataclasses.asdict(ProcessIdentity.of()),
        "nodes": [
            {"node_rank": node.node_rank, "host": node.host, "ranks": node.ranks, **nodes.get(node.node_rank, {})}
            for node in gang.nodes
        ],
    }
    write_json(attempt.start, facts)


def make_next_attempt(run: RunDir, number: int) -> bool:
    """Make the next attempt's directory; False: another start of the job has, while this one was cut off."""
    try:
        run.attempt(number).path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        log_line(f"the next attempt's directory cannot be made: {error}")
    return True


class StartRecord:
    """The record of an attempt's start on its way to the run's storage, which may be away for a while."""

    def __init__(self) -> None:
        self.written = False
        """True as well when it was given up."""
        self._due = float("inf")
        """When it has to be there, once the storage has refused it."""

    def write(
        self,
        attempt: AttemptDir,
        gang: Gang,
        rendezvous: Rendezvous,
        nodes: Mapping[int, Message],
        *,
        now: float,
        last_try: bool,
    ) -> str | None:
        """Write it, as `record_start` does; return why it is given up, once its time is over or with `last_try`."""
        try:
            record_start(attempt, gang, rendezvous, nodes)
        except (ClusterddpError, OSError) as error:
            self._due = min(self._due, now + storage_timeout_s())
            if now < self._due and not last_try:
                return None  # the next tick retries
            self.written = True
            return str(error)
        self.written = True
        return None


class EndRecord:
    """The end of an attempt on its way to the run's storage.

    Storage that is away, or full, is tried again for a while: nothing runs any more, so that may wait. What it does not
    take in that time is spooled.
    """

    def __init__(self, attempt: AttemptDir, end: AttemptEnd, token: str, *, patience_s: float | None = None) -> None:
        self.end = end
        self.is_first = False
        """True when no other process had recorded an end."""
        self.error: str | None = None
        """Why the run's storage did not take it."""
        self._attempt = attempt
        self._token = token
        self._retry_at = 0.0
        self._began = time.monotonic()
        self._patience_s = storage_timeout_s() if patience_s is None else patience_s

    def step(self, now: float) -> bool:
        """Try if it is time to; True when the end is written, or the time is up."""
        if now < self._retry_at:
            return False
        self._retry_at = now + _RETRY_S
        try:
            make_attempt_dirs(self._attempt)
            self.is_first = write_end(self._attempt, self.end)
            return True
        except (ClusterddpError, OSError) as error:
            patience_s = self._patience_s if is_outage(error) else min(_FULL_S, self._patience_s)
            if now < self._began + patience_s:
                return False
            self._spool(str(error))
            return True

    def _spool(self, error: str) -> None:
        self.error = error
        reason = f"{self.end.reason}; this could not be recorded in the run's directory: {error}"
        self.end = dataclasses.replace(self.end, reason=reason, will_restart=False, needs_job=False, ended=time.time())
        log_line(f"the end could not be recorded: {error}; it was {self.end.outcome}: {self.end.reason}")
        self.is_first = spool_end(self._token, self._attempt.number, self.end)
        drop_secrets(RunDir(self._attempt.path.parents[1]))


def record_end(attempt: AttemptDir, end: AttemptEnd, token: str, *, patience_s: float | None = None) -> EndRecord:
    """Record the end of an attempt; return once that is done, or given up."""
    record = EndRecord(attempt, end, token, patience_s=patience_s)
    while not record.step(time.monotonic()):
        time.sleep(_RETRY_S)
    return record


def log_end(run: RunDir, attempt: int, end: AttemptEnd) -> None:
    """Log the end of an attempt, and which rank failed first if one did."""
    if end.root_cause is not None:
        log(run, "rank_failed", attempt=attempt, rank=end.root_cause.rank, error=end.root_cause.error)
    facts: dict[str, Any] = {"outcome": end.outcome, "reason": end.reason, "will_restart": end.will_restart}
    log(run, "attempt_ended", attempt=attempt, **facts)


def log(run: RunDir, event: str, **facts: Any) -> None:
    """Log an event, here and in the run's history."""
    log_line(f"{event} {facts}")
    log_event(run, event, **facts)

"""What the head, or whoever takes its place, writes of an attempt: its start, its end, and the events in between."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.note import note
from clusterddp.run.directory import AttemptDir, RunDir, write_json
from clusterddp.run.record import AttemptEnd, ProcessIdentity, log_event, write_end

if TYPE_CHECKING:
    from clusterddp.node.link import Message
    from clusterddp.node.rendezvous import Rendezvous
    from clusterddp.run.gang import Gang

RECORD_PATIENCE_S = 10.0
"""How long a disk that refuses the record of the end is asked again."""


def record_start(attempt: AttemptDir, gang: Gang, rendezvous: Rendezvous, nodes: Mapping[int, Message]) -> None:
    """Record that the ranks of an attempt were started, and by whom: the calling process, the head.

    `nodes`: for each node whose ranks run, the interface, its address, and why it was chosen.

    Raises: ClusterddpError, OSError: it cannot be written.
    """
    attempt.path.mkdir(parents=True, exist_ok=True, mode=0o700)
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


def record_end(attempt: AttemptDir, end: AttemptEnd) -> bool:
    """Record the end of an attempt, asking a full disk again for a while: nothing runs any more, so that may wait.

    False when somebody else already has.

    Raises: ClusterddpError: it still cannot be written.
    """
    deadline = time.monotonic() + RECORD_PATIENCE_S
    while True:
        try:
            with contextlib.suppress(OSError):
                attempt.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return write_end(attempt, end)
        except ClusterddpError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.5)


def log_end(run: RunDir, attempt: int, end: AttemptEnd) -> None:
    """Log the end of an attempt, and which rank failed first if one did."""
    if end.root_cause is not None:
        log(run, "rank_failed", attempt=attempt, rank=end.root_cause.rank, error=end.root_cause.error)
    facts: dict[str, Any] = {"outcome": end.outcome, "reason": end.reason, "will_restart": end.will_restart}
    log(run, "attempt_ended", attempt=attempt, **facts)


def log(run: RunDir, event: str, **facts: Any) -> None:
    """Log an event. The history is a convenience: what must be true is in start.json and end.json."""
    note(f"{event} {facts}")
    with contextlib.suppress(OSError):
        log_event(run, event, **facts)

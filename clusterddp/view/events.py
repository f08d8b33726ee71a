"""Facts from the history of a run (`events.jsonl`): the phases of its start, NCCL's transport, lost rows.

A host, or another user, may have written a row; one of another form is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.network.nccl_log import SOCKETS, Transport
from clusterddp.run.directory import AttemptDir
from clusterddp.run.record import RunRecord, Start
from clusterddp.system.files import is_file
from clusterddp.wire import build

Row = dict[str, Any]
"""A row of the history."""


_START = {"time": float | None, "phases": dict[str, float] | None}
_STOP = {"reason": str, "time": float, "asks": bool}
_NOTICE = {"attempt": int, "what": str, "by": str}
"""The result of a try to send a message of `notify`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTransport(Transport):
    """How NCCL sends from the ranks of one node, as its log reports it."""

    node_rank: int
    host: str


def _built(rows: Iterator[Row], form: Any) -> Iterator[tuple[Row, Any]]:
    """Yield the rows that have a form, with their values in it; a host, or another user, may have written others."""
    for row in rows:
        with contextlib.suppress(ValueError):
            yield row, build(form, row)


def find_transports(events: Sequence[Row], attempt: int | None) -> tuple[NodeTransport, ...]:
    """Return the newest report of each node in an attempt, by node rank."""
    rows = (row for row in events if row.get("event") == "nccl_transport" and row.get("attempt") == attempt)
    found = {transport.node_rank: transport for _, transport in _built(rows, NodeTransport)}
    return tuple(found[node_rank] for node_rank in sorted(found))


def warn_of_sockets(transports: Collection[NodeTransport]) -> str:
    """Return a warning where GPUs of several hosts exchange gradients over sockets; empty: they do not."""
    slow = [transport for transport in transports if transport.network == SOCKETS]
    if not slow or len({transport.host for transport in transports}) < 2:
        return ""
    interfaces = ", ".join(dict.fromkeys(device for transport in slow for device in transport.devices))
    why = f" ({slow[0].complaint.rstrip('.')})" if slow[0].complaint else ""
    return (
        f"between hosts NCCL sends over sockets, by {interfaces or 'an interface that it does not name'}, not by "
        f"RDMA{why}. Where there is InfiniBand or RoCE, clusterddp doctor SPEC shows why it is not used"
    )


def warn_of_wait(events: Sequence[Row]) -> str:
    """Return which nodes a start that has waited for long waits for; empty: for none."""
    rows = [row for row in events if row.get("event") in ("start_waits", "attempt_started", "attempt_ended")]
    return str(rows[-1].get("text", "")) if rows else ""


def warn_of_nodes(events: Sequence[Row], attempt: int | None) -> str:
    """Return what the preflight has found about nodes, and which nodes an attempt has left out; empty: nothing."""
    rows = [row for row in events if row.get("attempt") == attempt]
    marked = [f"{row.get('host')}: {row.get('why')}" for row in rows if row.get("event") == "node_marked"]
    return "; ".join([*marked, *(str(row.get("text")) for row in rows if row.get("event") == "left_out")])


def find_change_of_nodes(events: Sequence[Row], attempt: int | None) -> str:
    """Return why an attempt has other nodes than the one before; empty: it has the same."""
    rows = [row for row in events if row.get("event") == "nodes_changed" and row.get("attempt") == attempt]
    return f"attempt {attempt}: {rows[-1].get('text')}" if rows else ""


def warn_of_unsent(events: Sequence[Row]) -> str:
    """Return a warning where the last try to send a message failed, for each way; empty: all were sent."""
    failed: dict[tuple[int, str, str], str] = {}
    rows = (row for row in events if row.get("event") in ("notified", "notify_failed"))
    for row, event in _built(rows, _NOTICE):
        failed[event["attempt"], event["what"], event["by"]] = str(row.get("error") or "")
    newest = {by: (what, error) for (_, what, by), error in failed.items()}
    return "; ".join(f"notify.{by} was not sent ({what}): {error}" for by, (what, error) in newest.items() if error)


def warn_of_unwatched(events: Sequence[Row], attempt: int | None) -> str:
    """Return why ranks of a batch script's steps run without a supervisor; empty: they do not."""
    rows = [row for row in events if row.get("event") == "step_not_watched" and row.get("attempt") in (attempt, None)]
    return f"ranks of step {rows[-1].get('step')} are not watched: {rows[-1].get('error')}" if rows else ""


def find_start_phases(events: Sequence[Row], record: RunRecord, attempt: int, start: Start) -> dict[str, float]:
    """Return the seconds that each phase of an attempt's start took, in their order, as far as they were recorded.

    prepare: from the run's directory, or the resume, until the launcher has its job. launch: until the ranks have
    begun, on Slurm with the wait in the queue. import: of torch, once for the ranks of a node where they are forked.
    rendezvous: until the ranks have met. data: until the data set is loaded. first_step: until it is done, with all
    that is built for it. The last three are rank 0's, and only of the built-in trainer. `start`: the content of
    start.json.
    """
    rows = (row for row in events if row.get("attempt") == attempt)
    found: dict[str, Row] = {row["event"]: event for row, event in _built(rows, _START)}
    phases: dict[str, float] = {}
    submitted = found.get("submitted", {}).get("time")
    if submitted is not None and attempt == record.base_attempt:
        resumed = found.get("resumed", {}).get("time")
        phases["prepare"] = submitted - (record.created_ns / 1e9 if resumed is None else resumed)
    imported = max((import_s for node in start.get("nodes", ()) if (import_s := node.get("import_s"))), default=None)
    if submitted is not None and "started" in start:
        phases["launch"] = start["started"] - submitted - (imported or 0.0)
    steps = dict(found.get("first_step", {}).get("phases") or {})
    own = steps.pop("import", None)
    if imported is not None or own is not None:
        phases["import"] = (imported or 0.0) + (own or 0.0)
    return {name: round(max(0.0, seconds), 2) for name, seconds in (phases | steps).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class HangEvent:
    """No rank of the run makes progress."""

    since: float
    """Seconds since the epoch."""
    text: str
    """Which ranks wait for which, in one line."""
    hint: str
    ranks: tuple[int, ...]
    """Those that the others seem to wait for."""
    stacks: str
    """The id of the report that has the stacks (run/stacks.py)."""


def find_hang(events: Sequence[Row], attempt: int | None) -> HangEvent | None:
    """Return the hang of an attempt that the head has seen last, unless the ranks went on afterwards."""
    found: HangEvent | None = None
    for row in events:
        if row.get("attempt") == attempt and row.get("event") in ("hang", "hang_over"):
            with contextlib.suppress(ValueError):  # a host, or another user, may have written it
                found = build(HangEvent, row) if row["event"] == "hang" else None
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """A run whose ranks were asked to checkpoint and end, and have not ended yet."""

    reason: str
    """Who asked, or what."""
    since: float
    """Seconds since the epoch."""
    until: float
    """Seconds since the epoch: when the supervisors end what still runs."""
    asks: bool
    """False: the program has not asked whether to stop so far."""


def find_stopping(events: Sequence[Row], attempt: AttemptDir, grace_s: float) -> Stopping | None:
    """Return what the head recorded of a stop in this attempt; None while no stop is requested."""
    rows = (row for row in events if row.get("event") == "stop_requested" and row.get("attempt") == attempt.number)
    for _, event in _built(rows, _STOP):
        since, asked = event["time"], is_file(attempt.asked)
        return Stopping(reason=event["reason"], since=since, until=since + grace_s, asks=event["asks"] or asked)
    return None


def count_lost_rows(events: Sequence[Row]) -> int:
    """Count the rows of `metrics.jsonl` that could not be written, as far as the count itself could be."""
    rows = [event.get("rows") for event in events if event.get("event") == "rows_lost"]
    return sum(count for count in rows if isinstance(count, int))

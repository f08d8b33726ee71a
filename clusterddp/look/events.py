"""Facts from the history of a run (`events.jsonl`): the phases of its start, NCCL's transport, lost rows.

A host, or another user, may have written a row; one of another form is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypedDict

from clusterddp.network.nccl_log import SOCKETS
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, Start
from clusterddp.system.files import is_file, read_jsonl
from clusterddp.wire import build


class _AnyEvent(TypedDict):
    event: str


class _Event(_AnyEvent, total=False):
    """A row of the run's history, as far as it is read here."""

    attempt: int | None
    time: float
    phases: dict[str, float]


class _StopEvent(TypedDict):
    reason: str
    time: float
    asks: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTransport:
    """How NCCL sends from the ranks of one node, as its log reports it; see `network.nccl_log.Transport`."""

    node_rank: int
    host: str
    network: str
    devices: tuple[str, ...]
    links: tuple[str, ...]
    complaint: str


def read_transports(run: RunDir, attempt: int | None) -> tuple[NodeTransport, ...]:
    """Return the newest report of each node in an attempt, by node rank."""
    found: dict[int, NodeTransport] = {}
    for row in read_jsonl(run.events):
        if row.get("event") == "nccl_transport" and row.get("attempt") == attempt:
            with contextlib.suppress(ValueError):  # a host, or another user, may have written it
                transport = build(NodeTransport, row)
                found[transport.node_rank] = transport
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


def read_start_phases(run: RunDir, record: RunRecord, attempt: int, start: Start) -> dict[str, float]:
    """Return the seconds that each phase of an attempt's start took, in their order, as far as they were recorded.

    prepare: from the run's directory, or the resume, until the launcher has its job. launch: until the ranks have
    begun, on Slurm with the wait in the queue. import: of torch, once for the ranks of a node where they are forked.
    rendezvous: until the ranks have met. data: until the data set is loaded. first_step: until it is done, with all
    that is built for it. The last three are rank 0's, and only of the built-in trainer. `start`: the content of
    start.json.
    """
    events: dict[str, _Event] = {}
    for row in read_jsonl(run.events):
        with contextlib.suppress(ValueError):  # a host, or another user, may have written it
            event = build(_Event, row)
            events |= {event["event"]: event} if event.get("attempt") == attempt else {}
    phases: dict[str, float] = {}
    submitted = events["submitted"].get("time") if "submitted" in events else None
    if submitted is not None and attempt == record.base_attempt:
        resumed = events["resumed"].get("time") if "resumed" in events else None
        phases["prepare"] = submitted - (record.created_ns / 1e9 if resumed is None else resumed)
    imported = max((import_s for node in start.get("nodes", ()) if (import_s := node.get("import_s"))), default=None)
    if submitted is not None and "started" in start:
        phases["launch"] = start["started"] - submitted - (imported or 0.0)
    steps = dict(events["first_step"].get("phases", {})) if "first_step" in events else {}
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


def read_hang(run: RunDir, attempt: int | None) -> HangEvent | None:
    """Return the hang of an attempt that the head has seen last, unless the ranks went on afterwards."""
    found: HangEvent | None = None
    for row in read_jsonl(run.events):
        if row.get("attempt") == attempt and row.get("event") in {"hang", "hang_over"}:
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


def read_stopping(run: RunDir, attempt: int, grace_s: float) -> Stopping | None:
    """Return what the head recorded of a stop in this attempt; None while no stop is requested."""
    for row in read_jsonl(run.events):
        with contextlib.suppress(ValueError):  # a host, or another user, may have written it
            if row.get("event") == "stop_requested" and "asks" in row and row.get("attempt") == attempt:
                event = build(_StopEvent, row)
                since, asked = event["time"], is_file(run.attempt(attempt).asked)
                return Stopping(reason=event["reason"], since=since, until=since + grace_s, asks=event["asks"] or asked)
    return None


def count_lost_rows(run: RunDir) -> int:
    """Count the rows of `metrics.jsonl` that could not be written, as far as the count itself could be."""
    rows = [event.get("rows") for event in read_jsonl(run.events) if event.get("event") == "rows_lost"]
    return sum(count for count in rows if isinstance(count, int))

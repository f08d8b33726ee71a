"""The way that NCCL's data takes between the ranks of a run, as its nodes have told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from clusterddp.network.nccl_log import SOCKETS
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from clusterddp.wire import build


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTransport:
    """The way from the ranks of one node, in NCCL's own words; see `dist.nccl_log.Transport`."""

    node_rank: int
    host: str
    network: str
    devices: tuple[str, ...]
    links: tuple[str, ...]
    complaint: str


def read_transports(run: RunDir, attempt: int | None) -> tuple[NodeTransport, ...]:
    """Return what nodes have told in an attempt, by node rank; of each its newest word."""
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
        f"RDMA{why}. Where there is InfiniBand or RoCE, clusterddp doctor SPEC says what keeps it from being used"
    )

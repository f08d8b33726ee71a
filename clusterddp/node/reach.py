"""How a supervisor is connected when it starts: to the head, or to the others as the head, and to Slurm's tasks."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time

from clusterddp.dist.port import walk_ports
from clusterddp.node.allocation import Allocation
from clusterddp.node.guard import Guard
from clusterddp.node.head import Head
from clusterddp.node.job_watch import JobWatch
from clusterddp.node.link import Message, listen, listen_on_walk
from clusterddp.node.order import Order
from clusterddp.node.search import Finder, KnownHead, SearchedHead
from clusterddp.node.tasks import Tasks
from clusterddp.node.uplink import HeadElsewhere, HeadHere, Uplink

HOST_SILENCE_S = 8.0
"""How long another host may be silent before its node counts as lost."""
LINK_PORTS = 16
"""How many ports the link's walk has: as many jobs whose walks begin at the same port can run on one host."""


def open_tasks(order: Order, selector: selectors.BaseSelector) -> Tasks | None:
    """Wait for the tasks of this node from now on, with torchrun one; None where none have been started."""
    if order.tasks is None:
        return None
    listener = socket.socket(fileno=order.tasks)
    ranks = order.node.ranks if order.gang.start == "ranks" else (order.node.node_rank,)
    return Tasks(listener, ranks, order.node.host, selector)


def reach_head(
    order: Order,
    selector: selectors.BaseSelector,
    guard: Guard,
    missing: tuple[int, ...],
    allocation: Allocation | None,
) -> Uplink:
    """Be the head, or find it; `missing` are ranks whose tasks have not come yet.

    Raises: OSError, ClusterddpError: no port to listen at; the head, which is known to listen, is not there.
    """
    join: Message = {"kind": "join", "node_rank": order.node.node_rank, "pid": os.getpid(), "missing": missing}
    if order.is_head:
        return _be_head(order, selector, guard, join, allocation)
    return HeadElsewhere(
        _finder(order, selector, join), selector, lease_s=order.lease_s, start_timeout_s=order.start_timeout_s
    )


def _finder(order: Order, selector: selectors.BaseSelector, join: Message) -> Finder:
    if order.link is not None:
        return KnownHead(
            order.link,
            order.gang.token,
            join,
            until=time.monotonic() + order.start_timeout_s,
            host_silence_s=HOST_SILENCE_S if order.spans_hosts else None,
        )
    assert order.slurm is not None
    return SearchedHead(
        order.slurm.heads,
        _link_ports(order.slurm.job_id),
        order.gang.token,
        join,
        selector=selector,
        host_silence_s=HOST_SILENCE_S,
    )


def _be_head(
    order: Order, selector: selectors.BaseSelector, guard: Guard, join: Message, allocation: Allocation | None
) -> HeadHere:
    slurm = order.slurm
    if slurm is None or not order.spans_hosts:
        listener = listen(order.gang.master_addr or "127.0.0.1")
    else:
        listener = listen_on_walk(_link_ports(slurm.job_id))
    here = HeadHere(
        order.gang,
        selector,
        lease_s=order.lease_s,
        listener=listener,
        host_silence_s=HOST_SILENCE_S if order.spans_hosts else None,
        join=join,
    )
    here.head = Head(
        order.run,
        order.gang,
        first_attempt=order.attempt,
        first_restart=order.first_restart,
        rendezvous_seed=f"slurm:{slurm.job_id}" if slurm else order.gang.token,
        job=JobWatch(slurm, allocation, stop_lead_s=order.gang.stop_lead_s) if slurm and allocation else None,
        start_timeout_s=order.start_timeout_s,
        guard=guard,
        tell=here.tell,
        now=time.monotonic(),
    )
    if slurm is None:
        host, port = here.address
        print(json.dumps({"link": {"host": host, "port": port}}), flush=True)
    return here


def _link_ports(job_id: str) -> list[int]:
    return walk_ports(f"link:{job_id}", LINK_PORTS)

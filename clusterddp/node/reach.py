"""How a supervisor is connected when it starts: to the head, or to the others as the head, and to Slurm's tasks."""

from __future__ import annotations

import json
import os
import selectors
import socket

from clusterddp.network.interface import LOOPBACK_ADDRESS, read_links
from clusterddp.network.port import walk_ports
from clusterddp.network.socket_links import tell_links
from clusterddp.node.allocation import Allocation
from clusterddp.node.guard import Guard
from clusterddp.node.head import Head
from clusterddp.node.job_watch import JobWatch
from clusterddp.node.link import Message, listen, listen_on_walk
from clusterddp.node.peer import Limits
from clusterddp.node.search import Finder, KnownHead, SearchedHead
from clusterddp.node.tasks import Tasks
from clusterddp.node.uplink import HeadElsewhere, HeadHere, Uplink
from clusterddp.run.supervisors import SupervisorOrder

CONNECT_S = 8.0
"""How long the head's host may take to answer at first: the head listens before anybody is told of it."""
LINK_PORTS = 16
"""How many ports the link's walk has: as many jobs whose walks begin at the same port can run on one host."""


def open_tasks(order: SupervisorOrder, selector: selectors.BaseSelector) -> Tasks | None:
    """Wait for the tasks of this node from now on, with torchrun one; None where none have been started."""
    if order.tasks is None:
        return None
    listener = socket.socket(fileno=order.tasks)
    ranks = order.node.ranks if order.gang.start == "ranks" else (order.node.node_rank,)
    return Tasks(listener, ranks, order.node.host, selector)


def reach_head(
    order: SupervisorOrder,
    selector: selectors.BaseSelector,
    *,
    guard: Guard,
    missing: tuple[int, ...],
    allocation: Allocation | None,
    now: float,
) -> Uplink:
    """Be the head, or find it; `missing` are ranks whose tasks have not come yet.

    Raises: OSError, ClusterddpError: no port to listen at; the head, which is known to listen, is not there.
    """
    join: Message = {"kind": "join", "node_rank": order.node.node_rank, "pid": os.getpid(), "missing": missing}
    if order.gang.backend == "nccl" and order.spans_hosts and not (order.gang.interface or order.over_ssh):
        # Over SSH the hosts have tried all networks, and the fastest that works was taken.
        join["links"] = tell_links(read_links())
    limits = Limits(
        host_silence_s=order.gang.host_silence_s,
        heartbeat_timeout_s=order.gang.heartbeat_timeout_s,
        spans_hosts=order.spans_hosts,
    )
    if order.is_head:
        here = HeadHere(order.gang, selector, limits, listener=_listen_as_head(order), join=join)
        here.head = _make_head(order, guard, here, allocation, now)
        if order.slurm is None:
            host, port = here.address
            print(json.dumps({"link": {"host": host, "port": port}}), flush=True)
        return here
    listener = listen_on_walk([0]) if order.spans_hosts else listen(LOOPBACK_ADDRESS)
    finder = _finder(order, selector, join | {"port": listener.getsockname()[1]})
    return HeadElsewhere(
        order.gang,
        order.node.node_rank,
        finder,
        selector,
        limits,
        listener=listener,
        on_slurm=order.slurm is not None,
        now=now,
    )


def _finder(order: SupervisorOrder, selector: selectors.BaseSelector, join: Message) -> Finder:
    if order.link is not None:
        timeout_s = min(CONNECT_S, order.gang.start_timeout_s)
        return KnownHead((order.link["host"], order.link["port"]), order.gang.token, join, timeout_s=timeout_s)
    assert order.slurm is not None
    ports = _link_ports(order.slurm.job_id)
    return SearchedHead(order.slurm.heads, ports, order.gang.token, join, selector=selector)


def _listen_as_head(order: SupervisorOrder) -> socket.socket:
    if order.slurm is None or not order.spans_hosts:
        return listen(order.gang.master_addr or LOOPBACK_ADDRESS)
    return listen_on_walk(_link_ports(order.slurm.job_id))


def _make_head(order: SupervisorOrder, guard: Guard, here: HeadHere, allocation: Allocation | None, now: float) -> Head:
    slurm = order.slurm
    return Head(
        order.run,
        order.gang,
        first_attempt=order.attempt,
        first_restart=order.first_restart,
        rendezvous_seed=f"slurm:{slurm.job_id}" if slurm else order.gang.token,
        job=JobWatch(slurm, allocation, stop_lead_s=order.gang.stop_lead_s) if slurm and allocation else None,
        guard=guard,
        tell=here.tell,
        now=now,
    )


def _link_ports(job_id: str) -> list[int]:
    return walk_ports(f"link:{job_id}", LINK_PORTS)

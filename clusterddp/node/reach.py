"""The connections of a supervisor at its start: to the head, or as the head to the other nodes, and to the tasks."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Sequence

from clusterddp.network.interface import LOOPBACK_ADDRESS, is_loopback, read_links
from clusterddp.network.own_host import addresses_of
from clusterddp.network.port import walk_ports
from clusterddp.network.socket_links import report_links
from clusterddp.node.allocation import Allocation
from clusterddp.node.guard import Guard
from clusterddp.node.head import Head
from clusterddp.node.head_server import HeadHere
from clusterddp.node.helpers import Helpers
from clusterddp.node.job_watch import JobWatch
from clusterddp.node.link import SUPERVISORS, listen, listen_on_walk
from clusterddp.node.log import log_line
from clusterddp.node.peer import Limits
from clusterddp.node.tasks import Tasks
from clusterddp.node.uplink import HeadElsewhere, Uplink
from clusterddp.rendezvous.client import Search
from clusterddp.rendezvous.connection import Message
from clusterddp.run.supervisors import SupervisorOrder

LINK_PORTS = 16
"""The number of ports at which a job's head may listen; so many jobs with the same first port fit on one host."""


def open_tasks(order: SupervisorOrder, selector: selectors.BaseSelector) -> Tasks | None:
    """Listen for Slurm's tasks on this node; None: the run has no tasks."""
    if order.tasks is None:
        return None
    return Tasks(socket.socket(fileno=order.tasks), order.node.ranks, order.node.host, selector)


def reach_head(
    order: SupervisorOrder,
    selector: selectors.BaseSelector,
    *,
    guard: Guard,
    helpers: Helpers,
    missing: tuple[int, ...],
    allocation: Allocation | None,
    now: float,
) -> Uplink:
    """Start the head, or the search for it; `missing` are ranks whose tasks have not connected yet.

    Raises: OSError, ClusterddpError: no port is free to listen at.
    """
    join = _join_message(order, missing)
    limits = Limits(
        host_silence_s=order.gang.host_silence_s,
        heartbeat_timeout_s=order.gang.heartbeat_timeout_s,
        spans_hosts=order.spans_hosts,
    )
    if order.is_head:
        here = HeadHere(order.gang, selector, limits, listener=_listen_as_head(order), join=join)
        here.head = _make_head(order, here, guard=guard, helpers=helpers, allocation=allocation, now=now)
        if order.slurm is None:
            host, port = here.address
            print(json.dumps({"link": {"host": host, "port": port}}), flush=True)
        return here
    listener = listen_on_walk([0]) if order.spans_hosts else listen(LOOPBACK_ADDRESS)
    return HeadElsewhere(
        order.gang,
        order.node.node_rank,
        _search_of_head(order, selector, join | {"port": listener.getsockname()[1]}),
        selector,
        limits,
        listener=listener,
        known=order.link,
        on_slurm=order.slurm is not None,
        now=now,
    )


def _join_message(order: SupervisorOrder, missing: tuple[int, ...]) -> Message:
    join: Message = {"kind": "join", "node_rank": order.node.node_rank, "pid": os.getpid(), "missing": missing}
    if order.gang.backend == "nccl" and order.spans_hosts and not (order.gang.interface or order.over_ssh):
        # Over SSH the hosts have tried all networks, and the plan has the fastest that works.
        join["links"] = report_links(read_links())
    return join


def _search_of_head(order: SupervisorOrder, selector: selectors.BaseSelector, join: Message) -> Search:
    """Search the head where it is known to listen; on Slurm at the ports of the job, on the hosts that may run it."""
    hosts, ports = ([order.link["host"]], [order.link["port"]]) if order.link is not None else ([], [])
    if order.link is None:
        assert order.slurm is not None
        hosts, ports = list(order.slurm.heads), _link_ports(order.slurm.job_id)
    return Search(
        lambda: resolve(hosts) if order.link is None else hosts,
        ports,
        protocol=SUPERVISORS,
        key=order.gang.token,
        introduce=lambda connection: join,
        selector=selector,
    )


def resolve(hosts: Sequence[str]) -> list[str]:
    """Return the addresses of these hosts, in order, without loopback addresses."""
    addresses: list[str] = []
    for host in hosts:
        found = addresses_of(host)
        if not found:
            log_line(f"{host} is not resolved by {socket.gethostname()}")
        addresses += found
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address)]


def _listen_as_head(order: SupervisorOrder) -> socket.socket:
    if order.slurm is None or not order.spans_hosts:
        return listen(order.gang.master_addr or LOOPBACK_ADDRESS)
    return listen_on_walk(_link_ports(order.slurm.job_id))


def _make_head(
    order: SupervisorOrder, here: HeadHere, *, guard: Guard, helpers: Helpers, allocation: Allocation | None, now: float
) -> Head:
    slurm = order.slurm
    return Head(
        order.run,
        order.gang,
        first_attempt=order.attempt,
        first_restart=order.first_restart,
        rendezvous_seed=f"slurm:{slurm.job_id}" if slurm else order.gang.token,
        job=JobWatch(slurm, allocation, stop_lead_s=order.gang.stop_lead_s) if slurm and allocation else None,
        guard=guard,
        helpers=helpers,
        send=here.send,
        now=now,
    )


def _link_ports(job_id: str) -> list[int]:
    return walk_ports(f"link:{job_id}", LINK_PORTS)

"""The leases on the GPUs of a local run: the submitter takes them, the task receives them as its standard input."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Mapping

from clusterddp.planning.local import GpusInUseError, assign_gpus, place_here
from clusterddp.planning.plan import Plan, move_plan, read_plan
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Node
from clusterddp.system.devices import list_gpus
from clusterddp.system.files import write_json
from clusterddp.system.gpu_lease import pack_leases, take_leases

_TRIES = 5
"""How often another run may take a GPU between our look and our lease."""


def lease_gpus(run: RunDir, environ: Mapping[str, str]) -> socket.socket | None:
    """Lease the GPUs of a run's plan and return the socket that holds the leases; None for a run without GPUs.

    If another run has taken one of them since, other GPUs are chosen and written into the plan.
    Raises: PreflightError: too few are free; the message names their holders.
    """
    plan = read_plan(run)
    nodes = plan.gang.nodes
    if not any(node.gpus for node in nodes):
        return None
    listed = list_gpus(environ)
    for _ in range(_TRIES):
        leases = {node.node_rank: take_leases(node.gpus, run.name, listed) for node in nodes}
        taken = {node_rank: lease for node_rank, lease in leases.items() if lease is not None}
        try:
            if len(taken) == len(leases):
                if nodes != plan.gang.nodes:
                    _change_plan(run, plan, nodes)
                return pack_leases(taken)
        finally:
            for lease in taken.values():
                lease.close()
        nodes = place_here(functools.partial(assign_gpus, run.name, nodes), environ)
    raise GpusInUseError(f"{run.name}: other runs took its GPUs {_TRIES} times before it could lease them")


def _change_plan(run: RunDir, plan: Plan, nodes: tuple[Node, ...]) -> None:
    changed = dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, nodes=nodes))
    write_json(run.plan, move_plan(changed, run.path).to_json())

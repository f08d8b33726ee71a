"""The plan of a joined run: the hosts of the ssh section, the code and paths of this machine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError, UsageError
from clusterddp.network.interface import Interface, interface_towards, loopback, named_interface
from clusterddp.network.port import walk_ports
from clusterddp.planning.entry import plan_entry
from clusterddp.planning.job_values import changes_of, filled_in, spec_text, with_absolute_paths
from clusterddp.planning.local import read_machine
from clusterddp.planning.names import choose_run_name
from clusterddp.planning.placement import with_one_process_each
from clusterddp.planning.plan import Plan, move_plan, plan_gang
from clusterddp.planning.prerequisites import check_secrets, secret_notes
from clusterddp.planning.program import plan_program
from clusterddp.planning.ssh.place import plan_ssh_placement
from clusterddp.run.gang import Node
from clusterddp.system.devices import list_gpus
from clusterddp.system.gpu_lease import Lease, spell_busy, take_leases

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec

LAUNCHER = "join"
_TRIES = 5


def plan_join(resolved: ResolvedSpec, *, runs_dir: Path, working_dir: Path, environ: Mapping[str, str]) -> Plan:
    """Compute what this machine does in the run; `settle` adds its own node and the address of node 0 later.

    Raises: UsageError, PreflightError, ClusterddpError: it cannot join, with the reason.
    """
    from clusterddp.spec.hosts import share_out, unused_hosts

    runs_dir, working_dir = runs_dir.absolute(), working_dir.absolute()
    if resolved.job.sweep:
        raise UsageError("a spec with a sweep describes many runs; join starts one", hint="~sweep drops the section")
    check_secrets(resolved.job.all_secrets, environ)
    # The code and the paths are this machine's, as in a local run; nothing is uploaded.
    here = with_absolute_paths(resolved.job.model_copy(update={"launcher": "local"}), working_dir)
    shares = share_out(resolved.job)
    placement = plan_ssh_placement(resolved.job, shares, unused_hosts(resolved.job))
    placement, spawns = with_one_process_each(resolved.job, placement)
    program = plan_program(here, working_dir=working_dir, runs_dir=runs_dir, environ=environ)
    run, token = choose_run_name(runs_dir), secrets.token_hex(16)
    entry = plan_entry(program, here, run_dir=runs_dir / run, working_dir=working_dir, spawns=spawns)
    plan = Plan(
        run=run,
        token=token,
        name=resolved.job.name,
        launcher=LAUNCHER,
        runs_dir=runs_dir,
        working_dir=working_dir,
        spec=filled_in(here),
        spec_text=spec_text(here.model_copy(update={"launcher": resolved.job.launcher})),
        gang=plan_gang(resolved.job.model_copy(update={"notify": here.notify}), placement, entry, run=run, token=token),
        rank0={},
        changes=changes_of(resolved),
        notes=(*placement.notes, *program.notes, *secret_notes(resolved)),
        snapshot=program.snapshot_summary,
        secrets=resolved.job.all_secrets,
        parent=None,
        files=(),
        commands=(),
    )
    return move_plan(plan, runs_dir / run)


def hosts_of(plan: Plan) -> tuple[str, ...]:
    """Return the hosts in the order of the node ranks."""
    return tuple(node.host for node in plan.gang.nodes)


def join_port(resolved: ResolvedSpec) -> int:
    """Return the port at which node 0 listens: the one of the spec, or one that is computed from the spec's name."""
    port = resolved.job.network.master_port
    return walk_ports(f"join:{resolved.job.name}", 1)[0] if port == "auto" else port


def settle(plan: Plan, node_rank: int, *, run: str, token: str, master_addr: str, interface: str | None) -> Plan:
    """Fill in what is known once all machines have joined: the run, and the interface towards node 0.

    Raises: ClusterddpError: no interface leads to node 0, or the one that the spec names does not exist.
    """
    found = _interface(plan, master_addr, interface)
    nodes = tuple(
        dataclasses.replace(node, interface=found.name, address=found.address, why=found.why)
        if node.node_rank == node_rank
        else node
        for node in plan.gang.nodes
    )
    gang = dataclasses.replace(plan.gang, nodes=nodes, token=token, master_addr=master_addr)
    return move_plan(dataclasses.replace(plan, token=token, gang=gang), plan.runs_dir / run)


def lease_own_gpus(
    plan: Plan, resolved: ResolvedSpec, node_rank: int, environ: Mapping[str, str]
) -> tuple[Plan, Lease]:
    """Lease the GPUs of this machine that its node needs; return the plan with them, and the lease.

    Raises: PreflightError: the machine has fewer, or fewer are free.
    """
    from clusterddp.spec.hosts import share_out

    count = share_out(resolved.job)[node_rank].gpus
    for _ in range(_TRIES):
        machine = read_machine(environ)
        free = tuple(gpu for gpu in machine.gpus if gpu not in machine.busy)[:count]
        if len(free) < count:
            in_use = f", {len(free)} of them free: {spell_busy(machine.busy)}" if len(machine.gpus) >= count else ""
            raise PreflightError(
                f"node {node_rank} needs {count} GPUs; this machine has {len(machine.gpus)}{in_use}",
                hint="--cpu, on all machines, starts the same ranks on the CPU with gloo",
            )
        lease = take_leases(free, plan.name, list_gpus(environ))
        if lease is not None:
            nodes = tuple(_with_gpus(node, node_rank, free) for node in plan.gang.nodes)
            return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, nodes=nodes)), lease
    raise PreflightError(f"{plan.name}: other runs took the free GPUs in {_TRIES} tries")


def _interface(plan: Plan, master_addr: str, named: str | None) -> Interface:
    if named is not None:
        return named_interface(named)
    return loopback() if len(plan.gang.nodes) == 1 else interface_towards(master_addr)


def _with_gpus(node: Node, node_rank: int, gpus: tuple[str, ...]) -> Node:
    return dataclasses.replace(node, gpus=gpus) if node.node_rank == node_rank else node

"""Holds in plans: machines that are kept for runs, and a run that is started on them.

On Slurm a hold is a job that starts no ranks. Elsewhere it is a run that leases its GPUs as any run does, with a rank
on each node that sleeps; a run in it leases the same GPUs inside the hold (system/gpu_lease.py).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

from clusterddp.errors import UsageError
from clusterddp.planning.plan import Plan, move_plan, read_plan
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang
from clusterddp.run.record import read_run
from clusterddp.system.units import format_count


def as_hold(plan: Plan) -> Plan:
    """Return the plan of a hold: the machines of this run, without the run.

    Raises: UsageError: it is a batch script.
    """
    if plan.gang.entry.kind == "batch_script":
        raise UsageError("hold: a batch script: a hold keeps the machines of a spec")
    limit = plan.spec["resources"].get("time") or ("the limit of its partition" if plan.slurm else None)
    keeps = "it starts no ranks, and keeps its nodes until clusterddp cancel" + (f", or for {limit}" if limit else "")
    held = dataclasses.replace(
        plan,
        hold=plan.run,
        gang=plan.gang if plan.slurm else _asleep(plan),
        snapshot=plan.snapshot if plan.ssh else None,  # hosts then have the code before the first run
        secrets=(),
        notes=(*plan.notes, keeps),
    )
    return move_plan(held, plan.run_dir)


def _asleep(plan: Plan) -> Gang:
    """Return the gang of a hold without Slurm: a command on each node that sleeps until the hold ends."""
    entry = Entry(
        kind="command",
        target="sleep",
        args=(str(_time_of(plan)),),
        working_dir=str(plan.run_dir),
        stop_signal="TERM",
        init="file",  # its ranks need not meet
    )
    return dataclasses.replace(
        plan.gang,
        nodes=tuple(dataclasses.replace(node, ranks=(node.node_rank,), spare=0) for node in plan.gang.nodes),
        entry=entry,
        min_nodes=None,
        master_port=None,  # a run may need the port that the spec names
        time_limit_s=None,
        hang_after_s=1e9,  # it shows no progress
        setup=(),
    )


def in_hold(plan: Plan, hold: RunDir) -> Plan:
    """Return the plan of a run that is started in the job of a hold.

    Raises: UsageError: it is no hold, the run does not fit, or it needs a job of its own.
    """
    its, own_job = read_hold(hold), "without --in it gets machines of its own"
    if plan.launcher != its.launcher or plan.gang.entry.kind == "batch_script":
        what = "a batch script" if plan.gang.entry.kind == "batch_script" else f"launcher {plan.launcher}"
        raise UsageError(f"{plan.name}: {what}, and {hold.name} is for specs of {its.launcher}", hint=own_job)
    runs_dir = hold.path.resolve().parent
    if runs_dir != plan.runs_dir.resolve():
        hint = f"--runs {runs_dir} puts it there"
        raise UsageError(f"{hold.name} is in {runs_dir}, and the run would be in {plan.runs_dir}", hint=hint)
    if plan.slurm and "dependency" in plan.slurm.sbatch_options:
        raise UsageError(f"{plan.name}: in a hold a run waits for no other job (after, slurm.dependency)", hint=own_job)
    if lacks := list(_lacks(plan, its)):
        raise UsageError(f"{plan.name} does not fit into {hold.name}: {', '.join(lacks)}", hint=own_job)
    left_s = read_run(hold).created_ns / 1e9 + _time_of(its) - time.time()
    plan = _within(plan, min(_time_of(plan), max(1.0, left_s)))
    return move_plan(dataclasses.replace(plan, hold=hold.name), plan.run_dir)


def read_hold(hold: RunDir) -> Plan:
    """Read the plan of a hold. Raises: UsageError: it is no hold, or has ended."""
    if not read_run(hold).is_hold:
        raise UsageError(f"{hold.name} is a run, not a hold", hint="clusterddp hold SPEC keeps machines for runs")
    if end := final_end(hold):
        raise UsageError(f"hold {hold.name} has ended: {end.reason}", hint="clusterddp hold SPEC makes another one")
    return read_plan(hold)


def with_own_job(plan: Plan) -> Plan:
    """Return the plan of a run whose job is its own."""
    alone = dataclasses.replace(_within(plan, _time_of(plan)), hold=None)
    return move_plan(alone, plan.run_dir) if plan.in_hold else plan


def _within(plan: Plan, limit_s: float) -> Plan:
    if plan.slurm:
        return plan  # the job ends its runs
    limit = None if limit_s == math.inf else float(round(limit_s))
    return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, time_limit_s=limit))


def _time_of(plan: Plan) -> float:
    """Return the time limit of the spec, in seconds; inf: it has none."""
    from clusterddp.spec.fields import read_duration

    limit = plan.spec["resources"].get("time")
    return math.inf if limit is None else float(read_duration(limit).seconds)


def _lacks(plan: Plan, hold: Plan) -> Iterator[str]:
    """Name what the hold has too little of; without Slurm the leases of the GPUs decide."""
    if plan.ssh and hold.ssh:
        others = {node.host for node in plan.ssh.hosts} - {node.host for node in hold.ssh.hosts}
        yield from (f"it needs {host}" for host in sorted(others))
    if not hold.slurm:
        return
    if plan.gang.min_nodes is not None:
        yield "with elastic it needs a job of its own"
    nodes, has_nodes = len(plan.gang.nodes), len(hold.gang.nodes)
    if nodes > has_nodes:
        yield f"it needs {format_count(nodes, 'node')}, of {has_nodes}"
    gpus, has_gpus = plan.num_gpus // nodes, hold.num_gpus // has_nodes
    if gpus > has_gpus:
        yield f"it needs {format_count(gpus, 'GPU')} on a node, of {has_gpus}"
    if hold.slurm.sbatch_options.get("exclusive") is True:
        return  # all cores and, where the site says so, all memory
    cores, has_cores = _cores(plan), _cores(hold)
    if cores > has_cores:
        yield f"it needs {format_count(cores, 'core')} on a node, of {has_cores}"
    memory, has_memory = (each.spec["resources"].get("memory_gb") for each in (plan, hold))
    if memory and has_memory and memory > has_memory:
        yield f"it needs {memory:g} GB on a node, of {has_memory:g}"


def _cores(plan: Plan) -> int:
    """Return how many cores of a node the ranks need; without resources.cpus_per_task Slurm gives each of them one."""
    return plan.gang.num_ranks // len(plan.gang.nodes) * int(plan.spec["resources"].get("cpus_per_task") or 1)

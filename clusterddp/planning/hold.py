"""Holds in plans: a job that is kept and starts no ranks, and a run that is started in such a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from clusterddp.errors import UsageError
from clusterddp.planning.plan import Plan, move_plan, read_plan
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.units import format_count


def as_hold(plan: Plan) -> Plan:
    """Return the plan of a hold: the job of this run, without the run.

    Raises: UsageError: the launcher has no holds.
    """
    if plan.slurm is None or plan.gang.entry.kind == "batch_script":
        what = "a batch script" if plan.slurm else f"launcher {plan.launcher}"
        raise UsageError(f"hold: {what}: a hold is a job of Slurm that a spec describes", hint="--launcher slurm")
    time = plan.spec["resources"].get("time") or "the limit of its partition"
    held = dataclasses.replace(
        plan,
        hold=plan.run,
        snapshot=None,
        secrets=(),
        notes=(*plan.notes, f"it starts no ranks, and keeps its nodes until clusterddp cancel, or for {time}"),
    )
    return move_plan(held, plan.run_dir)


def in_hold(plan: Plan, hold: RunDir) -> Plan:
    """Return the plan of a run that is started in the job of a hold.

    Raises: UsageError: it is no hold, the run does not fit, or it needs a job of its own.
    """
    record = read_run(hold)
    if not record.is_hold:
        raise UsageError(f"{hold.name} is a run, not a hold", hint="clusterddp hold SPEC keeps a job for runs")
    its = read_plan(hold)
    own_job = "without --in it gets a job of its own"
    if plan.launcher != its.launcher or plan.slurm is None or plan.gang.entry.kind == "batch_script":
        what = f"launcher {plan.launcher}" if plan.slurm is None else "a batch script"
        raise UsageError(f"{plan.name}: {what}, and {hold.name} is a job of Slurm for specs", hint=own_job)
    runs_dir = hold.path.resolve().parent
    if runs_dir != plan.runs_dir.resolve():
        hint = f"--runs {runs_dir} puts it there"
        raise UsageError(f"{hold.name} is in {runs_dir}, and the run would be in {plan.runs_dir}", hint=hint)
    if "dependency" in plan.slurm.sbatch_options:
        raise UsageError(f"{plan.name}: in a hold a run waits for no other job (after, slurm.dependency)", hint=own_job)
    if lacks := list(_lacks(plan, its)):
        raise UsageError(f"{plan.name} does not fit into {hold.name}: {', '.join(lacks)}", hint=own_job)
    return move_plan(dataclasses.replace(plan, hold=hold.name), plan.run_dir)


def with_own_job(plan: Plan) -> Plan:
    """Return the plan of a run whose job is its own."""
    return move_plan(dataclasses.replace(plan, hold=None), plan.run_dir) if plan.in_hold else plan


def _lacks(plan: Plan, hold: Plan) -> Iterator[str]:
    """Name what the hold has too little of."""
    if plan.gang.min_nodes is not None:
        yield "with elastic it needs a job of its own"
    nodes, has_nodes = len(plan.gang.nodes), len(hold.gang.nodes)
    if nodes > has_nodes:
        yield f"it needs {format_count(nodes, 'node')}, of {has_nodes}"
    gpus, has_gpus = plan.num_gpus // nodes, hold.num_gpus // has_nodes
    if gpus > has_gpus:
        yield f"it needs {format_count(gpus, 'GPU')} on a node, of {has_gpus}"
    if hold.slurm and hold.slurm.sbatch_options.get("exclusive") is True:
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

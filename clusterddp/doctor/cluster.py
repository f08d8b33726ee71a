"""Check the machine of the submit, its cluster, and, in a short job, nodes of the cluster."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.doctor.job import JobRequest, judge_nodes, run_job
from clusterddp.errors import ClusterddpError, PreflightError, SlurmError
from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.judge import judge_here, judge_machine
from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import import_torch
from clusterddp.places.slurm.cluster import Cluster, Partition, read_cluster
from clusterddp.places.slurm.first_spec import choose_partition, consequences, time_text, why_not
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_run
from clusterddp.planning.processes import process_environment

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_NUM_NODES = 2


def check_cluster(
    resolved: ResolvedSpec | None,
    runs_dir: Path,
    environ: Mapping[str, str],
    *,
    with_job: bool,
    timeout_s: float,
    report: Callable[[str], None],
) -> list[Check]:
    """Check this machine and its cluster, for a spec if there is one; `with_job`: also nodes, within `timeout_s`."""
    job = resolved.job if resolved else None
    here = dataclasses.replace(read_machine(runs_dir, environ), torch=import_torch())
    needs = _needs_of(job)
    found = list(_check_here(here, job, needs, environ))
    if resolved is not None:
        found += check_plan(resolved, runs_dir, environ)
    checks = [Check(name=name, results={here.host: result}) for name, result in found]
    if with_job:
        request = _job_request(job, environ)
        try:
            answer = run_job(request, runs_dir=runs_dir.absolute(), environ=environ, timeout_s=timeout_s, report=report)
        except PreflightError as error:
            refused = red(error.message, error.hint or "the output of sbatch has the reason")
            return [*checks, Check(name="job", results={here.host: refused})]
        checks += judge_nodes(answer, here, needs)
    return checks


def check_plan(resolved: ResolvedSpec, runs_dir: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, Result]]:
    """Plan the submit of the spec, and ask Slurm whether it would accept this plan."""
    try:
        plan = plan_run(resolved, Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ))
    except ClusterddpError as error:
        yield "plan", red(error.message, error.hint or "clusterddp submit -n shows the plan")
        return
    yield "plan", ok(f"{len(plan.gang.nodes)} x {len(plan.gang.nodes[0].ranks)} ranks, {plan.gang.backend}")
    if plan.slurm is None:
        return
    from clusterddp.places.slurm.explain import advise_refusal
    from clusterddp.places.slurm.launcher import SlurmLauncher, ask_scheduler

    try:
        SlurmLauncher(environ).check(plan)
    except PreflightError as error:
        yield "data", red(error.message, error.hint or "train.data_dir names where they are")
    verdict = ask_scheduler(plan.slurm, environ)
    if verdict.accepted is None:
        yield "sbatch --test-only", note(f"not asked: {verdict.words}")
    elif verdict.accepted:
        when = f"accepted; it would start at {verdict.start} on {verdict.nodes}" if verdict.start else "accepted"
        yield "sbatch --test-only", ok(when)
    else:
        fix = advise_refusal(verdict.words) or "the spec's slurm and resources; sinfo, sacctmgr show assoc"
        yield "sbatch --test-only", red(verdict.words, fix)


def _check_here(
    here: Machine, job: JobSpec | None, needs: Needs, environ: Mapping[str, str]
) -> Iterator[tuple[str, Result]]:
    on_slurm = job is not None and job.launcher == "slurm"
    yield from judge_here(here)
    # Of a Slurm run only the submit happens here.
    yield from judge_machine(here, Needs() if on_slurm else needs)
    yield from _judge_slurm(environ, job if on_slurm else None)


def _needs_of(job: JobSpec | None) -> Needs:
    if job is None:
        return Needs()
    on_cpu = job.device == "cpu"
    num_gpus = 0 if on_cpu else job.resources.gpus_per_node or 0
    return Needs(trainer=job.entry is None, use_gpus=not on_cpu, num_gpus=num_gpus)


def _job_request(job: JobSpec | None, environ: Mapping[str, str]) -> JobRequest:
    environment = process_environment("", environ)
    return JobRequest(
        num_nodes=job.resources.nodes if job else _NUM_NODES,
        gpus_per_node=(job.resources.gpus_per_node or 0) if job else 0,
        options=dict(job.slurm) if job else {},
        python=sys.executable,
        paths=(environment.get("PYTHONPATH", ""), environment.get("LD_LIBRARY_PATH", "")),
    )


def _judge_slurm(environ: Mapping[str, str], job: JobSpec | None) -> Iterator[tuple[str, Result]]:
    """Query Slurm, if it is here, and judge its answers; `job` is a spec for Slurm, if there is one."""
    missing = [name for name in _COMMANDS if shutil.which(name, path=environ.get("PATH")) is None]
    if len(missing) == len(_COMMANDS):
        found = "none of its commands is here"
        yield "Slurm", note(found) if job is None else red(found, "submit from a login node of the cluster")
        return
    if missing:
        yield "Slurm's commands", red(f"{', '.join(missing)} missing", "install Slurm's client package; see PATH")
        return
    try:
        cluster = read_cluster(environ)
    except SlurmError as error:
        level = note if job is None and not error.transient else red
        yield "Slurm", level(error.message, "scontrol ping: is slurmctld up, and reached from here?")
        return
    yield "Slurm", ok(f"{cluster.version} answers, cluster {cluster.name}")
    yield from _judge_cluster(cluster)
    name = None if job is None else _option(job, "partition")
    partition = cluster.partition(name) if name else choose_partition(cluster)
    for sentence in consequences(cluster, partition):
        yield "cluster", note(sentence)
    if job is not None:
        yield "partition", _judge_partition(cluster, job, name)
        yield "account", _judge_account(cluster, _option(job, "account"), partition)


def _judge_cluster(cluster: Cluster) -> Iterator[tuple[str, Result]]:
    if cluster.has_accounting:
        broken = [answer for answer in cluster.unanswered if answer.startswith("sacct")]
        yield "accounting", note(broken[0], "sacctmgr ping; states still come from squeue") if broken else ok("answers")


def _judge_partition(cluster: Cluster, job: JobSpec, names: str | None) -> Result:
    if names is None:
        default = next((partition for partition in cluster.partitions if partition.is_default), None)
        if default is None:
            return red("the spec names none, and the cluster has no default", "slurm.partition=NAME")
        return _judge_one_partition(cluster, job, default)
    unknown = [name for name in names.split(",") if cluster.partition(name) is None]
    if unknown and cluster.partitions:
        known = ", ".join(partition.name for partition in cluster.partitions)
        return red(f"the cluster has no partition {', '.join(unknown)}", f"slurm.partition=NAME, one of {known}")
    found = [partition for name in names.split(",") if (partition := cluster.partition(name))]
    results = [_judge_one_partition(cluster, job, partition) for partition in found]
    # Slurm takes the partition that can start the job first.
    return next((result for result in results if result.level == "ok"), results[0] if results else note("not known"))


def _judge_one_partition(cluster: Cluster, job: JobSpec, partition: Partition) -> Result:
    asked = job.resources
    fix = "sinfo -s; slurm.partition=NAME"
    if not cluster.may_use(partition):
        return red(f"{partition.name} takes no jobs of yours: {why_not(cluster, partition)}", fix)
    if asked.time and partition.max_time_s and asked.time.seconds > partition.max_time_s:
        limit = time_text(partition.max_time_s)
        return red(f"{partition.name} allows {limit}, the spec asks for {asked.time}", f'resources.time="{limit}"')
    if partition.node_groups:
        usable = [group for group in partition.node_groups if group.num_gpus >= (asked.gpus_per_node or 0)]
        num_nodes = sum(group.num_nodes for group in usable)
        if num_nodes < asked.nodes:
            what = f" with {asked.gpus_per_node} GPUs" if asked.gpus_per_node else ""
            return red(f"{partition.name} has {num_nodes} nodes{what}, the spec asks for {asked.nodes}", fix)
        up = sum(group.num_nodes for group in usable if group.usable)
        if up < asked.nodes:
            return note(f"{partition.name} has {up} such nodes up now, the spec asks for {asked.nodes}", "sinfo -R")
        return ok(f"{partition.name}, {num_nodes} nodes can take the spec")
    return ok(partition.name)


def _judge_account(cluster: Cluster, account: str | None, partition: Partition | None) -> Result:
    if account is None:
        needed = cluster.needs_account and cluster.default_account is None and len(cluster.accounts) != 1
        if needed:
            return red("jobs need an account, and the spec names none", _account_fix(cluster))
        return ok("none named")
    if not cluster.has_accounting:
        return note(f"{account}: without accounting Slurm accepts any", None)
    if account not in cluster.accounts and (cluster.needs_account or cluster.accounts):
        return red(f"{account} is not an account of {cluster.user.name}", _account_fix(cluster))
    if partition is not None and not partition.takes_account(account):
        return red(f"partition {partition.name} takes no jobs of {account}", _account_fix(cluster))
    return ok(account)


def _account_fix(cluster: Cluster) -> str:
    names = ", ".join(cluster.accounts)
    return f"slurm.account=NAME, one of {names}" if names else "ask the cluster's administrators for an account"


def _option(job: JobSpec, name: str) -> str | None:
    value = job.slurm.get(name)
    return value if isinstance(value, str) else None

"""Check the machine of the submit, its cluster, and, in a short job, nodes of the cluster."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.check.job import JobRequest, run_job
from clusterddp.check.nodes import judge_nodes
from clusterddp.check.slurm import judge_slurm
from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.judge import judge_here, judge_machine
from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import import_torch
from clusterddp.planning.environment import process_environment
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_run

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

_NUM_NODES = 2


def check_cluster(
    resolved: ResolvedSpec | None,
    runs_dir: Path,
    environ: Mapping[str, str],
    *,
    with_job: bool,
    timeout_s: float,
    tell: Callable[[str], None],
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
            answer = run_job(request, runs_dir=runs_dir.absolute(), environ=environ, timeout_s=timeout_s, tell=tell)
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
    from clusterddp.launchers.slurm.ask import ask_scheduler
    from clusterddp.launchers.slurm.launcher import SlurmLauncher
    from clusterddp.slurm.explain import advise_refusal

    try:
        SlurmLauncher().check(plan)
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
    yield from judge_slurm(environ, job if on_slurm else None)


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

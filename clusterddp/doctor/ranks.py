"""`doctor --deep`: start the ranks of a spec where they would train, by any launcher, and judge their findings.

The ranks measure with train/deep_check.py and print Findings (facts/deep_check.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp import __version__
from clusterddp.api import Run
from clusterddp.errors import PreflightError
from clusterddp.facts.checks import Check
from clusterddp.facts.deep_check import judge_ranks, judge_transports, read_findings
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_run
from clusterddp.run.state import RunState
from clusterddp.submission.submit import submit

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec

_RUN_S = 900.0
"""How long the ranks may take from their start; compiling takes most of it."""
_POLL_S = 0.2
_STARTED = ("RUNNING", "STOPPING")


def measure_ranks(
    resolved: ResolvedSpec,
    runs_dir: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    report: Callable[[str], None],
) -> tuple[list[Check], dict[str, Any]]:
    """Let all ranks of the spec measure; return checks, and what was measured.

    Raises: ClusterddpError: no run could be planned or started; PreflightError: not within `timeout_s`.
    """
    job = resolved.job.model_copy(update={"restarts": 0})
    request = Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ, trial="deep check")
    plan = plan_run(dataclasses.replace(resolved, job=job), request)
    report(f"{plan.gang.world_size} ranks measure; the run is {plan.run}, which compiles for a minute or two on GPUs")
    run, world_size = _start(plan, timeout_s, report), plan.gang.world_size
    try:
        state = run.wait(_RUN_S)
    finally:
        run.cancel()  # no effect on a run that has ended
    findings = [finding for rank in range(world_size) for finding in read_findings(run.logs(rank))]
    checks = judge_ranks(findings, world_size=world_size, state=state, run=run.name)
    status = run.status()
    if status["nccl"]:
        checks.append(judge_transports(status["nccl"], status["warning"]))
    return checks, {
        "clusterddp": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "launcher": plan.launcher,
        "nodes": len(plan.gang.members),
        "ranks": world_size,
        "backend": plan.gang.backend,
        "state": state,
        "nccl": [{key: value for key, value in each.items() if key != "host"} for each in status["nccl"]],
        "findings": [finding.to_json() for finding in findings],
    }


def _start(plan: Plan, timeout_s: float, report: Callable[[str], None]) -> Run:
    """Submit a run, and wait until its ranks have started.

    Raises: PreflightError: they have not within `timeout_s`; the run is cancelled.
    """
    run = Run(submit(plan, report=report).run_dir)
    deadline = time.monotonic() + timeout_s
    while (state := run.wait(_POLL_S)) not in _STARTED and not RunState(state).finished:
        if time.monotonic() > deadline:
            run.cancel()
            raise PreflightError(
                f"{run.name} has not started within {timeout_s:g} s, and is cancelled: it is {state}",
                hint="--timeout S waits longer",
            )
    return run

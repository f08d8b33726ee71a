"""`doctor --job --deep`: start the ranks of a spec where they would train, by any launcher, and judge their findings.

The ranks measure with train/deep_check.py and print Findings (facts/deep_check.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp import __version__
from clusterddp.api import Run
from clusterddp.errors import PreflightError
from clusterddp.facts.checks import Check, Result, note, ok, red, to_json
from clusterddp.facts.deep_check import (
    PROBES,
    Compile,
    Environment,
    Finding,
    Peers,
    Reductions,
    Rendezvous,
    Training,
    read_findings,
)
from clusterddp.facts.judge import LITTLE_LOCKED
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_run
from clusterddp.run.view import RunState
from clusterddp.submission.submit import submit
from clusterddp.system.units import format_bytes

if TYPE_CHECKING:
    from clusterddp.planning.entry import Trial
    from clusterddp.spec.load import ResolvedSpec

_RUN_S = 900.0
"""How long the ranks may take from their start; compiling takes most of it."""
_HANG_S = 120.0
_POLL_S = 0.2
_STARTED = ("RUNNING", "STOPPING")
_SLOW_END_S = 60.0
_STRAGGLER = 1.2
_FIXES = {
    "compile": "a C compiler and Python's headers on the nodes (gcc, python3-dev), or train.compile=never",
    "all_reduce": "NCCL_DEBUG=INFO under env: prints which network and which GPUs it could not use",
    "peers": "all GPUs of a node have to be visible to each of its ranks: no --gpu-bind, no gpus_per_task",
}


def measure_ranks(
    resolved: ResolvedSpec,
    runs_dir: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    report: Callable[[str], None],
) -> tuple[list[Check], dict[str, Any]]:
    """Let all ranks of the spec measure, then hang and be cancelled; return checks, and the report.

    Raises: ClusterddpError: no run could be planned or started; PreflightError: not within `timeout_s`.
    """
    plan = _plan(resolved, runs_dir, environ, "deep check")
    report(f"{plan.gang.world_size} ranks measure; the run is {plan.run}, which compiles for a minute or two on GPUs")
    run, state = _carry_out(plan, timeout_s, report)
    world_size = plan.gang.world_size
    findings = _read(run, world_size)
    checks = judge_ranks(findings, world_size=world_size, state=state, run=run.name)
    status = run.status()
    if status["nccl"]:
        checks.append(judge_transports(status["nccl"], status["warning"]))
    ended_s = None
    if world_size > 1 and state == "COMPLETED":
        ended_s = _time_hang(_plan(resolved, runs_dir, environ, "hang"), timeout_s, report)
        checks.append(judge_hang(ended_s, backend=plan.gang.backend))
    return checks, {
        "schema": 1,
        "clusterddp": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "launcher": plan.launcher,
        "nodes": len(plan.gang.nodes),
        "ranks": world_size,
        "backend": plan.gang.backend,
        "state": state,
        "hang_ended_s": ended_s,
        "nccl": [{key: value for key, value in each.items() if key != "host"} for each in status["nccl"]],
        **to_report(checks, findings),
    }


def judge_ranks(findings: Sequence[Finding], *, world_size: int, state: str, run: str) -> list[Check]:
    """Judge the findings of a run's ranks; `state`: in which the run ended."""
    logs = f"clusterddp logs {run} --rank all"
    checks = []
    for probe in PROBES:
        of_probe = [finding for finding in findings if finding.probe == probe]
        if of_probe and probe in _JUDGES:
            checks.append(Check(name=probe.replace("_", "-"), results=_by_host(of_probe, _JUDGES[probe])))
    if state != "COMPLETED":
        last = {finding.rank: finding.probe for finding in findings}
        missing = world_size - len(last)
        far = f"; last reported: {', '.join(sorted(set(last.values())))}" if last else ""
        found = f"the ranks ended as {state}{far}" + (
            f"; {missing} of {world_size} reported nothing" if missing else ""
        )
        checks.append(Check(name="ranks", results={run: red(found, logs)}))
    return checks


def judge_transports(transports: Sequence[Mapping[str, Any]], warning: str) -> Check:
    """Judge NCCL's transport on each host, as `status` shows it; `warning`: that of the status."""
    results = {
        str(each["host"]): ok(", ".join(map(str, (each["network"], *each["devices"], *each["links"]))))
        for each in transports
    }
    if warning:
        results = {host: note(f"{result.found}; {warning}", _FIXES["all_reduce"]) for host, result in results.items()}
    return Check(name="transport", results=results)


def judge_hang(ended_s: float | None, *, backend: str) -> Check:
    """Judge how long the end of a gang took that hung in an all-reduce."""
    if ended_s is None:
        result = note(
            "not measured: the ranks did not get that far", "clusterddp list names the run; its logs have the reason"
        )
    elif ended_s > _SLOW_END_S:
        result = note(
            f"{ended_s:g} s until no rank was left", "nvidia-smi and dmesg on the nodes: a driver that is stuck"
        )
    else:
        result = ok(f"{ended_s:g} s until no rank was left")
    return Check(name=f"end of a hang in {backend}", results={"all": result})


def to_report(checks: Iterable[Check], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return both as JSON, with numbers in place of host names."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(each.host for each in findings))}
    return {
        "checks": [each | {"host": numbers.get(each["host"], each["host"])} for each in to_json(checks)],
        "findings": [each.to_json() | {"host": numbers[each.host]} for each in findings],
    }


def _plan(resolved: ResolvedSpec, runs_dir: Path, environ: Mapping[str, str], trial: Trial) -> Plan:
    job = resolved.job.model_copy(update={"restarts": 0})
    return plan_run(
        dataclasses.replace(resolved, job=job),
        Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ, trial=trial),
    )


def _carry_out(plan: Plan, timeout_s: float, report: Callable[[str], None]) -> tuple[Run, str]:
    """Submit a run and wait for its end; return it, and its state then."""
    run = _start(plan, timeout_s, report)
    try:
        state = run.wait(_RUN_S)
    finally:
        run.cancel()  # no effect on a run that has ended
    return run, state


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


def _time_hang(plan: Plan, timeout_s: float, report: Callable[[str], None]) -> float | None:
    """Start ranks that hang, cancel them, and return how long that took; None: they did not get that far."""
    report(f"the ranks of {plan.run} hang in an all-reduce, and are cancelled")
    run = _start(plan, timeout_s, report)
    deadline = time.monotonic() + _HANG_S
    try:
        while len([each for each in _read(run, plan.gang.world_size) if each.probe == "hang"]) < plan.gang.world_size:
            if time.monotonic() > deadline or run.wait(_POLL_S) not in _STARTED:
                return None
        time.sleep(1.0)  # into the all-reduce
        began = time.monotonic()
    finally:
        run.cancel()
    run.wait(_HANG_S)
    return round(time.monotonic() - began, 1)


def _read(run: Run, world_size: int) -> list[Finding]:
    return [finding for rank in range(world_size) for finding in read_findings(run.logs(rank))]


def _by_host(findings: Sequence[Finding], judge: Callable[[Sequence[Any]], Result]) -> dict[str, Result]:
    """Judge each host by its ranks: a failure of one of them comes first."""
    results = {}
    for host in dict.fromkeys(finding.host for finding in findings):
        own = [finding for finding in findings if finding.host == host]
        failed = [finding for finding in own if finding.found is None]
        if failed:
            worst = min(failed, key=lambda finding: finding.error == "failed on another rank")
            level = note if worst.probe == "compile" else red
            fix = _FIXES.get(worst.probe, "the log of that rank has more")
            results[host] = level(f"rank {worst.rank}: {worst.error}", fix)
        else:
            results[host] = judge([finding.found for finding in own])
    return results


def _judge_environment(ranks: Sequence[Environment]) -> Result:
    first = ranks[0]
    build = f"CUDA {first.cuda}" if first.cuda else "for the CPU"
    parts = [f"torch {first.torch} {build}", f"Python {first.python}"]
    parts += (
        [f"{len(ranks)} x {first.gpu}, capability {first.capability}"] if first.gpu else [f"{len(ranks)} ranks, no GPU"]
    )
    parts += [f"driver {first.driver}"] if first.driver else []
    parts += [f"NCCL {first.nccl}"] if first.nccl else []
    found = ", ".join(parts)
    if first.gpu and 0 <= first.locked_memory_bytes < LITTLE_LOCKED:
        return note(
            f"{found}; at most {format_bytes(first.locked_memory_bytes)} may be locked",
            "InfiniBand needs more: ulimit -l unlimited; on Slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    if first.gpu and first.compile_obstacle:
        return note(f"{found}; {first.compile_obstacle}: nothing can be compiled", _FIXES["compile"])
    return ok(found)


def _judge_rendezvous(ranks: Sequence[Rendezvous]) -> Result:
    slowest = max(each.seconds for each in ranks)
    return ok(f"{slowest:.1f} s, {ranks[0].backend}, on {', '.join(sorted({each.device for each in ranks}))}")


def _judge_reductions(ranks: Sequence[Reductions]) -> Result:
    sizes = ranks[0].sizes
    if not sizes:
        return note("nothing was measured")
    best = max(sizes, key=lambda each: each.bus_gb_per_s)
    fastest = f"{best.bus_gb_per_s:.3g} GB/s at {format_bytes(best.bytes)}"
    return ok(f"{sizes[0].ms:.3g} ms for {format_bytes(sizes[0].bytes)}; {fastest}")


def _judge_peers(ranks: Sequence[Peers]) -> Result:
    access = ranks[0].access
    count = len(access)
    if count < 2:
        return ok("one GPU: no peers")
    speeds = [speed for row in ranks[0].gb_per_s for speed in row if speed is not None]
    found = f"{count} GPUs copy at {min(speeds):.3g} to {max(speeds):.3g} GB/s" if speeds else f"{count} GPUs"
    apart = sum(not reached for row in access for reached in row)
    if apart:
        return note(f"{found}; {apart} of {count * (count - 1)} ways go through the host's memory", _FIXES["peers"])
    return ok(found)


def _judge_compile(ranks: Sequence[Compile]) -> Result:
    return ok(f"{max(each.seconds for each in ranks):.1f} s for a small function")


def _judge_training(ranks: Sequence[Training]) -> Result:
    first = ranks[0]
    found = f"{first.model}, {first.precision}, {first.batch:,} images: {first.step_ms:.3g} ms"
    found += f", {first.images_per_s:,.0f} images/s, checkpoint {first.checkpoint_s:.2g} s"
    if first.launches_per_step is not None:
        found += f", {first.launches_per_step:.0f} launches and {first.syncs_per_step:.2g} syncs a step"
    times = [each.step_ms for each in ranks]
    if max(times) > _STRAGGLER * statistics.median_low(times):
        return note(f"{found}; the slowest rank takes {max(times):.3g} ms", "what else runs there? nvidia-smi; top")
    return ok(found)


_JUDGES: dict[str, Callable[[Sequence[Any]], Result]] = {
    "environment": _judge_environment,
    "rendezvous": _judge_rendezvous,
    "all_reduce": _judge_reductions,
    "peers": _judge_peers,
    "compile": _judge_compile,
    "train": _judge_training,
}

"""What the findings of a deep check mean (facts/deep_check.py): red, a note or ok for each probe."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clusterddp.facts.checks import Check, Result, note, ok, red, to_json
from clusterddp.facts.deep_check import PROBES, Compile, Environment, Finding, Peers, Reductions, Rendezvous, Training
from clusterddp.facts.judge import LITTLE_LOCKED

_SLOW_END_S = 60.0
_STRAGGLER = 1.2
_MIB = 2**20
_FIXES = {
    "compile": "a C compiler and Python's headers on the nodes (gcc, python3-dev), or train.compile=never",
    "all_reduce": "NCCL_DEBUG=INFO under env: tells which network and which GPUs it could not use",
    "peers": "all GPUs of a node have to be visible to each of its ranks: no --gpu-bind, no gpus_per_task",
}


def judge_ranks(findings: Sequence[Finding], *, world_size: int, state: str, run: str) -> list[Check]:
    """Judge what the ranks of a run have told; `state`: how the run ended."""
    logs = f"clusterddp logs {run} --rank all"
    checks = []
    for probe in PROBES:
        told = [finding for finding in findings if finding.probe == probe]
        if told and probe in _JUDGES:
            checks.append(Check(name=probe.replace("_", "-"), results=_by_host(told, _JUDGES[probe])))
    if state != "COMPLETED":
        last = {finding.rank: finding.probe for finding in findings}
        silent = world_size - len(last)
        far = f"; last told of: {', '.join(sorted(set(last.values())))}" if last else ""
        words = f"the ranks ended as {state}{far}" + (f"; {silent} of {world_size} told nothing" if silent else "")
        checks.append(Check(name="ranks", results={run: red(words, logs)}))
    return checks


def judge_transports(transports: Sequence[Mapping[str, Any]], warning: str) -> Check:
    """Judge what NCCL has taken on each host, as `status` tells it; `warning`: what status warns of."""
    results = {
        str(each["host"]): ok(", ".join(map(str, (each["network"], *each["devices"], *each["links"]))))
        for each in transports
    }
    if warning:
        results = {host: note(f"{result.found}; {warning}", _FIXES["all_reduce"]) for host, result in results.items()}
    return Check(name="transport", results=results)


def judge_hang(ended_s: float | None, *, backend: str) -> Check:
    """Judge how long it took to end a gang that hung in an all-reduce."""
    if ended_s is None:
        result = note(
            "not measured: the ranks did not come that far", "clusterddp list names the run; its logs tell why"
        )
    elif ended_s > _SLOW_END_S:
        result = note(
            f"{ended_s:g} s until no rank was left", "nvidia-smi and dmesg on the nodes: a driver that is stuck"
        )
    else:
        result = ok(f"{ended_s:g} s until no rank was left")
    return Check(name=f"end of a hang in {backend}", results={"all": result})


def to_report(checks: Iterable[Check], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return both as JSON, without the names of hosts: they are numbered as they come."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(each.host for each in findings))}
    return {
        "checks": [each | {"host": numbers.get(each["host"], each["host"])} for each in to_json(checks)],
        "findings": [each.to_json() | {"host": numbers[each.host]} for each in findings],
    }


def _by_host(told: Sequence[Finding], judge: Callable[[Sequence[Any]], Result]) -> dict[str, Result]:
    """Judge each host by its ranks: what failed on one of them comes first."""
    results = {}
    for host in dict.fromkeys(finding.host for finding in told):
        own = [finding for finding in told if finding.host == host]
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
    words = [f"torch {first.torch} {build}", f"Python {first.python}"]
    words += (
        [f"{len(ranks)} x {first.gpu}, capability {first.capability}"] if first.gpu else [f"{len(ranks)} ranks, no GPU"]
    )
    words += [f"driver {first.driver}"] if first.driver else []
    words += [f"NCCL {first.nccl}"] if first.nccl else []
    found = ", ".join(words)
    if first.gpu and 0 <= first.locked_memory_bytes < LITTLE_LOCKED:
        return note(
            f"{found}; at most {_size(first.locked_memory_bytes)} may be locked",
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
    return ok(f"{sizes[0].ms:.3g} ms for {_size(sizes[0].bytes)}; {best.bus_gb_per_s:.3g} GB/s at {_size(best.bytes)}")


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


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB" if num_bytes >= _MIB else f"{num_bytes // 1024} KiB"


_JUDGES: dict[str, Callable[[Sequence[Any]], Result]] = {
    "environment": _judge_environment,
    "rendezvous": _judge_rendezvous,
    "all_reduce": _judge_reductions,
    "peers": _judge_peers,
    "compile": _judge_compile,
    "train": _judge_training,
}

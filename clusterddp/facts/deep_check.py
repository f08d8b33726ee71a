"""The deep check: what the ranks of a run have measured, in the form in which they print it, and its judgement.

The ranks measure with train/deep_check.py and print Findings; doctor/ranks.py starts them and reads their logs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.facts.checks import Check, Result, note, ok, red
from clusterddp.facts.judge import LITTLE_LOCKED
from clusterddp.system.units import format_bytes
from clusterddp.wire import Written, build, read_object

MARK = "clusterddp-deep-check "
ELSEWHERE = "failed on another rank"
_SLOW_STEP, _SLOW_PRODUCT = 1.2, 1.5
"""Times the median of all ranks: a slower host is named."""
_SLOW_LINK = 2.0
"""Times slower than the best link. Shared switches and busy cores make less of a difference."""
_LEAST_OF_RATE = 0.1
"""Part of the interface's nominal speed, below which a link is slow even without another to compare it with."""
_LOOK = "what else runs there? nvidia-smi -q -d CLOCK,TEMPERATURE; top"
_FIXES = {
    "compile": "a C compiler and Python's headers on the nodes (gcc, python3-dev), or train.compile=never",
    "all_reduce": "NCCL_DEBUG=INFO under env: prints which network and which GPUs it could not use",
    "links": "cable, port, switch? ethtool IFACE and ip -s link show errors and speed; iperf3 measures between the two",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The environment of a rank; None: not there, or not known."""

    python: str
    torch: str
    cuda: str | None
    cudnn: int | None
    nccl: str | None
    cores: int
    locked_memory_bytes: int
    """-1: no limit."""
    shm_bytes: int | None
    compile_obstacle: str | None
    """What torch.compile lacks here to build kernels for GPUs."""
    variables: dict[str, str]
    gpus: int
    """How many this rank sees."""
    gpu: str | None = None
    """The model of its own one."""
    capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    topology: str | None = None
    """What `nvidia-smi topo -m` prints; of the first rank of a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The rendezvous of the ranks."""

    seconds: float
    backend: str
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A product of two matrices, by this rank alone."""

    ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """An all-reduce of one size; `bus_gb_per_s`: the bus bandwidth of nccl-tests."""

    bytes: int
    ms: float
    bus_gb_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reductions:
    """All-reduces of all ranks."""

    sizes: tuple[Reduction, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A message to the first rank of the next host, and back; measured by the first rank of each host."""

    hosts: tuple[str, str]
    """This host and the next one; the hosts form a ring."""
    mbyte_per_s: float
    latency_ms: float
    """One way."""
    rated_mbyte_per_s: float | None = None
    """The nominal speed of this host's interface."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """How long torch.compile took for a small function."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Steps of the trainer on noise."""

    model: str
    precision: str
    batch: int
    """Images of a step, over all ranks."""
    step_ms: float
    images_per_s: float
    checkpoint_s: float
    compile_s: float | None = None
    peak_bytes: int | None = None
    """The most memory that a rank had on its GPU."""


PROBES: dict[str, Any] = {
    "environment": Environment,
    "rendezvous": Rendezvous,
    "compute": Compute,
    "all_reduce": Reductions,
    "links": Link,
    "compile": Compile,
    "train": Training,
}
"""In the order in which the ranks measure them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Written):
    """The result of one probe on one rank."""

    rank: int
    host: str
    probe: str
    found: Any = None
    """One of PROBES; None: it failed."""
    error: str | None = None
    """Why."""

    def to_line(self) -> str:
        return MARK + json.dumps(self.to_json())


def read_findings(log: str) -> Iterable[Finding]:
    """Read the findings in the log of a rank; an invalid line is skipped."""
    for line in log.splitlines():
        if not line.startswith(MARK):
            continue
        try:
            finding = build(Finding, read_object(line.removeprefix(MARK)), "finding")
            kind = PROBES[finding.probe]
            found = None if finding.found is None else build(kind, finding.found, finding.probe)
        except (ValueError, KeyError):
            continue
        yield dataclasses.replace(finding, found=found)


def judge_ranks(findings: Sequence[Finding], *, world_size: int, state: str, run: str) -> list[Check]:
    """Judge the findings of a run's ranks; `state`: in which the run ended."""
    logs = f"clusterddp logs {run} --rank all"
    checks = []
    for probe in PROBES:
        of_probe = [finding for finding in findings if finding.probe == probe]
        if of_probe:
            checks.append(Check(name=probe.replace("_", "-"), results=_judge_probe(probe, of_probe)))
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


def _judge_probe(probe: str, findings: Sequence[Finding]) -> dict[str, Result]:
    """Judge each host by its ranks: a failure of one of them comes first."""
    every = [finding.found for finding in findings if finding.found is not None]
    results = {}
    for host in dict.fromkeys(finding.host for finding in findings):
        own = [finding for finding in findings if finding.host == host]
        failed = [finding for finding in own if finding.found is None]
        if failed:
            worst = min(failed, key=lambda finding: finding.error == ELSEWHERE)
            level = note if probe == "compile" else red
            fix = _FIXES.get(probe, "the log of that rank has more")
            results[host] = level(f"rank {worst.rank}: {worst.error}", fix)
        else:
            results[host] = _JUDGES[probe]([finding.found for finding in own], every)
    return results


def _judge_environment(ranks: Sequence[Environment], every: Sequence[Environment]) -> Result:
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


def _judge_rendezvous(ranks: Sequence[Rendezvous], every: Sequence[Rendezvous]) -> Result:
    slowest = max(each.seconds for each in ranks)
    return ok(f"{slowest:.1f} s, {ranks[0].backend}, on {', '.join(sorted({each.device for each in ranks}))}")


def _judge_product(ranks: Sequence[Compute], every: Sequence[Compute]) -> Result:
    slowest, median = max(each.ms for each in ranks), statistics.median_low([each.ms for each in every])
    found = f"{slowest:.3g} ms for a product of matrices"
    if slowest > _SLOW_PRODUCT * median:
        return note(f"{found}, {slowest / median:.1f} times the median: all ranks wait for it", _LOOK)
    return ok(found)


def _judge_link(ranks: Sequence[Link], every: Sequence[Link]) -> Result:
    """Judge the links of a host: a host all of whose links are slow is at fault, not its neighbours."""
    best = max(link.mbyte_per_s for link in every)
    slow = [
        link
        for link in every
        if link.mbyte_per_s < max(best / _SLOW_LINK, (link.rated_mbyte_per_s or 0.0) * _LEAST_OF_RATE)
    ]

    def links_of(host: str) -> list[Link]:
        return [link for link in every if host in link.hosts]

    def is_bad(host: str) -> bool:
        return len(links_of(host)) > 1 and all(link in slow for link in links_of(host))

    def spell(host: str, link: Link) -> str:
        other = link.hosts[1] if host == link.hosts[0] else link.hosts[0]
        rated = f" of {link.rated_mbyte_per_s:.0f}" if link in slow and link.rated_mbyte_per_s else ""
        return f"with {other} {link.mbyte_per_s:.0f}{rated} MB/s, {link.latency_ms:.2g} ms"

    host = ranks[0].hosts[0]
    if is_bad(host):
        return note(
            f"slow with each neighbour: {'; '.join(spell(host, link) for link in links_of(host))}", _FIXES["links"]
        )
    doubtful = [link for link in links_of(host) if link in slow and not any(map(is_bad, link.hosts))]
    if doubtful:
        return note(f"slow: {'; '.join(spell(host, link) for link in doubtful)}", _FIXES["links"])
    return ok("; ".join(spell(host, link) for link in links_of(host)))


def _judge_reductions(ranks: Sequence[Reductions], every: Sequence[Reductions]) -> Result:
    sizes = ranks[0].sizes
    if not sizes:
        return note("nothing was measured")
    best = max(sizes, key=lambda each: each.bus_gb_per_s)
    fastest = f"{best.bus_gb_per_s:.3g} GB/s at {format_bytes(best.bytes)}"
    return ok(f"{sizes[0].ms:.3g} ms for {format_bytes(sizes[0].bytes)}; {fastest}")


def _judge_compile(ranks: Sequence[Compile], every: Sequence[Compile]) -> Result:
    return ok(f"{max(each.seconds for each in ranks):.1f} s for a small function")


def _judge_training(ranks: Sequence[Training], every: Sequence[Training]) -> Result:
    first = ranks[0]
    found = f"{first.model}, {first.precision}, {first.batch:,} images: {first.step_ms:.3g} ms"
    found += f", {first.images_per_s:,.0f} images/s, checkpoint {first.checkpoint_s:.2g} s"
    slowest = max(each.step_ms for each in ranks)
    if slowest > _SLOW_STEP * statistics.median_low([each.step_ms for each in every]):
        return note(f"{found}; the slowest rank takes {slowest:.3g} ms", _LOOK)
    return ok(found)


_JUDGES: dict[str, Callable[[Sequence[Any], Sequence[Any]], Result]] = {
    "environment": _judge_environment,
    "rendezvous": _judge_rendezvous,
    "compute": _judge_product,
    "all_reduce": _judge_reductions,
    "links": _judge_link,
    "compile": _judge_compile,
    "train": _judge_training,
}
"""Probe -> how a host is judged: by what its ranks have found, and by what those of all hosts have."""

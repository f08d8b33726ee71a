"""What the ranks of a deep check measure (train/deep_check.py), in the form in which they print it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clusterddp.wire import build, read_object

MARK = "clusterddp-deep-check "


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
class Peers:
    """Pairs of GPUs of a host: whether one accesses the other's memory, and GB/s of a copy."""

    access: tuple[tuple[bool, ...], ...]
    gb_per_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """How long torch.compile took for a small function."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Steps of the trainer on noise; launches and syncs are counted on GPUs only."""

    model: str
    precision: str
    batch: int
    """Images of a step, over all ranks."""
    step_ms: float
    images_per_s: float
    checkpoint_s: float
    compile_s: float | None = None
    launches_per_step: float | None = None
    syncs_per_step: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Whether this rank hangs."""

    waits: bool


PROBES: dict[str, Any] = {
    "environment": Environment,
    "rendezvous": Rendezvous,
    "all_reduce": Reductions,
    "peers": Peers,
    "compile": Compile,
    "train": Training,
    "hang": Hang,
}
"""In the order in which the ranks carry them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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

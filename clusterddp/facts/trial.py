"""What came of trials: how fast hosts compute, and how fast two of them talk to each other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTrial:
    """Two hosts that reduced numbers together, or tried to."""

    hosts: tuple[str, str]
    mbyte_per_s: float | None = None
    latency_ms: float | None = None
    error: str | None = None
    """Why they could not."""


@dataclass(kw_only=True, slots=True)
class Trials:
    """Everything that was tried."""

    pairs: list[PairTrial] = field(default_factory=list)
    compute_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Host -> device -> time of one product of matrices."""
    failed: dict[str, str] = field(default_factory=dict)
    """Hosts whose torch could not even be asked to compute, and why."""

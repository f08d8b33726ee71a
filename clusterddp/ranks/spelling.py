"""Writes ranks for people."""

from __future__ import annotations

from collections.abc import Iterable


def spell_ranks(ranks: Iterable[int]) -> str:
    """Write ranks: `rank 3`, `ranks 0-7`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"

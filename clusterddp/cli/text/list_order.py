"""The order of runs in `list --sort KEY`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp.look.status import RunSummary

_KEYS = ("accuracy", "created", "name", "time")
SORT_KEYS = [*_KEYS, *(f"-{key}" for key in _KEYS)]
SORT_HELP = (
    "accuracy (best first), created (newest first), time (that of its ranks, longest first) or name; -KEY reverses."
)


def sort_summaries(summaries: Sequence[RunSummary], order: str) -> list[RunSummary]:
    """Sort runs by one of `SORT_KEYS`, by `time` as the column TIME shows it; runs without a value come last."""
    reverses, key = order.startswith("-"), order.removeprefix("-")
    if key == "name":
        return sorted(summaries, key=lambda run: run.run, reverse=reverses)
    value_of: dict[str, Callable[[RunSummary], Any]] = {
        "accuracy": lambda run: run.progress.accuracy if run.progress else None,
        "created": lambda run: run.created,
        "time": lambda run: run.times.running_s or None,
    }

    def place(run: RunSummary) -> float:
        value = value_of[key](run)
        return math.inf if value is None else value if reverses else -value

    return sorted(summaries, key=place)

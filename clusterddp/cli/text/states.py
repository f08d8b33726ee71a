"""Show the state of a run."""

from __future__ import annotations

import click

WITHOUT_REASON = {"RUNNING", "COMPLETED"}
"""States that are shown without a reason."""
_COLORS = {"COMPLETED": "green", "FAILED": "red", "LOST": "red", "RUNNING": "cyan"}
_COLORS |= {"STOPPING": "yellow", "KILLED": "yellow"}


def state_text(state: str) -> str:
    """Return the state in its colour."""
    return click.style(state, fg=_COLORS.get(state), bold=True)

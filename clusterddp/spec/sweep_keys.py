"""Which keys a sweep may vary, and why the others not: its runs may differ in all but what is asked of machines.

The rule is the same for all launchers, so that a sweep that runs as a queue on a laptop is a job array on Slurm.
"""

from __future__ import annotations

WHICH = "a sweep varies train.*, env.*, entry.* and network.*; its runs share everything else"

_SECTIONS = {"train": "lr", "env": "NAME", "entry": "args", "network": "backend"}
"""Sections whose keys may be swept, each with an example."""
_OF_THE_MACHINES = "it is part of what is asked of machines, which all runs of a sweep share"
_OF_THE_SWEEP = "it is one for the whole sweep"
_REASONS = {
    "resources": _OF_THE_MACHINES,
    "device": _OF_THE_MACHINES,
    "slurm": _OF_THE_MACHINES,
    "ssh": _OF_THE_MACHINES,
    "container": _OF_THE_MACHINES,
    "entry.owns_ranks": _OF_THE_MACHINES,
    "start": _OF_THE_MACHINES,
    "launcher": _OF_THE_SWEEP,
    "name": _OF_THE_SWEEP,
    "after": _OF_THE_SWEEP,
    "secrets": _OF_THE_SWEEP,
    "snapshot": _OF_THE_SWEEP,
    "sweep": _OF_THE_SWEEP,
    "restarts": f"{_OF_THE_SWEEP}, for Slurm starts all tasks of a job array again or none",
}


def why_not_swept(path: tuple[str, ...]) -> str | None:
    """Say why a key cannot be swept; None when it can, or is none that a spec has."""
    reason = _REASONS.get(path[0]) or _REASONS.get(".".join(path[:2]))
    if reason:
        return f"cannot be swept: {reason}"
    if path[0] in _SECTIONS and len(path) == 1:
        return f"cannot be swept: it is a section; name a key of it, such as {path[0]}.{_SECTIONS[path[0]]}"
    return None

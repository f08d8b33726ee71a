"""What a tracker is given of a run besides its metrics: an identity, its configuration, tags, and how it ended."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.relay.rows import numbers_of
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.run.sweep import sweep_of
from clusterddp.run.view import RunState, RunView
from clusterddp.spec.secret_values import HIDDEN, hide_secret_arguments
from clusterddp.system.files import read_json

_LEFT_OUT = frozenset({"env", "secrets", "notify"})
"""Sections of a spec that may have values for the run alone."""
_SECRET = re.compile(r"(?i)(token|secret|passw|credential|api_?key|access_?key|private)|//[^/@\s]+@")
"""Names of values, and addresses with a user, that stay out of a tracker: more than `spec.secret_values` hides."""
_MAX_DEPTH = 16

Config = Mapping[str, "str | int | float | bool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """A run, as a tracker shows it."""

    id: str
    """The id of the tracker's run: the same for every relay of the run, and for all its attempts."""
    run: str
    title: str
    """The name of the spec and that of the run: `cifar brisk-otter-3`."""
    group: str | None
    """The sweep of the run."""
    name: str
    launcher: str
    created: float
    """Seconds since the epoch."""
    config: Config


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended."""

    state: RunState
    attempt: int
    reason: str
    ended: float
    """Seconds since the epoch; 0: no process recorded it."""
    summary: Mapping[str, float]
    """The numbers of summary.json; empty where the run has none."""


def read_facts(run: RunDir) -> RunFacts:
    """Read what a tracker is given of a run.

    Raises: ClusterddpError, OSError: its record cannot be read.
    """
    record, sweep = read_run(run), sweep_of(run)
    # Neither the token, which is a secret, nor the directory, which may be moved or copied.
    identity = hashlib.sha256(f"{record.run} {record.created_ns}".encode()).hexdigest()[:16]
    plan = read_json(run.plan)
    spec = plan.get("spec") if isinstance(plan, dict) else None
    return RunFacts(
        id=identity,
        run=record.run,
        title=" ".join(filter(None, [record.name, record.run, record.variant])),
        group=sweep.path.name if sweep else None,
        name=record.name,
        launcher=record.launcher,
        created=record.created_ns / 1e9,
        config=flat_config(spec if isinstance(spec, dict) else {})
        | ({"parent": record.parent} if record.parent else {}),
    )


def read_ending(run: RunDir, view: RunView) -> RunEnd:
    """Read how a run that has ended ended."""
    try:
        summary = read_json(run.summary)
    except (ClusterddpError, OSError):
        summary = None
    cause = view.end.root_cause if view.end else None
    return RunEnd(
        state=view.state,
        attempt=view.attempt or 0,
        reason=cause.error if cause else view.reason,
        ended=view.end.ended if view.end else 0.0,
        summary=dict(numbers_of(summary)) if isinstance(summary, dict) and view.state is RunState.COMPLETED else {},
    )


def flat_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Flatten a spec, a key for each value that is set: `train.lr`; what may be a secret is left out."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in _LEFT_OUT or value in (None, {}, [], HIDDEN):
            continue
        if isinstance(value, dict) and name.count(".") < _MAX_DEPTH:
            flat |= flat_config(hide_secret_arguments(value) if name == "entry" else value, f"{name}.")
        elif not _SECRET.search(f"{name} {value}" if "//" in str(value) else name):
            flat[name] = value if isinstance(value, str | int | float) else " ".join(map(str, value))
    return flat

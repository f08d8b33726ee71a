"""The plan of a run that goes on with other values: more epochs, other nodes, another time limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_run
from clusterddp.spec.load import flatten, load_spec
from clusterddp.spec.train import DEFINING

_FIXED = (
    *("launcher", "name", "snapshot", "entry.script", "entry.module", "entry.function", "entry.command"),
    *(f"train.{key}" for key in DEFINING),
)
"""Keys that make it this run; with another value of one it would be another run."""


def plan_changed(plan: Plan, spec: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Return the plan of the same run with other values; its code stays the snapshot of the first submit.

    `spec`: the run's own, as it was resolved.
    Raises: SpecError: an override is wrong. UsageError: the run cannot go on with it. PreflightError: the machines do
    not fit.
    """
    resolved = load_spec(spec, overrides, environ=environ, whole=True)
    request = Request(runs_dir=plan.runs_dir, working_dir=plan.working_dir, environ=environ, parent=plan.parent)
    other = plan_run(resolved, request)
    now, then = flatten(other.spec), flatten(plan.spec)
    fixed = [key for key in _FIXED if now.get(key) != then.get(key)]
    if fixed:
        raise UsageError(
            f"{plan.run}: resume goes on with the same {fixed[0]}, {then.get(fixed[0])}, not {now.get(fixed[0])}",
            hint=f"clusterddp submit {plan.run} {' '.join(overrides)} starts another run",
        )
    _refuse_other_first_host(plan, other)
    # The place of the code stays, even where today a submit would run it in its own place.
    first = plan.gang.entry
    entry = dataclasses.replace(
        other.gang.entry,
        target=first.target,
        working_dir=first.working_dir,
        import_paths=first.import_paths,
        code_dir=first.code_dir,
    )
    gang = dataclasses.replace(other.gang, token=plan.token, entry=entry)
    return move_plan(dataclasses.replace(other, token=plan.token, gang=gang, snapshot=plan.snapshot), plan.run_dir)


def _refuse_other_first_host(plan: Plan, other: Plan) -> None:
    """Raises: UsageError: the run's checkpoints are on a host that would not be the first any more."""
    if plan.ssh and other.ssh and plan.ssh.hosts[0].host != other.ssh.hosts[0].host:
        first = plan.ssh.hosts[0].host
        raise UsageError(
            f"{plan.run}: its checkpoints are on {first}, which has to stay the first of the hosts",
            hint=f"name {first} first, or submit a new run",
        )

"""A run that is joined again: every machine goes on in the directory that it has of it, with the next attempt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.launchers.state import read_state
from clusterddp.planning.plan import Plan, move_plan
from clusterddp.run.attempts import adopt, make_next_attempt, refuse_resume
from clusterddp.run.directory import RunDir, find_run
from clusterddp.run.record import log_event, read_run
from clusterddp.submission.join.plan import LAUNCHER
from clusterddp.system.files import write_json, write_text


def find_earlier(runs_dir: Path, name: str) -> RunDir:
    """Find the run to go on with, as this machine has it.

    Raises: RunNotFoundError: it has none of that name. UsageError: that was not joined, or goes on, or is done.
    """
    run = RunDir(find_run(runs_dir, name).path.absolute())
    if read_run(run).launcher != LAUNCHER:
        raise UsageError(f"{run.name}: was not joined", hint=f"clusterddp resume {run.name}")
    refuse_resume(run, read_state(run), instead="without --resume it is another run")
    return run


def under_its_name(plan: Plan, run: RunDir) -> Plan:
    """Return the plan as one of an earlier run: with its name, its directory and its token."""
    token = read_run(run).token
    return move_plan(dataclasses.replace(plan, token=token, gang=dataclasses.replace(plan.gang, token=token)), run.path)


def next_attempt(run: RunDir) -> int:
    """Number the attempt that comes next."""
    attempts = run.attempts()
    return attempts[-1].number + 1 if attempts else 0


def open_again(run: RunDir, plan: Plan, attempt: int) -> None:
    """Make the directory of the next attempt, and write down what it runs.

    Raises: UsageError: somebody else has. ClusterddpError: the file system refuses.
    """
    make_next_attempt(run, attempt)
    write_json(run.plan, plan.to_json())
    write_text(run.spec, plan.spec_text)
    adopt(run, attempt)
    log_event(run, "resumed", attempt=attempt)

"""`clusterddp join --resume`: every machine starts the next attempt in its own directory of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.launchers.state import read_state
from clusterddp.planning.plan import Plan, move_plan
from clusterddp.run.attempts import adopt, make_next_attempt, refuse_resume
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import log_event, read_run
from clusterddp.submission.join.plan import LAUNCHER
from clusterddp.system.files import write_json, write_text


def find_earlier(runs_dir: Path, name: str) -> RunDir:
    """Find the run to resume in this machine's runs directory.

    Raises: RunNotFoundError: it has no such run. UsageError: the run was not joined, still runs, or has completed.
    """
    run = RunDir(find_run(runs_dir, name).path.absolute())
    if read_run(run).launcher != LAUNCHER:
        raise UsageError(f"{run.name}: was not started by clusterddp join", hint=f"clusterddp resume {run.name}")
    refuse_resume(run, read_state(run), instead="clusterddp join without --resume starts a new run")
    return run


def under_its_name(plan: Plan, run: RunDir) -> Plan:
    """Return the plan with the name, the directory and the token of an earlier run."""
    token = read_run(run).token
    return move_plan(dataclasses.replace(plan, token=token, gang=dataclasses.replace(plan.gang, token=token)), run.path)


def next_attempt(run: RunDir) -> int:
    """Return the number of the next attempt."""
    attempts = run.attempts()
    return attempts[-1].number + 1 if attempts else 0


def open_again(run: RunDir, plan: Plan, attempt: int) -> None:
    """Make the directory of the next attempt, and write its plan.

    Raises: UsageError: another process has made it. ClusterddpError: the file system refuses.
    """
    make_next_attempt(run, attempt)
    write_json(run.plan, plan.to_json())
    write_text(run.spec, plan.spec_text)
    adopt(run, attempt)
    log_event(run, "resumed", attempt=attempt)

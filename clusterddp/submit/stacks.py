"""Ask a run where its ranks are, and wait for the report of its head."""

from __future__ import annotations

import time
from collections.abc import Mapping

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.registry import launcher_named
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir, is_of_another_user
from clusterddp.run.record import read_gang, read_run
from clusterddp.run.stacks import StackReport, newest_report, read_report
from clusterddp.run.state import RunState

ANSWER_S = 20.0
"""How long the head may take: it looks twice a second, and waits 7 s for its nodes."""
_POLL_S = 0.1
_FETCH_S = 0.5


def collect_stacks(run: RunDir, environ: Mapping[str, str], *, timeout_s: float = ANSWER_S) -> StackReport:
    """Return where the ranks of a run are now; of a run that has ended, the newest stacks that it has.

    Raises: UsageError: it has no ranks, and no stacks. ClusterddpError: no answer in time.
    """
    run = RunDir(run.path.absolute())
    with Synchroniser([run], environ, interval_s=_FETCH_S) as sync:
        sync.update()
        view, record = read_state(run), read_run(run)
        if view.attempt is None or view.state is not RunState.RUNNING:
            kept = newest_report(run)
            if kept is None:
                raise UsageError(f"{run.name} has no ranks to ask: it is {view.state.value}")
            return kept
        if is_of_another_user(run.path):
            raise UsageError(f"{run.name} belongs to another user, and only that user can ask its ranks")
        attempt = run.attempt(view.attempt)
        wanted = launcher_named(record.launcher, environ).request_stacks(run, attempt, sync)
        deadline = time.monotonic() + timeout_s
        while (report := read_report(attempt, wanted)) is None:
            if time.monotonic() >= deadline:
                head = read_gang(run).nodes[0].host
                raise ClusterddpError(
                    f"{run.name}: the supervisor of node 0 on {head} has not reported stacks within {timeout_s:g} s",
                    hint=f"clusterddp status {run.name} says whether the run has ended meanwhile",
                )
            time.sleep(_POLL_S)
            sync.update()
        return report

"""Runs that machines join: `clusterddp join` starts them on each machine; they end as local runs do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.launchers.local.launcher import LocalLauncher
from clusterddp.run.attempts import Report, Started, no_report

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.run.directory import RunDir

_HINT = "run clusterddp join SPEC --resume {run} on each of them"


class JoinLauncher(LocalLauncher):
    """Starts no run; ends joined runs on this machine as local runs."""

    def start(self, run: RunDir, attempt: int, report: Report = no_report) -> Started:
        """Refuse: the user runs the join command on every machine."""
        raise UsageError(f"{run.name}: several machines joined this run", hint=_HINT.format(run=run.name))

    def renew(self, plan: Plan) -> Plan:
        """Refuse for the same reason."""
        raise UsageError(f"{plan.run}: several machines joined this run", hint=_HINT.format(run=plan.run))

"""Runs that machines have joined: the `join` command starts them on each machine; they end as local runs do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.launchers.local.launcher import LocalLauncher
from clusterddp.run.attempts import Started, Tell, silence

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.run.directory import RunDir

_AGAIN = "clusterddp join SPEC --resume {run}, on each of them"


class JoinLauncher(LocalLauncher):
    """Runs of several machines that joined."""

    def start(self, run: RunDir, attempt: int, environ: Mapping[str, str], tell: Tell = silence) -> Started:
        """Refuse: every machine has to be there."""
        raise UsageError(f"{run.name}: was joined by several machines", hint=_AGAIN.format(run=run.name))

    def renew(self, plan: Plan, environ: Mapping[str, str]) -> Plan:
        """Refuse a further start, likewise."""
        raise UsageError(f"{plan.run}: was joined by several machines", hint=_AGAIN.format(run=plan.run))

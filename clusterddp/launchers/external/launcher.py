"""Runs that torchrun, mpirun, srun or a person has started with `clusterddp worker`: what can be done about them here.

They are that launcher's to start and to end; here they are looked at, asked to stop, and on this host killed.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.launchers.external.state import read_worker_state
from clusterddp.run.attempts import Started, Tell, silence
from clusterddp.run.cleanup import find_processes, sweep
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, read_ranks

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.results.sync import Synchroniser
    from clusterddp.run.directory import AttemptDir
    from clusterddp.run.outcome import AttemptEnd
    from clusterddp.run.view import RunView
    from clusterddp.slurm.queue import Slurm


class ExternalLauncher:
    """Runs that another launcher starts and ends."""

    killed = "cancelled; its ranks here were killed"
    things = "processes"

    def check(self, plan: Plan) -> None:
        """Refuse nothing: all that can be checked was checked when the plan was made."""

    def start(self, run: RunDir, attempt: int, environ: Mapping[str, str], tell: Tell = silence) -> Started:
        """Refuse: only the launcher that has started the run can start it again."""
        raise _not_ours(run.name)

    def withdraw(self, run: RunDir, environ: Mapping[str, str]) -> str:
        """Say in words what became of a run whose submit was interrupted: nothing was submitted."""
        return ""

    def renew(self, plan: Plan, environ: Mapping[str, str]) -> Plan:
        """Refuse a further start."""
        raise _not_ours(plan.run)

    def observer(self, environ: Mapping[str, str]) -> Slurm | None:
        """Return what tells the state of a run that is being ended: its files and processes do."""
        return None

    def request_end(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> bool:
        """Say that nobody answers a CANCEL file: there is no supervisor.

        Raises: UsageError: none of the ranks is on this host.
        """
        if not find_processes(f"{record.token}."):
            ranks = [rank for rank in read_ranks(run.attempts()[-1]) if rank.ended is None]
            hosts = ", ".join(sorted({rank.host for rank in ranks})) or "another host"
            run.cancel_file.unlink(missing_ok=True)
            raise UsageError(
                f"{run.name}: {record.job_id} has started it, its ranks are on {hosts}, none on {socket.gethostname()}",
                hint="end it where it was started: scancel, or Ctrl-C in mpirun or torchrun; or cancel it on that host",
            )
        return False

    def request_stop(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> None:
        """Leave it to the ranks, which look for the STOP file."""

    def end_by_force(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], timeout_s: float) -> bool:
        """Kill the ranks on this host; the launcher then ends the others. False when there are none."""
        if not find_processes(f"{record.token}."):
            return False
        sweep(f"{record.token}.", timeout_s=max(1.0, timeout_s))
        return True

    def clear_away(self, run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> int:
        """Kill what is left of a run on this host; return how many processes that were."""
        strays = find_processes(f"{record.token}.")
        if strays:
            sweep(f"{record.token}.", timeout_s=5.0)
        return len(strays)

    def read_state(
        self, run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None, slurm: Slurm
    ) -> RunView | None:
        """Read the state of a run that has not ended for good."""
        return read_worker_state(run, record, attempt)


def _not_ours(run: str) -> UsageError:
    return UsageError(
        f"{run}: another launcher has started it, and has to start it again",
        hint=f"the same command as before with: clusterddp worker SPEC --resume {run}",
    )

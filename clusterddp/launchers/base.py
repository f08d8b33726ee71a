"""The interface of a launcher: what submit, resume, cancel and status ask of whatever starts the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from clusterddp.run.attempts import Started, Tell, silence

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.results.sync import Synchroniser
    from clusterddp.run.directory import AttemptDir, RunDir
    from clusterddp.run.outcome import AttemptEnd
    from clusterddp.run.record import RunRecord
    from clusterddp.run.view import RunView
    from clusterddp.slurm.queue import Slurm


class Launcher(Protocol):
    """Starts the processes of runs, ends them, and tells their state; it holds no state of its own.

    `environ` is the environment of the command that asks. `home` brings files of remote runs up to date.
    """

    @property
    def killed(self) -> str:
        """The reason that is recorded when a run is cancelled and `end_by_force` had to end it."""

    @property
    def things(self) -> str:
        """What `clear_away` counts, in the plural."""

    def check(self, plan: Plan) -> None:
        """Refuse a start that is known to fail, before anything is written.

        Raises: PreflightError.
        """

    def start(self, run: RunDir, attempt: int, environ: Mapping[str, str], tell: Tell = silence) -> Started:
        """Start an attempt whose directory is ready; `tell` hears what takes long.

        Raises: ClusterddpError: it is not started, and nothing of it is left. SlurmError, `transient`: it may be.
        """

    def withdraw(self, run: RunDir, environ: Mapping[str, str]) -> str:
        """Take back a start that was interrupted; return what became of it in words, or nothing."""

    def renew(self, plan: Plan, environ: Mapping[str, str]) -> Plan:
        """Return the plan for a further start: what depends on the machines' state is found anew.

        Raises: UsageError, PreflightError: it cannot be started again, or not now.
        """

    def request_stop(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> None:
        """Ask a run to checkpoint and end, by all ways besides its STOP file.

        Raises: ClusterddpError: it cannot be asked.
        """

    def request_end(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> bool:
        """Ask a run to end at once, by all ways besides its CANCEL file; True when it will record the end itself.

        Raises: ClusterddpError: it cannot be asked.
        """

    def end_by_force(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], timeout_s: float) -> bool:
        """End a run that does not answer; False when nothing of it was there to end.

        Raises: ClusterddpError: some of it cannot be reached, or cannot be ended.
        """

    def clear_away(self, run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> int:
        """End what is left of a run that has ended; return how much that was.

        Raises: ClusterddpError: some of it cannot be reached, or cannot be ended.
        """

    def observer(self, environ: Mapping[str, str]) -> Slurm | None:
        """Return the `slurm` that `read_state` asks while a run is being ended; None where Slurm is not asked."""

    def read_state(
        self, run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None, slurm: Slurm
    ) -> RunView | None:
        """Read the state of a run that has not ended for good; `end` is that of `attempt`, the newest one.

        None: its files have changed meanwhile, and are to be read again.
        """

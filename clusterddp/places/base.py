"""What a place does for a run: it starts its processes, ends them, and says what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from clusterddp.planning.processes import EXEC_MODULE
from clusterddp.run.stacks import request_stacks
from clusterddp.system.python import module_command

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm
    from clusterddp.places.ssh.sync import Synchroniser
    from clusterddp.planning.plan import Plan
    from clusterddp.run.directory import AttemptDir, RunDir
    from clusterddp.run.record import RankRecord, RunRecord
    from clusterddp.run.state import Answer, Records


Report = Callable[[str], object]
"""Receives messages about the progress of slow steps."""


def no_report(message: str) -> None:
    """Drop a progress message."""


class Launcher:
    """Starts and ends the processes of runs, and says what is left of them, for a command with this environment.

    It keeps no state of its own. `sync` updates the local files of remote runs. What a place does not do otherwise
    stands here: processes on this machine that look for the run's files.
    """

    killed = "cancelled; its supervisors did not answer"
    """The reason recorded for a cancelled run that `end_by_force` had to end."""
    things = "processes"
    """What `clear_away` counts, in the plural."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def check(self, plan: Plan) -> None:
        """Refuse a start that is known to fail, before anything is written.

        Raises: PreflightError.
        """

    def look_ahead(self, plan: Plan) -> Plan:
        """Return a new plan with what is known of the machines now: nodes that are left out, notes."""
        return plan

    def start(self, run: RunDir, attempt: int, report: Report = no_report) -> str:
        """Start an attempt whose directory is ready; `report` receives progress messages of slow steps.

        Raises: ClusterddpError: the attempt did not start and left nothing. SlurmError, `transient`: it may have
        started.
        """
        raise NotImplementedError

    def withdraw(self, run: RunDir) -> str:
        """Undo an interrupted start that left something; return a sentence on the result, or an empty string."""
        return ""

    def renew(self, plan: Plan) -> Plan:
        """Return the plan for the next start; values that depend on the machines' state are read again.

        Raises: UsageError, PreflightError: the run cannot start again, or not now.
        """
        raise NotImplementedError

    def request_stop(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> None:
        """Ask a run to checkpoint and end, where it does not look for its STOP file, which is written already.

        Raises: ClusterddpError: the run cannot be reached.
        """

    def signal_script(self, run: RunDir, record: RunRecord) -> bool:
        """Send a batch script the signal of its `--signal`, before its time; False: it names none.

        Raises: ClusterddpError: the run cannot be reached.
        """
        return False

    def request_stacks(self, run: RunDir, attempt: AttemptDir, sync: Synchroniser) -> str:
        """Ask the head of a run where its ranks are; return the id of the report that it will write.

        Raises: ClusterddpError: the run cannot be reached. UsageError: no supervisor of ours has its ranks.
        """
        return request_stacks(attempt)

    def exec_argv(
        self, run: RunDir, record: RunRecord, rank: RankRecord, words: Sequence[str], *, terminal: bool
    ) -> list[str]:
        """Return the program that runs a command on the machine, and in the job, of a running rank.

        `words`: the arguments of node/exec_command.py after the run's directory. `terminal`: somebody types into it.
        Raises: ClusterddpError: the job of the rank does not run, or it is in a container.
        """
        return list(module_command(EXEC_MODULE, str(run.path), *words))

    def request_end(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> bool:
        """Ask a run to end at once; its CANCEL file is written already. True: the run will record its own end.

        Raises: ClusterddpError: the run cannot be reached.
        """
        return True

    def end_by_force(self, run: RunDir, record: RunRecord, timeout_s: float) -> bool:
        """End a run that does not answer; False when no process or job of it was left.

        Raises: ClusterddpError: a process or job cannot be reached or ended.
        """
        raise NotImplementedError

    def clear_away(self, run: RunDir, record: RunRecord, *, left_out: Collection[str] = ()) -> int:
        """End leftover processes or jobs of a run that has ended; return their number.

        `left_out`: hosts that the next start leaves out, which may be away.
        Raises: ClusterddpError: one of them cannot be reached or ended.
        """
        raise NotImplementedError

    def probe(self, records: Records, slurm: Slurm) -> Answer:
        """Say whether anything is left of a run without a final end that will record its end."""
        raise NotImplementedError

"""The local launcher: starts a run on this machine, detached from whoever submits it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.launchers.local.leases import lease_gpus
from clusterddp.launchers.local.state import read_local_state
from clusterddp.planning.command_lines import launcher_command
from clusterddp.planning.environment import process_environment
from clusterddp.planning.local import assign_gpus, place_here
from clusterddp.ranks.environment import cookie
from clusterddp.run.attempts import Started, Tell, silence
from clusterddp.run.cleanup import answers_for_its_run, find_processes, sweep
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, read_run
from clusterddp.system.files import read_tail

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.results.sync import Synchroniser
    from clusterddp.run.directory import AttemptDir
    from clusterddp.run.outcome import AttemptEnd
    from clusterddp.run.view import RunView
    from clusterddp.slurm.queue import Slurm

START_TIMEOUT_S = 60.0
CLEAR_TIMEOUT_S = 5.0


class LocalLauncher:
    """Runs on this machine."""

    killed = "cancelled; its supervisors did not answer"
    things = "processes"

    def check(self, plan: Plan) -> None:
        """Refuse nothing: all that can be checked was checked when the plan was made."""

    def start(self, run: RunDir, attempt: int, environ: Mapping[str, str], tell: Tell = silence) -> Started:
        """Start the attempt; return when submitit has taken it over.

        The record names the job and its keeper by then: submitit's controller, whose death ends the run.
        Raises: PreflightError: others hold GPUs that it needs. ClusterddpError: it could not be started;
        no process of it is left.
        """
        token = read_run(run).token
        log = run.launcher_dir / "submit.log"
        leases = lease_gpus(run, environ)
        try:
            with leases or contextlib.nullcontext():
                exit_code = _hand_over(run, attempt, process_environment(cookie(token, "task"), environ), log, leases)
            job_id = read_run(run).job_id
            if exit_code != 0 or job_id is None:
                last_line = read_tail(log).rpartition("\n")[2].strip()  # of a traceback: what happened
                raise ClusterddpError(f"{run.name} could not be started: {last_line or f'exit code {exit_code}'}")
            return Started(job_id)
        except subprocess.TimeoutExpired as error:
            sweep(f"{token}.", timeout_s=5.0)
            raise ClusterddpError(
                f"{run.name} could not be started: no answer from submitit within {START_TIMEOUT_S:.0f} s"
            ) from error
        except BaseException:
            # An interrupt may have come at any point from the first process on; the cookie finds whatever there is.
            sweep(f"{token}.", timeout_s=5.0)
            raise

    def withdraw(self, run: RunDir, environ: Mapping[str, str]) -> str:
        """Say in words what became of a run whose submit was interrupted; `start` leaves nothing of it to speak of."""
        return ""

    def renew(self, plan: Plan, environ: Mapping[str, str]) -> Plan:
        """Return the plan for a further start, with the GPUs and the host that there are now.

        Raises: PreflightError: there are fewer GPUs than it had, or fewer are free.
        """
        nodes = place_here(lambda machine: assign_gpus(plan.run, plan.gang.nodes, machine), environ)
        return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, nodes=nodes))

    def observer(self, environ: Mapping[str, str]) -> Slurm | None:
        """Return what tells the state of a run that is being ended: files and processes do, nobody has to be asked."""
        return None

    def request_end(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> bool:
        """Leave it to the supervisors, which look for the CANCEL file four times a second and do answer."""
        return True

    def request_stop(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], sync: Synchroniser) -> None:
        """Leave it to the supervisors, which look for the STOP file likewise."""

    def end_by_force(self, run: RunDir, record: RunRecord, environ: Mapping[str, str], timeout_s: float) -> bool:
        """End a run whose supervisors do not answer (they hang, or are stopped); False when there is nothing to end.

        Raises: ClusterddpError: some of its processes cannot be killed.
        """
        if not find_processes(f"{record.token}."):
            return False
        _sweep(run, record, max(1.0, timeout_s))
        return True

    def clear_away(self, run: RunDir, record: RunRecord, environ: Mapping[str, str]) -> int:
        """See to it that nothing is left of a run that has ended; return how many processes had to be ended for that.

        Its supervisors and its task may just be on their way out, putting things in order. They take everything that
        carries the run's cookie for theirs, so the next attempt must not begin before they are gone.
        Raises: ClusterddpError: some cannot be killed.
        """
        family = f"{record.token}."
        deadline = time.monotonic() + CLEAR_TIMEOUT_S
        while any(answers_for_its_run(process) for process in find_processes(family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        strays = find_processes(family)
        if strays:
            _sweep(run, record, CLEAR_TIMEOUT_S)
        return len(strays)

    def read_state(
        self, run: RunDir, record: RunRecord, attempt: AttemptDir | None, end: AttemptEnd | None, slurm: Slurm
    ) -> RunView | None:
        """Read the state of a run that has not ended for good."""
        return read_local_state(run, record, attempt, end)


def _sweep(run: RunDir, record: RunRecord, timeout_s: float) -> None:
    left = sweep(f"{record.token}.", timeout_s=timeout_s)
    if left:
        raise ClusterddpError(f"{run.name}: processes {', '.join(map(str, left))} cannot be killed")


def _hand_over(run: RunDir, attempt: int, environment: dict[str, str], log: Path, leases: socket.socket | None) -> int:
    """Have submitit take the attempt over; return the exit code of the process that asks it to.

    What has no standard input of its own inherits the leases: submitit's controller, and the task from it.
    """
    with open(log, "ab", opener=_private) as output:
        process = subprocess.Popen(
            launcher_command(run.path, attempt),
            stdin=leases.fileno() if leases else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # No file of the user's lies there that could take the place of one of Python's modules.
            cwd=run.launcher_dir,
            env=environment,
            start_new_session=True,
            umask=0o077,
        )
    return process.wait(START_TIMEOUT_S)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

"""The local launcher: starts a run on this machine, detached from the submitting process, and says whether it is alive.

A run without a recorded end is alive while one process lives that will record its end: the submitter
before the start, then the task, the supervisors and their guards. Without such a process it has ended. No clock
decides it, so a run on a slow machine is never taken for lost.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.places.base import Launcher, Report, no_report
from clusterddp.places.local.task import BEGUN, GPUS_TAKEN
from clusterddp.planning.placement import GpusInUseError, assign_gpus, place_here
from clusterddp.planning.plan import move_plan, plan_json, read_plan
from clusterddp.planning.processes import launcher_command, process_environment
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.cleanup import end_processes, end_run_here, find_processes, is_supervising, marking
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, RunRecord, read_run
from clusterddp.run.state import START_GRACE_S, Answer, Records
from clusterddp.system.files import open_log, read_tail, write_json
from clusterddp.system.gpu_lease import busy_gpus, names_to_lease, spell_busy

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm
    from clusterddp.planning.plan import Plan

_TRIES = 5
"""How often another run may take a GPU between our look and our lease."""
START_TIMEOUT_S = 60.0
CLEAR_TIMEOUT_S = 5.0


class LocalLauncher(Launcher):
    """Runs on this machine."""

    def start(self, run: RunDir, attempt: int, report: Report = no_report) -> str:
        """Start the attempt; return when its task begins.

        By then the record names submitit's controller as job and keeper; the run ends when the controller dies.
        Raises: PreflightError: other runs hold GPUs that it needs. ClusterddpError: the run could not start and left no
        process.
        """
        token = read_run(run).token
        environment = process_environment(self._environ) | {COOKIE: cookie(token, "task")}
        try:
            answer = _start_task(run, attempt, environment)
            for _ in range(_TRIES):
                if answer != GPUS_TAKEN:
                    break
                plan = read_plan(run)  # another run took a GPU since it was planned
                write_json(run.plan, plan_json(move_plan(self.renew(plan), run.path)))
                answer = _start_task(run, attempt, environment)
            if answer == GPUS_TAKEN:
                plan = read_plan(run)
                names = names_to_lease((gpu for node in plan.gang.nodes for gpu in node.gpus), plan.run, plan.hold)
                users = spell_busy(busy_gpus(self._environ, gpus=names, foreign=False, hold=plan.in_hold))
                raise GpusInUseError(f"{run.name}: others have what it needs ({users})")
            job_id = read_run(run).job_id
            if answer != BEGUN or job_id is None:
                raise ClusterddpError(f"{run.name} could not be started: {_last_words(run)}")
            return job_id
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            end_processes(f"{token}.", timeout_s=5.0)
            raise ClusterddpError(
                f"{run.name} could not be started: its task has not begun within {START_TIMEOUT_S:.0f} s"
            ) from error
        except BaseException:
            # An interrupt may arrive after any process has started; the cookie finds all of them.
            end_processes(f"{token}.", timeout_s=5.0)
            raise

    def renew(self, plan: Plan) -> Plan:
        """Return the plan for the next start, with the GPUs and the host name of now."""
        gang, hold = plan.gang, plan.in_hold
        nodes = place_here(lambda machine: assign_gpus(plan.run, gang.nodes, machine), self._environ, hold=hold)
        return dataclasses.replace(plan, gang=dataclasses.replace(gang, nodes=nodes))

    def end_by_force(self, run: RunDir, record: RunRecord, timeout_s: float) -> bool:
        """Kill a run whose supervisors hang or are stopped; False when it has no process."""
        return _end_run(run, record, timeout_s=max(1.0, timeout_s)) > 0

    def clear_away(self, run: RunDir, record: RunRecord, *, left_out: Collection[str] = ()) -> int:
        """Wait for the last processes of a run that has ended, then kill those that are left; return their number.

        Its supervisors and its task may still clean up.
        """
        return _end_run(run, record, patience_s=CLEAR_TIMEOUT_S)

    def probe(self, records: Records, slurm: Slurm) -> Answer:
        """Look for a process on this machine that will record the end of the run."""
        record, start, attempt = records.record, records.start, records.attempt
        # Once the record names a keeper, the submitter does not count: one in a notebook may live for days.
        keeper = record.keeper or (record.submitter if records.was_handed_over else None)
        watchers = [ProcessIdentity.from_json(keeper)] if keeper else []
        if start is not None and records.end is None:
            if "supervisor" not in start:
                raise ClusterddpError(f"{records.run.path}: start.json names no supervisor")
            watchers.append(start["supervisor"])
        lives = [watcher.alive() for watcher in watchers]
        if any(lives):
            return Answer(life="alive")
        if None in lives:
            host = watchers[lives.index(None)].host
            return Answer(life="unknown", words=f"runs on {host}, which cannot be asked from here")
        # While a guard or the task cleans up, only the cookie finds the process. The run may belong to another user.
        left = find_processes(f"{record.token}.", uid=os.stat(records.run.path).st_uid)
        is_new = attempt is not None and abs(time.time() - os.stat(attempt.path).st_mtime) < START_GRACE_S
        if any(map(is_supervising, left)) or (is_new and not records.is_started and records.end is None):
            return Answer(life="alive")
        note = f"{len(left)} of its processes are left (clusterddp cancel {records.run.name} ends them)"
        return Answer(life="ended", words="its processes are gone", notes=(note,) if left else ())


def _end_run(run: RunDir, record: RunRecord, *, patience_s: float = 0.0, timeout_s: float = CLEAR_TIMEOUT_S) -> int:
    found, left = end_run_here(record.token, patience_s=patience_s, timeout_s=timeout_s)
    if left:
        raise ClusterddpError(f"{run.name}: processes {', '.join(map(str, left))} cannot be killed")
    return found


def _start_task(run: RunDir, attempt: int, environment: dict[str, str]) -> bytes:
    """Start the process that submits the attempt to submitit; return the task's answer, empty if it has ended.

    submitit's controller and the task inherit its standard input, which the answer comes from.
    Raises: TimeoutError, subprocess.TimeoutExpired: no answer within START_TIMEOUT_S.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, open_log(run.launcher_dir / "submit.log") as output, marking(None):
            process = subprocess.Popen(
                launcher_command(run.path, attempt),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                cwd="/",  # submitit starts Python, too, which imports from the directory that it starts in
                env=environment,
                start_new_session=True,
                umask=0o077,
            )
        ours.settimeout(START_TIMEOUT_S)
        answer = ours.recv(64)
    process.wait(START_TIMEOUT_S)
    return answer


def _last_words(run: RunDir) -> str:
    """Return the last line of the submit's log, or of the task's; that of a traceback is its message."""
    logs = [run.launcher_dir / "submit.log", *sorted(run.launcher_dir.glob("submitit/*_log.err"), key=os.path.getmtime)]
    lines = [read_tail(log).rpartition("\n")[2].strip() for log in (logs[0], *logs[:0:-1])]
    return next(filter(None, lines), "its task has ended")

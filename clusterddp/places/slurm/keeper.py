"""The batch process of a hold (hold.py): it starts one run after another in its job, until the hold ends.

For each run it starts what the batch script of the run's own job would have started (batch.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.batch import Carried, Signals, claim_attempt
from clusterddp.places.slurm.commands import read_time_left_s, run_slurm, show_job
from clusterddp.run.attempts import AttemptEnd, cancelled, end_run, failed, final_end
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.find import list_requests
from clusterddp.run.record import drop_secrets, log_event, read_run
from clusterddp.run.stop import request_stop
from clusterddp.system.files import is_file, open_log, write_json
from clusterddp.system.python import module_command
from clusterddp.system.storage import retry_outage

_POLL_S = 0.2
_LAST_S = 10.0
"""The hold ends so long before its job: Slurm would report a job that it has to end as TIMEOUT."""
_PATIENCE_S = 8.0
"""How long the supervisors of a run may take to end it after a cancel."""


def keep(carried: Carried, signals: Signals) -> int:
    """Start runs until the hold ends; return the exit code of its job."""
    attempt = claim_attempt(carried)
    if attempt is None:
        return 1
    signals.watch(attempt)
    attempt.asked.touch(mode=0o600)
    start = carried.start
    log_event(carried.run, "job_started", job_id=start.job_id, restart_count=0, host=start.host, attempt=attempt.number)
    end = _Keeper(carried, attempt, signals).serve()
    end_run(carried.run, end, attempt=attempt, token=carried.record.token)
    log_event(carried.run, "attempt_ended", attempt=attempt.number, outcome=end.outcome, reason=end.reason)
    return 0 if end.outcome == "COMPLETED" else 1


class _Keeper:
    """The batch process of a hold."""

    def __init__(self, carried: Carried, attempt: AttemptDir, signals: Signals) -> None:
        self._carried = carried
        self._hold = carried.run
        self._attempt = attempt
        self._signals = signals
        self._ends_at = self._find_end_of_job()
        self._run: RunDir | None = None
        """The run that runs."""
        self._request = Path()
        self._child: subprocess.Popen[bytes] | None = None
        """The process that carries it."""
        self._cancelled_at: float | None = None

    def serve(self) -> AttemptEnd:
        """Start one run after another; return why the hold ends, once none runs."""
        end: AttemptEnd | None = None
        while True:
            with contextlib.suppress(OSError):  # storage that is away may come back
                self._reap()
                if end is None:
                    end = self._find_end()
                    if end is not None and self._run is not None:
                        self._end_run(self._run, end)
                if self._run is not None:
                    self._watch_cancel(self._run)
                elif end is None:
                    self._start_next()
                else:
                    break
            time.sleep(_POLL_S)
        for path, run in list_requests(self._hold).items():
            if final_end(run) is None:
                end_run(run, failed(f"hold {self._hold.name} ended before it was started: {end.reason}"))
            path.unlink(missing_ok=True)
        return end

    def _find_end(self) -> AttemptEnd | None:
        """Say why the hold has to end; None: it goes on."""
        if is_file(self._hold.cancel_file):
            return cancelled("cancelled")
        if is_file(self._attempt.stop_file):
            return AttemptEnd(outcome="COMPLETED", reason="it was asked to end")
        over = AttemptEnd(outcome="COMPLETED", reason="its time is over")
        if self._signals.ended:
            job = None
            with contextlib.suppress(SlurmError):
                job = show_job(self._carried.start.job_id, self._carried.environment)
            if job is None or job.reason == "TimeLimit":
                return over
            return (
                cancelled("cancelled") if job.reason in {"None", ""} else failed(f"Slurm ended its job ({job.reason})")
            )
        if time.time() >= self._ends_at - _LAST_S and self._run is None:
            self._ends_at = self._find_end_of_job()  # it may have been extended
            return over if time.time() >= self._ends_at - _LAST_S else None
        return None

    def _find_end_of_job(self) -> float:
        with contextlib.suppress(SlurmError):
            argv = ["scontrol", "show", "job", "-o", self._carried.start.job_id]
            left_s = read_time_left_s(run_slurm(argv, environ=self._carried.environment))
            return float("inf") if left_s is None else time.time() + left_s
        return float("inf")

    def _start_next(self) -> None:
        for path, run in list_requests(self._hold).items():
            if not run.path.is_dir() or final_end(run) is not None:
                path.unlink(missing_ok=True)
                continue
            self._run, self._request, self._cancelled_at = run, path, None
            with open_log(run.launcher_dir / "job.log") as log:
                argv = module_command("clusterddp.places.slurm.batch", str(run.path))
                self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
            return

    def _reap(self) -> None:
        """Let go of a run that has ended; where its process has recorded no end, record one."""
        if self._run is None or self._child is None or self._child.poll() is None:
            return
        run, self._run = self._run, None
        if retry_outage(lambda: final_end(run)) is None:
            end_processes(f"{read_run(run).token}.", timeout_s=5.0)
            end_run(run, failed("the process of its hold that carried it ended", log="launcher/job.log"))
        self._end_steps()
        drop_secrets(run)
        self._request.unlink(missing_ok=True)

    def _end_run(self, run: RunDir, end: AttemptEnd) -> None:
        """End the run with the hold: at a checkpoint, unless the hold was cancelled."""
        if end.outcome == "COMPLETED":
            request_stop(run.newest_attempt().stop_file, f"hold {self._hold.name} ends")
        elif end.outcome == "CANCELLED":  # else its supervisors have asked Slurm why the job ends
            write_json(run.cancel_file, {"by": f"hold {self._hold.name}", "time": time.time()}, exclusive=True)

    def _watch_cancel(self, run: RunDir) -> None:
        """End the processes of a run whose supervisors do not end it after a cancel."""
        if self._cancelled_at is None and is_file(run.cancel_file):
            self._cancelled_at = time.monotonic()
        elif self._cancelled_at is not None and time.monotonic() >= self._cancelled_at + _PATIENCE_S:
            self._cancelled_at = float("inf")
            self._end_steps()

    def _end_steps(self) -> None:
        """Have Slurm end what is left of a run on any node: its step outlives an srun that was killed."""
        job, environ = self._carried.start.job_id, self._carried.environment
        with contextlib.suppress(SlurmError):
            argv = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]
            steps = run_slurm(argv, environ=environ).split()
            for step in (each for each in steps if each.rpartition(".")[2].isdecimal()):
                run_slurm(["scancel", step], environ=environ)

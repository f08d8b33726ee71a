"""`python -m clusterddp.launchers.slurm.batch RUN_DIR`: the batch script of a Slurm job, on its first node.

It claims the attempt that this start of the job carries, runs srun, which starts a task per rank, records the end when
nobody else was left to do so, and has the job started again when the run goes on. It decides nothing about the gang.

Slurm's TERM (a cancel, a requeue, a preemption, the time limit) reaches the tasks as well, and they know what to do: it
is survived here, until srun has ended or KillWait is over. USR2, which `scancel --batch` sends here alone, asks the
ranks to stop. For a sweep, a file stands in RUN_DIR's place that lists the runs beside it, one for each task of the
array.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from clusterddp.errors import ClusterddpError, RunCancelledError, SlurmError
from clusterddp.launchers.slurm.carried import Carried, JobStart, read_carried
from clusterddp.launchers.slurm.claim import claim_attempt, is_superseded
from clusterddp.launchers.slurm.requeue import go_on
from clusterddp.ranks.environment import START_AGAIN, inherited_environment
from clusterddp.run.attempts import end_or_spool, final_end
from clusterddp.run.cleanup import sweep
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, cancelled, failed, read_end
from clusterddp.run.record import drop_secrets, log_event, read_run
from clusterddp.run.spool import read_spooled, spool_end
from clusterddp.run.stop import request_stop
from clusterddp.slurm.control import JobNow, show_job
from clusterddp.system.storage import retry_outage, storage_timeout_s

_AGAIN = "clusterddp.launchers.slurm.again"
_END_TIMEOUT_S = 3.0
"""How long to look for the recorded end when srun has ended: the tasks leave only after it, but NFS may lag."""
_SRUN_TIMEOUT_S = 8.0
_SRUN_TIMEOUT_AFTER_FAILURE_S = 1.5
"""How long srun may take to end when the end is recorded: with a failure a host may be lost, for which it waits."""
_GOES_ON_ELSEWHERE = 75
"""Exit code of a job whose run goes on in another one: no job that waits for its success may begin."""
_NODE_FAILURE = re.compile(r"[Nn]ode failure on (\S+)")


@dataclass(slots=True)
class Signals:
    """What Slurm and people ask of the batch script."""

    ended: bool = False
    """TERM was seen: Slurm is ending the job."""
    stop: bool = False
    stop_file: Path | None = None

    def listen(self) -> None:
        """Take the signals over."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGUSR2, self._stop)

    def watch(self, attempt: AttemptDir) -> None:
        """From now on USR2 asks this attempt to stop; it may have been asked before."""
        self.stop_file = attempt.stop_file
        if self.stop:
            request_stop(self.stop_file, "SIGUSR2 to the job")

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        if self.stop_file is not None:
            # A full disk must not become an exception just anywhere.
            with contextlib.suppress(OSError):
                request_stop(self.stop_file, "SIGUSR2 to the job")


def main() -> int:
    """Carry the run through this start of the job; return the job's exit code."""
    signals = Signals()
    signals.listen()
    try:
        environ = inherited_environment()
        start = JobStart.of_environment(environ)
        run = find_run(sys.argv[1], environ)
        carried = read_carried(run, start, environ)
        if not start.carries(carried.record):
            raise ClusterddpError(f"{run.name}: job {start.job_id} is not the one that carries it now; nothing is done")
        return carry(carried, signals)
    except (ClusterddpError, OSError) as error:
        message = error.message if isinstance(error, ClusterddpError) else str(error)
        print(f"clusterddp: {message}", file=sys.stderr, flush=True)
        return 1


def find_run(argument: str, environ: Mapping[str, str]) -> RunDir:
    """Return the run to carry.

    Raises: ClusterddpError: it is not to be seen from this host.
    """
    path = Path(argument)
    if path.is_file():
        path = path.parent / path.read_text(encoding="utf-8").split()[int(environ["SLURM_ARRAY_TASK_ID"])]
    if not RunDir(path).record.is_file():
        host = environ.get("SLURMD_NODENAME") or os.uname().nodename
        raise ClusterddpError(f"{host}: {path}: no run is to be seen there; is it on storage that the nodes share?")
    return RunDir(path)


def carry(carried: Carried, signals: Signals) -> int:
    """Claim an attempt, run it and, if need be, have the job started again; return the exit code."""
    run, start = carried.run, carried.start
    attempt = claim_attempt(carried)
    if attempt is None:
        return _finish(run)
    signals.watch(attempt)
    log_event(
        run,
        "job_started",
        job_id=start.job_id,
        restart_count=start.restart_count,
        host=start.host,
        attempt=attempt.number,
    )
    log = run.launcher_dir / "tasks.log"
    said_before = log.stat().st_size if log.exists() else 0
    complaint = None if signals.ended else _run_srun(carried, attempt, log)
    _await_storage(carried, attempt)
    if is_superseded(run, attempt):
        return 1
    _await_end(run)
    # Ignored is inherited: what is asked of Slurm from here on must not die of the TERM that comes to the whole job.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _settled_end(run) is None:
        sweep(f"{carried.record.token}.", timeout_s=5.0)
        end = _explain(carried, complaint, _read_from(log, said_before), signals)
        end_or_spool(run, attempt, carried.record.token, end)
    return _conclude(carried, attempt)


def _run_srun(carried: Carried, attempt: AttemptDir, log: Path) -> str:
    """Run the tasks to their end; return how srun ended, in words."""
    argv = [*carried.srun, str(attempt.number)]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd=carried.run.launcher_dir,
            env={**carried.environment, START_AGAIN: json.dumps(["-m", _AGAIN, str(carried.run.path)])},
        )
    except OSError as error:
        return f"srun could not be started: {error}"
    finally:
        os.close(descriptor)
    code = _wait_for(process, carried.run, attempt)
    return f"srun was killed by signal {-code}" if code < 0 else f"srun left with exit code {code}"


def _wait_for(srun: subprocess.Popen[bytes], run: RunDir, attempt: AttemptDir) -> int:
    """Wait for srun to end; return its exit code.

    It waits for the tasks of a host that is lost until Slurm misses that host, which by default takes five minutes, and
    for the controller when it is cut off itself: once the end is recorded nothing is worth waiting for.
    """
    give_up_at = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return srun.wait(timeout=0.5)
        if give_up_at == float("inf"):
            give_up_at = time.monotonic() + _patience_s(run, attempt)
        if time.monotonic() >= give_up_at:
            srun.kill()


def _patience_s(run: RunDir, attempt: AttemptDir) -> float:
    """Say how long srun has to end from now on; infinity while the ranks run, or nothing can be read."""
    try:
        if is_superseded(run, attempt):
            return _SRUN_TIMEOUT_S
        end = _settled_end(run)
    except (ClusterddpError, OSError):
        return float("inf")
    if end is None:
        return float("inf")
    return _SRUN_TIMEOUT_AFTER_FAILURE_S if end.outcome == "FAILED" else _SRUN_TIMEOUT_S


def _await_storage(carried: Carried, attempt: AttemptDir) -> None:
    """Wait until the run's directory can be read.

    Raises: ClusterddpError: not within `storage_timeout_s`; unless the head has done so, that is spooled as the end.
    """
    run, start = carried.run, carried.start
    try:
        retry_outage(run.newest_attempt)
    except OSError as error:
        reason = f"{run.path}: cannot be read on {start.host} for {storage_timeout_s():g} s: {error.strerror}"
        spool_end(carried.record.token, attempt.number, failed(reason, host=start.host))
        raise ClusterddpError(reason) from error


def _await_end(run: RunDir) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _settled_end(run) is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _settled_end(run: RunDir) -> AttemptEnd | None:
    """Return the recorded end of the run, or of what this start of the job could do for it; None: it goes on here."""
    attempt = run.newest_attempt()
    end = read_end(attempt) or read_spooled(read_run(run).token, attempt.number)
    return end if end is not None and (end.needs_job or not end.will_restart) else None


def _explain(carried: Carried, complaint: str | None, said: str, signals: Signals) -> AttemptEnd:
    """Say why an attempt ended when none of its supervisors and guards could."""
    run, start = carried.run, carried.start
    job = _ask(carried)
    if job is not None and job.restarts == start.restart_count and signals.ended and _was_cancelled(job):
        return cancelled("the job was cancelled (scancel)")
    lost = _NODE_FAILURE.search(said)
    last_line = said.rstrip().rpartition("\n")[2].strip()
    if signals.ended:
        reason = "Slurm ended the job before its ranks had stopped"
    elif lost:
        reason = f"{lost[1]} is lost: {last_line}"
    else:
        reason = f"{complaint}, and nobody has recorded how the ranks ended" + (f": {last_line}" if last_line else "")
    number = run.newest_attempt().number + 1
    goes_on = bool(signals.ended or lost) and carried.may_begin(number)
    return failed(reason, host=lost[1] if lost else start.host, log="launcher/tasks.log", goes_on=goes_on)


def _ask(carried: Carried) -> JobNow | None:
    try:
        return show_job(carried.start.job_id, carried.environment)
    except SlurmError:
        return None


def _was_cancelled(job: JobNow) -> bool:
    return job.ends and not job.preempted and job.reason != "TimeLimit"


def _conclude(carried: Carried, attempt: AttemptDir) -> int:
    run = carried.run
    last = retry_outage(run.newest_attempt)
    end = read_end(last)
    if end is None or not end.will_restart:
        return _finish(run)
    by = go_on(carried, last)
    print(f"attempt {last.number} ended ({end.reason}); the next one is started by {by}", file=sys.stderr, flush=True)
    if final_end(run) is not None:
        return _finish(run)
    return _GOES_ON_ELSEWHERE


def _finish(run: RunDir) -> int:
    """Remove the secrets of a run that has ended; return the exit code that says how."""
    drop_secrets(run)
    end = retry_outage(lambda: final_end(run))
    if end is None or end.outcome == "FAILED":
        code = end.root_cause.exit_code if end and end.root_cause else None
        return min(max(code or 1, 1), 255)
    # Nor is a run that was stopped done: no job that waits for its success may begin.
    return 0 if end.outcome == "COMPLETED" else RunCancelledError.exit_code


def _read_from(log: Path, offset: int) -> str:
    """Read what was said in a log since; its last 8 KiB at most."""
    try:
        with log.open("rb") as file:
            file.seek(max(offset, file.seek(0, 2) - 8192))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())

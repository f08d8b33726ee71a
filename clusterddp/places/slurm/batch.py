"""`python -m clusterddp.places.slurm.batch RUN_DIR`: the batch script of a Slurm job, on its first node.

It claims an attempt, runs srun, which starts one task per rank, records the end if no other process could, and has the
job started again if the run continues: it requeues the job, or submits a follow-up job. With `elastic`, and in a hold,
it first begins the next attempt in the same job, as another step. When its own host is lost, Slurm requeues the job by
itself (`--requeue`). It decides nothing about the ranks.

Slurm's SIGTERM (a cancel, a requeue, a preemption, the time limit) reaches the tasks as well, which handle it. This
process ignores it until srun exits or Slurm's KillWait is over. SIGUSR2, which `scancel --batch` sends to this process
only, asks the ranks to stop. For a sweep, RUN_DIR is a file that lists one run for each task of the job array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from clusterddp.errors import ClusterddpError, RunCancelledError, SlurmError
from clusterddp.network.hostlist import expand
from clusterddp.places.slurm.commands import END_TIME, down_nodes, read_time_left_s, run_slurm, show_job
from clusterddp.places.slurm.state import find_job
from clusterddp.places.slurm.step_nodes import StepNodes, give_back
from clusterddp.ranks.environment import COOKIE, cookie, inherited_environment
from clusterddp.run.attempts import (
    AttemptEnd,
    cancelled,
    close_attempt,
    end_run,
    failed,
    final_end,
    find_end,
    later_claimed,
    make_attempt,
    read_end,
    spell_exit,
    spool_end,
)
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.job_tag import job_tag, tag_of
from clusterddp.run.node_marks import learn
from clusterddp.run.record import JobAnswer, RunRecord, drop_secrets, log_event, read_run, write_job_answer
from clusterddp.run.seal import refuse_changed
from clusterddp.run.steps import is_batch_script
from clusterddp.run.stop import request_stop
from clusterddp.system.files import (
    MAX_RECORD_BYTES,
    is_file,
    open_log,
    read_json,
    read_last_bytes,
    read_regular,
    write_json,
)
from clusterddp.system.own_directory import demand_own
from clusterddp.system.storage import retry_outage, set_storage_timeout, storage_timeout_s

_END_TIMEOUT_S = 3.0
"""How long to look for the recorded end after srun has exited: the tasks exit only after it, but NFS may lag."""
_SRUN_TIMEOUT_S = 8.0
_SRUN_TIMEOUT_AFTER_FAILURE_S = 1.5
"""How long srun may take to exit once the end is recorded; after a failure it may wait for a lost host."""
_GOES_ON_ELSEWHERE = 75
"""Exit code of a job whose run continues in another job: no job with an afterok dependency on it may start."""
_NODE_FAILURE = re.compile(r"[Nn]ode failure on (\S+)")
_KILLED = re.compile(r"^srun: error: (\S+): tasks? \S+: (?:Killed|Terminated)", re.M)
"""Slurm does so that ends, on a node that answers again, an earlier start of the same job."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_UPDATE_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each try to change a job that was queued again; Slurm's KillWait, 30 s by default, is longer than all."""


@dataclass(slots=True)
class Signals:
    """The signals that the batch script has received."""

    ended: bool = False
    """True after SIGTERM: Slurm is ending the job."""
    stop: bool = False
    stop_file: Path | None = None

    def listen(self) -> None:
        """Install the handlers."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGUSR2, self._stop)

    def watch(self, attempt: AttemptDir) -> None:
        """Make SIGUSR2 ask this attempt to stop, at once if it has arrived already."""
        self.stop_file = attempt.stop_file
        if self.stop:
            request_stop(self.stop_file, "SIGUSR2 to the job")

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        if self.stop_file is not None:
            # A full disk must not raise an exception at a random place.
            with contextlib.suppress(OSError):
                request_stop(self.stop_file, "SIGUSR2 to the job")


def main() -> int:
    """Run this start of the job; return the job's exit code."""
    signals = Signals()
    signals.listen()
    try:
        environ = inherited_environment()
        start = JobStart.of_environment(environ)
        run = find_run(sys.argv[1], environ)
        if is_batch_script(run):
            from clusterddp.places.slurm.script import run_script

            return run_script(run, start, sys.argv[2:])
        os.chdir(run.launcher_dir)  # `ps` finds the run's name by it
        carried = read_carried(run, start, environ)
        if not start.carries(carried.record):
            raise ClusterddpError(f"{run.name}: job {start.job_id} is not its newest job, so this job starts nothing")
        if carried.record.is_hold:
            from clusterddp.places.slurm.keeper import keep

            return keep(carried, signals)
        return carry(carried, signals)
    except (ClusterddpError, OSError) as error:
        message = error.message if isinstance(error, ClusterddpError) else str(error)
        print(f"clusterddp: {message}", file=sys.stderr, flush=True)
        return 1


def find_run(argument: str, environ: Mapping[str, str]) -> RunDir:
    """Return the run of this job."""
    path = Path(argument)
    if path.is_file():
        task = environ["SLURM_ARRAY_TASK_ID"]
        names = read_regular(path, MAX_RECORD_BYTES).decode().split()
        name = next((name for name in names if name.endswith(f".{task}")), None)
        if name is None:
            raise ClusterddpError(f"{path}: found no run of task {task} of the job array")
        path = path.parent / name
    if not RunDir(path).record.is_file():
        host = environ.get("SLURMD_NODENAME") or os.uname().nodename
        raise ClusterddpError(f"{host}: {path}: found no run there; is it on storage that the nodes share?")
    demand_own(path)
    return RunDir(path)


def carry(carried: Carried, signals: Signals) -> int:
    """Claim an attempt, run it, and have the job started again if the run continues; return the exit code."""
    run, start = carried.run, carried.start
    if (place := carried.environment.get("XDG_STATE_HOME")) is not None:
        os.environ["XDG_STATE_HOME"] = place  # that of the submitting shell, for the spool and the marks of nodes
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
    if carried.change:
        log_event(run, "nodes_changed", attempt=attempt.number, text=carried.change)
    log = run.launcher_dir / "tasks.log"
    log_size_before = log.stat().st_size if log.exists() else 0
    srun_end = None if signals.ended else _run_srun(carried, attempt, log)
    _wait_for_storage(carried, attempt)
    if later_claimed(run, attempt.number) is not None:
        return 1
    _wait_for_end(run)
    # Child processes inherit it: Slurm's commands must survive the SIGTERM that the whole job receives.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _settled_end(run) is None:
        end_processes(f"{carried.record.token}.", timeout_s=5.0)
        end = _explain(carried, srun_end, read_last_bytes(log, start=log_size_before).decode(errors="replace"), signals)
        end_run(run, end, attempt=attempt, token=carried.record.token)
    last = read_end(retry_outage(run.newest_attempt))
    if last is not None and last.will_restart:
        if (again := _again_in_job(carried, last, signals)) is not None:
            signals.listen()
            return carry(again, signals)
        if carried.record.in_hold:
            reason = f"{last.reason}; its hold ends"
            end_run(run, dataclasses.replace(last, reason=reason, will_restart=False, needs_job=False, ended=0.0))
    return _conclude(carried, attempt)


def _again_in_job(carried: Carried, last: AttemptEnd, signals: Signals) -> Carried | None:
    """Return the run as its next attempt begins in the same job; None: it does not, or too few nodes are left there."""
    nodes, start, environ = carried.nodes, carried.start, carried.environment
    if last.outcome != "FAILED" or signals.ended or (nodes is None and not carried.record.in_hold):
        return None
    try:
        job = show_job(start.job_id, environ)
        if job is None or job.ends or job.preempted or job.restarts > start.restart_count:
            return None
        if nodes is None:
            return carried
        learn(carried.run)
        cause = last.root_cause
        why = dict.fromkeys(down_nodes(environ), "Slurm finds it down")
        if cause is not None and cause.of_node:
            what = cause.error.partition("; its rank")[0]
            why[cause.host] = what.partition(" is lost: ")[2] or what
        why = {host: text for host, text in why.items() if host in nodes.hosts}
        left = nodes.without(why, carried.record.cluster or "")
        if start.host in why or len(left.hosts) < nodes.min_nodes:
            return None
        if why:
            give_back(start.job_id, left.hosts, environ)
    except (ClusterddpError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return None
    return dataclasses.replace(carried, nodes=left, change=left.explain(nodes.taken, why))


def _run_srun(carried: Carried, attempt: AttemptDir, log: Path) -> str:
    """Run srun until it exits; return a text that says how it ended."""
    srun = carried.srun if carried.nodes is None else carried.nodes.step(carried.srun)
    argv = [*srun, str(attempt.number)]
    try:
        with open_log(log) as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=carried.run.launcher_dir,
                env=carried.environment,
            )
    except OSError as error:
        return f"srun could not be started: {error}"
    code = _wait_for_srun(process, carried.run, attempt)
    return f"srun {spell_exit(code)}"


def _wait_for_srun(srun: subprocess.Popen[bytes], run: RunDir, attempt: AttemptDir) -> int:
    """Wait for srun to exit; return its exit code.

    srun waits for the tasks of a lost host until Slurm notices the loss (300 s by default), and for a controller that
    it cannot reach. Once the end is recorded, srun is killed after `_srun_timeout_s`.
    """
    give_up_at = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return srun.wait(timeout=0.5)
        if give_up_at == float("inf"):
            give_up_at = time.monotonic() + _srun_timeout_s(run, attempt)
        if time.monotonic() >= give_up_at:
            srun.kill()


def _srun_timeout_s(run: RunDir, attempt: AttemptDir) -> float:
    """Return how long srun may still run; infinity while the ranks run or the run directory cannot be read."""
    try:
        if later_claimed(run, attempt.number) is not None:
            return _SRUN_TIMEOUT_S
        end = _settled_end(run)
    except (ClusterddpError, OSError):
        return float("inf")
    if end is None:
        return float("inf")
    return _SRUN_TIMEOUT_AFTER_FAILURE_S if end.outcome == "FAILED" else _SRUN_TIMEOUT_S


def _wait_for_storage(carried: Carried, attempt: AttemptDir) -> None:
    """Wait until the run's directory can be read.

    Raises: ClusterddpError: not within `storage_timeout_s`; the spool then holds this as the end, unless it has one.
    """
    run, start = carried.run, carried.start
    try:
        retry_outage(run.newest_attempt)
    except OSError as error:
        reason = f"{run.path}: {start.host} could not read it for {storage_timeout_s():g} s: {error.strerror}"
        spool_end(carried.record.token, attempt.number, failed(reason, host=start.host))
        raise ClusterddpError(reason) from error


def _wait_for_end(run: RunDir) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _settled_end(run) is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _settled_end(run: RunDir) -> AttemptEnd | None:
    """Return the end of the run, or of its last attempt in this start of the job; None: the run continues here."""
    attempt = run.newest_attempt()
    end = find_end(attempt, read_run(run).token)
    return end if end is not None and (end.needs_job or not end.will_restart) else None


def _explain(carried: Carried, srun_end: str | None, srun_log: str, signals: Signals) -> AttemptEnd:
    """Explain the end of an attempt whose supervisors and guards recorded none."""
    run, start = carried.run, carried.start
    job = None
    with contextlib.suppress(SlurmError):
        job = show_job(start.job_id, carried.environment)
    if carried.record.in_hold and is_file(run.cancel_file):
        return cancelled("cancelled; its supervisors did not answer")
    is_ended = job is not None and job.ends and not job.preempted and job.restarts == start.restart_count
    if is_ended and job is not None and job.reason in {"None", ""}:  # also before this process handled its SIGTERM
        return cancelled("the job was cancelled (scancel)")
    lost, killed = _NODE_FAILURE.search(srun_log), _KILLED.search(srun_log)
    last_line = srun_log.rstrip().rpartition("\n")[2].strip()
    if signals.ended:
        reason = "Slurm ended the job before its ranks had stopped"
    elif lost:
        reason = f"{lost[1]} is lost: {last_line}"
    elif killed:
        reason = f"its tasks on {killed[1]} were killed, and no process recorded how the ranks ended: {last_line}"
    else:
        reason = f"{srun_end}, and no process recorded how the ranks ended" + (f": {last_line}" if last_line else "")
    number = run.newest_attempt().number + 1
    will_restart = bool(signals.ended or lost or killed) and carried.may_begin(number)
    host, is_lost = (lost[1], True) if lost else (killed[1] if killed else start.host, False)
    return failed(reason, host=host, log="launcher/tasks.log", goes_on=will_restart, of_node=is_lost)


def _conclude(carried: Carried, attempt: AttemptDir) -> int:
    """Have the job started again if the run continues; return the exit code of the job."""
    run = carried.run
    last = retry_outage(run.newest_attempt)
    end = read_end(last)
    if end is None or not end.will_restart:
        return _finish(run)
    learn(run)
    by = start_next_attempt(carried, last)
    print(f"attempt {last.number} ended ({end.reason}); the next one is started by {by}", file=sys.stderr, flush=True)
    if final_end(run) is not None:
        return _finish(run)
    return _GOES_ON_ELSEWHERE


def _finish(run: RunDir) -> int:
    """Delete the secrets of a run that has ended; return the exit code for its outcome."""
    drop_secrets(run)
    learn(run)
    end = retry_outage(lambda: final_end(run))
    if end is None or end.outcome == "FAILED":
        code = end.root_cause.exit_code if end and end.root_cause else None
        return min(max(code or 1, 1), 255)
    # A stopped run is not done either: no job with an afterok dependency on it may start.
    return 0 if end.outcome == "COMPLETED" else RunCancelledError.exit_code


def start_next_attempt(carried: Carried, attempt: AttemptDir) -> str:
    """Requeue the job, or submit a follow-up job, for the attempt after `attempt`; return what starts it.

    Retries for as long as this process lives when the controller does not answer. The job's number of restarts shows
    whether a requeue without an answer took effect.
    """
    run = carried.run
    pause_s = _FIRST_PAUSE_S
    while True:
        if retry_outage(run.newest_attempt).number > attempt.number:
            return "another start of the job"
        if is_file(run.cancel_file):
            end_run(run, cancelled("cancelled before it was started again"))
            return "nothing: the run was cancelled"
        try:
            return _try(carried, attempt)
        except SlurmError as error:
            if not error.transient:
                return _give_up(run, error)
            print(f"{error.message}; retrying in {pause_s:.0f} s", file=sys.stderr, flush=True)
        except (ClusterddpError, OSError) as error:
            return _give_up(run, error)
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def _try(carried: Carried, attempt: AttemptDir) -> str:
    """Try once; return what starts the next attempt.

    Raises: SlurmError: `transient`: the caller has to retry.
    """
    start, environ = carried.start, carried.environment
    job = show_job(start.job_id, environ)
    if job is not None and job.restarts > start.restart_count:
        return "the same job, requeued"
    if job is None:
        return _follow_up(carried, attempt, "Slurm no longer knows the job")
    changes, left_out = _next_request(carried)  # before: Slurm ends this process soon after
    try:
        run_slurm(["scontrol", "requeue", start.job_id], environ=environ)
    except SlurmError as error:
        if error.transient or "pending" in error.message.lower():
            raise SlurmError(error.message, transient=True) from error
        return _follow_up(carried, attempt, error.message)
    log_event(carried.run, "requeued", attempt=attempt.number, job_id=start.job_id)
    if changes and _update(carried, changes) and left_out:
        log_event(carried.run, "left_out", attempt=attempt.number + 1, text=left_out)
    return "the same job, requeued"


def _next_request(carried: Carried) -> tuple[dict[str, str], str]:
    """Return what the next start of the job is to ask for, as scontrol has it, and which marked nodes it leaves out."""
    from clusterddp.places.slurm.nodes import count_usable, leave_out
    from clusterddp.planning.plan import read_plan

    plan, nodes, environ = read_plan(carried.run, in_job=True).slurm, carried.nodes, carried.environment
    assert plan is not None
    plan = leave_out(plan, environ, least=None if nodes is None else nodes.min_nodes)
    changes = {"ExcNodeList": str(plan.submit_options["exclude"])} if plan.left_out else {}
    if nodes is not None:
        with contextlib.suppress(SlurmError):  # it then asks for what it asked for before
            changes |= nodes.request(count_usable(plan, environ), int(plan.option("cpus_per_task") or 1))
    return changes, "; ".join(plan.left_out.values())


def _update(carried: Carried, changes: Mapping[str, str]) -> bool:
    """Have Slurm start the job, which it has just queued again, on other nodes; False: it refuses.

    Slurm changes the nodes of a waiting job only, and answers so until it has ended the job's steps.
    """
    argv = ["scontrol", "update", f"JobId={carried.start.job_id}"]
    argv += [f"{name}={value}" for name, value in changes.items()]
    for pause_s in _UPDATE_PAUSES_S:
        time.sleep(pause_s)
        try:
            run_slurm(argv, environ=carried.environment)
        except SlurmError as error:
            print(error.message, file=sys.stderr, flush=True)
        else:
            return True
    return False


def _follow_up(carried: Carried, attempt: AttemptDir, why: str) -> str:
    """Submit another job for the next attempt, unless an earlier try has submitted it.

    Raises: SlurmError: Slurm refuses it. `transient`: the caller has to retry.
    """
    from clusterddp.places.slurm.launcher import submit_attempt

    run, number = carried.run, attempt.number + 1
    record = read_run(run)
    tag = job_tag(record.token, number)
    job = find_job(run, record, carried.environment) if record.job_tag == tag else None
    if job is None:
        job_id = submit_attempt(run, number, carried.environment, keep_variables=True)
    else:
        job_id = job.job_id
        write_job_answer(run, tag, JobAnswer(job_id=job_id, cluster=record.cluster))
    log_event(run, "follow_up", attempt=number, job_id=job_id, why=why)
    return f"follow-up job {job_id} ({why})"


def _give_up(run: RunDir, error: Exception) -> str:
    message = error.message if isinstance(error, ClusterddpError) else str(error)
    reason = f"could neither requeue the job nor submit a follow-up job: {message}"
    end_run(run, failed(reason, log="launcher/job.log"))
    return f"nothing: {message}"


_ACCOUNTING_TIMEOUT_S = 5.0
_MAX_ROUNDS = 100
_KEPT_PREFIXES = ("SLURM_", "SLURMD_", "SPANK_", "_SLURM_SPANK_")
_KEPT = frozenset({"TMPDIR", "HOME", "USER", "LOGNAME", "SHELL", "KRB5CCNAME"})
"""Variables of the host or of this start of the job, which win over those of the submitting shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """One start of one job, as its batch script sees it."""

    job_id: str
    """As Slurm's commands take it: `123`, or `123_7` for the task of an array."""
    name: str
    restart_count: int
    """0 for a job's first start; Slurm adds 1 for each further start."""
    host: str

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> JobStart:
        """Read the start from the variables of a batch script."""
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id:
            raise ClusterddpError("SLURM_JOB_ID is not set: only Slurm runs this command, as the batch script of a job")
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=f"{environ.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}" if task else job_id,
            name=environ.get("SLURM_JOB_NAME", ""),
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    def carries(self, record: RunRecord) -> bool:
        """Say whether this job is the newest that the run was submitted as."""
        return tag_of(self.name) == record.job_tag or self.job_id == record.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A run, and the start of a job that runs it."""

    run: RunDir
    record: RunRecord
    start: JobStart
    restarts: int
    """How many further attempts the spec allows."""
    srun: tuple[str, ...]
    """argv without its last word, the number of the attempt."""
    environment: Mapping[str, str] = field(repr=False)
    """For srun, the tasks and a follow-up job: the submitting shell's variables, the secrets, this job's variables."""
    nodes: StepNodes | None = None
    """Of the next attempt, with `elastic`; None: an attempt has all nodes of the job."""
    change: str = ""
    """Why these are others than before; empty: they are the same."""

    def may_begin(self, attempt: int) -> bool:
        """Say whether `restarts` allows this attempt; it limits all further attempts, whatever their cause."""
        return attempt - self.record.base_attempt <= self.restarts


def job_environment(run: RunDir, own: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the environment of srun and the tasks; this job's own variables win over submitted ones."""
    submitted: dict[str, str] = {}
    for path in (run.job_environment, run.job_secrets):
        submitted |= read_json(path, follow=True) or {}  # a link in sweeps of earlier versions
    # SLURM_EXPORT_ENV is about the batch step; srun would apply it to its tasks.
    ours = {
        name: value
        for name, value in own.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and name != "SLURM_EXPORT_ENV"
    }
    with contextlib.suppress(KeyError):  # the user database may lack the user
        ours["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    return {"PATH": own.get("PATH", os.defpath)} | submitted | ours | {COOKIE: cookie(token, "task")}


def read_carried(run: RunDir, start: JobStart, environ: Mapping[str, str]) -> Carried:
    """Read the run that this start of a job runs."""
    record = read_run(run)
    plan = refuse_changed(run)
    if not plan.get("slurm"):
        raise ClusterddpError(f"{run.plan}: found no plan for Slurm")
    set_storage_timeout(plan["gang"].get("host_silence_s"))
    environment = job_environment(run, environ, record.token)
    if plan["slurm"].get("container"):
        environment = job_end(start.job_id, environment) | environment
    nodes = None
    if plan["gang"].get("min_nodes") is not None:
        hosts = sorted(expand(environ["SLURM_JOB_NODELIST"]), key=lambda host: host != start.host)
        nodes = StepNodes.of_gang(plan["gang"], hosts, record.cluster or "")
    return Carried(
        run=run,
        record=record,
        start=start,
        restarts=int(plan["gang"]["restarts"]),
        srun=tuple(plan["slurm"]["srun"]),
        environment=environment,
        nodes=nodes,
        change=nodes.explain((), {}) if nodes is not None else "",
    )


def job_end(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Slurm 23.02 and newer give tasks the job's end: containers have no scontrol."""
    try:
        left_s = read_time_left_s(run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ))
    except SlurmError:
        return {}
    return {} if left_s is None else {END_TIME: str(int(time.time() + left_s))}


def claim_attempt(carried: Carried) -> AttemptDir | None:
    """Claim the attempt that this start of the job runs; None when the run has ended, which is then recorded.

    Only the attempt that the job was submitted for may exist unclaimed. An earlier start of the job made any other; it
    may be cut off from the network and still run, so the number of its attempt is not used again.
    Raises: ClusterddpError, OSError: the run directory cannot be written.
    """
    run, start, job_attempt = carried.run, carried.start, carried.record.job_attempt
    for _ in range(_MAX_ROUNDS):
        attempts = retry_outage(run.attempts)
        # A follow-up job makes the attempt that it was submitted for.
        last = attempts[-1] if attempts else make_attempt(run, job_attempt)
        end = find_end(last, carried.record.token)
        if end is not None and not end.will_restart:
            return None
        if is_file(run.cancel_file):
            end_run(run, cancelled("cancelled before it was started"))
        elif end is None:
            if last.number == job_attempt and write_claim(last, start):
                return last
            _close_stale(carried, last)
        elif not carried.may_begin(last.number + 1):
            reason = f"{_used_up(carried.restarts)}; its last attempt: {end.reason}"
            end_run(run, AttemptEnd(outcome="FAILED", reason=reason, root_cause=end.root_cause))
        else:
            try:
                attempt = make_attempt(run, last.number + 1)
            except FileExistsError:  # another start of the job was faster
                time.sleep(0.1)
                continue
            if write_claim(attempt, start) and read_end(attempt) is None:
                return attempt
    raise ClusterddpError(f"{run.path}: other starts of the job claimed the attempt {_MAX_ROUNDS} times")


def write_claim(attempt: AttemptDir, start: JobStart, **facts: Any) -> bool:
    """Claim an attempt for a start of the job; False: another start has it."""
    claim = dataclasses.asdict(start) | {"pid": os.getpid(), "time": time.time()} | facts
    return write_json(attempt.claim, claim, exclusive=True)


def _close_stale(carried: Carried, attempt: AttemptDir) -> None:
    """Record the end of an attempt whose start of the job has ended, unless another process has just recorded one."""
    run, restarts = carried.run, carried.restarts
    host = str(_claim_for(run, attempt).get("host") or "an unknown host")
    reason = f"attempt {attempt.number} on {host} recorded no end, and Slurm has started the job again"
    state = _accounted_state(carried)
    if state:
        reason += f"; Slurm's accounting reports {state}"
    will_restart = carried.may_begin(attempt.number + 1)
    if not will_restart:
        reason += f"; {_used_up(restarts)}"
    is_lost = state == "NODE_FAIL"
    end = failed(reason, host=host, log="launcher/tasks.log", goes_on=will_restart, of_node=is_lost)
    if close_attempt(attempt, end, carried.record.token).is_first:
        log_event(run, "attempt_ended", attempt=attempt.number, outcome=end.outcome, reason=end.reason)


def _claim_for(run: RunDir, attempt: AttemptDir) -> dict[str, Any]:
    """Read the claim of an attempt; an attempt that restarted in place has the claim of an earlier one."""
    for earlier in reversed(run.attempts()):
        claim = read_json(earlier.claim) if earlier.number <= attempt.number else None
        if claim is not None:
            return dict(claim)
    return {}


def _used_up(restarts: int) -> str:
    return f"its restarts are used up ({restarts})" if restarts else "the spec allows it no restarts"


def _accounted_state(carried: Carried) -> str:
    """Ask accounting for the state of the job's last start; empty where it has none."""
    # -D: with the earlier starts of the same job, oldest first.
    argv = ["sacct", "-D", "-X", "-n", "-P", "-j", carried.start.job_id, "-o", "State"]
    try:
        states = run_slurm(argv, environ=carried.environment, timeout_s=_ACCOUNTING_TIMEOUT_S).split("\n")
    except SlurmError:
        return ""
    past = [state for state in states if state and state not in {"RUNNING", "PENDING"}]
    return past[-1] if past else ""


if __name__ == "__main__":
    sys.exit(main())

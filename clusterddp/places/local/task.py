"""The task of a local run: submitit's local executor runs `run_attempts` in a process of its own in the background.

It leases the run's GPUs, records submitit's controller as the run's job and keeper, starts one supervisor for each node
and waits until all have exited. The supervisors do the work and exit when the task does; the kernel kills the task when
the controller exits. The task records the end when all supervisors and guards were killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from clusterddp.errors import RunFailedError
from clusterddp.ranks.environment import inherited_environment, rank_cookies
from clusterddp.run.attempts import (
    AttemptEnd,
    cancelled,
    end_run,
    failed,
    failed_by,
    final_end,
    loss_of_nodes,
    signal_name,
    spell_exit,
)
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Node
from clusterddp.run.record import ProcessIdentity, log_event, read_gang, read_run, write_run
from clusterddp.run.stop import request_stop
from clusterddp.run.supervisors import Link, SupervisorOrder, read_link, send, start_supervisor, supervisor_log
from clusterddp.system.devices import list_gpus
from clusterddp.system.files import read_tail
from clusterddp.system.gpu_lease import Lease, take_leases
from clusterddp.system.processes import die_with_parent
from clusterddp.system.storage import retry_outage, set_storage_timeout

BEGUN, GPUS_TAKEN = b"begun", b"taken"
"""What the task answers on its standard input: it has begun; or another run has a GPU of this one, and it ends."""
_END_TIMEOUT_S = 2.5
"""How long a guard may take to record the end after all supervisors have exited: it cleans up first."""


@dataclass(frozen=True, slots=True, eq=False)
class _Supervisor:
    node: Node
    process: subprocess.Popen[bytes]
    log: Path


def run_attempts(run_dir: str, attempt: int, visible_gpus: str | None) -> str:
    """Run all attempts from this one to the last; return the outcome of the run, or "" if its GPUs are taken.

    `visible_gpus`: CUDA_VISIBLE_DEVICES of the submit.
    Raises: RunFailedError: the run failed; submitit's record and exit code then show it too.
    """
    import submitit

    controller = int(submitit.JobEnvironment().job_id)
    _die_with(controller)
    for name in [name for name in os.environ if name.startswith("SUBMITIT_")]:
        del os.environ[name]
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus
    run = RunDir(Path(run_dir))
    os.chdir(run.launcher_dir)  # `ps` finds the run's name by it
    gang = read_gang(run)
    _stop_on_signal(run)
    gpus = [gpu for node in gang.nodes for gpu in node.gpus]
    hold = read_run(run).hold
    lease = take_leases(gpus, run.name, list_gpus(inherited_environment()) if gpus else (), hold=hold)
    if lease is None:
        _answer(GPUS_TAKEN)
        return ""
    job_id = str(controller)
    if gang.entry.kind == "batch_script":
        from clusterddp.places.local.pretended_job import carry_script, name_job

        job_id = name_job(run, job_id)
    keeper = dataclasses.asdict(ProcessIdentity.of(controller))
    write_run(run, dataclasses.replace(read_run(run), job_id=job_id, keeper=keeper))
    log_event(run, "submitted", attempt=attempt, job_id=job_id)
    _answer(BEGUN)
    if final_end(run) is not None:
        pass  # the submit was interrupted, which ended the run
    elif run.cancel_file.exists():
        end_run(run, cancelled("cancelled before it was started"))
    elif gang.entry.kind == "batch_script":
        carry_script(run, attempt, str(controller))
    else:
        _carry(run, gang, attempt, lease)
    end = final_end(run)
    if end is None or end.outcome == "FAILED":
        raise RunFailedError(f"{run.name}: {end.reason if end else 'no end is recorded'}")
    return end.outcome


def _die_with(controller: int) -> None:
    """Have the kernel kill this process when submitit's controller ends (Linux)."""
    if sys.platform == "linux":
        die_with_parent()
    if os.getppid() != controller:
        sys.exit(f"submitit's controller (pid {controller}) has ended before the run began")


def _answer(answer: bytes) -> None:
    """Answer the submitting process, which may have been killed meanwhile."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as submitter:
        submitter.sendall(answer)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _carry(run: RunDir, gang: Gang, attempt: int, lease: Lease) -> None:
    set_storage_timeout(gang.host_silence_s)
    supervisors: list[_Supervisor] = []
    ended: list[_Supervisor] = []
    error_text = None
    try:
        error_text = _start_supervisors(run, gang, attempt, lease, supervisors)
        if error_text is None:
            _wait_for(supervisors, ended)
    except Exception as error:
        error_text = f"the task that carries the run failed: {type(error).__name__}: {error}"
        raise
    finally:
        for supervisor in supervisors:
            if supervisor not in ended:
                supervisor.process.kill()
        _wait_for(supervisors, ended)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while retry_outage(lambda: final_end(run)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        # The guards have done this, unless they were killed too.
        for node in gang.nodes:
            end_processes(*rank_cookies(gang.token, node.node_rank), timeout_s=3.0)
        if final_end(run) is None:
            end = _explain(run, ended, error_text)
            end_run(run, end, attempt=run.attempt(attempt), token=gang.token)


def _start_supervisors(
    run: RunDir, gang: Gang, attempt: int, lease: Lease, supervisors: list[_Supervisor]
) -> str | None:
    """Start the head, read its address, start the others; return an error message, or None."""
    link: Link | None = None
    environment = inherited_environment()
    for node in gang.nodes:
        order = SupervisorOrder(
            run_dir=run.path,
            gang=gang,
            node_rank=node.node_rank,
            attempt=attempt,
            link=link,
            parent_bound=True,
            hold=lease.descriptors,
        )
        try:
            process = start_supervisor(order, environment, answers=order.is_head)
        except OSError as error:
            return f"the supervisor of node {node.node_rank} could not be started: {error}"
        supervisors.append(_Supervisor(node=node, process=process, log=supervisor_log(run, node.node_rank)))
        if order.is_head:
            link = read_link(process, gang.start_timeout_s)
            if link is None and process.poll() is None:
                return f"the supervisor of node 0 did not report its address within {gang.start_timeout_s:g} s"
            if link is None:
                return None
    return None


def _wait_for(supervisors: list[_Supervisor], ended: list[_Supervisor]) -> None:
    """Wait until all supervisors have exited; append them to `ended` in that order.

    The head receives each exit of another one, so it does not wait for a supervisor that died before it connected.
    """
    while len(ended) < len(supervisors):
        exited = [each for each in supervisors if each not in ended and each.process.poll() is not None]
        for each in exited:
            if each.node.node_rank != 0:
                send(supervisors[0].process, {"ended": each.node.node_rank, "exit_code": each.process.returncode})
        ended += exited
        time.sleep(0.05)


def _explain(run: RunDir, ended: list[_Supervisor], error_text: str | None) -> AttemptEnd:
    """Explain the end of a run whose supervisors and guards recorded none."""
    started = run.newest_attempt().start.exists()
    if error_text is not None or not ended:
        return failed(error_text or "no supervisor was started")
    first = next((each for each in ended if each.process.returncode), ended[0])
    node, code = first.node, first.process.returncode
    who = f"supervisor of node {node.node_rank} on {node.host} (pid {first.process.pid})"
    last_line = read_tail(first.log).rpartition("\n")[2] if code >= 0 else ""
    error = f"{who} {spell_exit(code)}" + (f": {last_line}" if last_line else "")
    attempt = run.newest_attempt() if started else None
    cause = loss_of_nodes(read_gang(run), (node,), error, attempt=attempt)
    exit_code, log = 128 - code if code < 0 else code, str(first.log.relative_to(run.path))
    return failed_by(dataclasses.replace(cause, exit_code=exit_code, log=log))


def _stop_on_signal(run: RunDir) -> None:
    """Make SIGTERM and SIGUSR2 ask for a stop; submitit would ignore SIGTERM and requeue at SIGUSR2."""

    def handle(number: int, frame: FrameType | None) -> None:
        # A full disk must not raise an exception at a random place.
        with contextlib.suppress(OSError):
            request_stop(run.newest_attempt().stop_file, f"{signal_name(number)} to the task that carries the run")

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR2, handle)

"""Runs on this host: their directories, their supervisors, and their end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.cleanup import answers_for_its_run, find_processes, sweep
from clusterddp.run.directory import RunDir
from clusterddp.run.stacks import request_stacks
from clusterddp.run.stop import request_stop
from clusterddp.run.supervisors import SupervisorOrder, read_answer, send, start_supervisor, supervisor_log
from clusterddp.system.files import read_tail, write_json, write_text


class Hold:
    """A supervisor that hangs on this connection: when its standard input ends, so does its gang."""

    def __init__(self, process: subprocess.Popen[bytes], token: str) -> None:
        self.process = process
        self.token = token

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def prepare(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a run's directory, or bring one up to date for its next attempt."""
    run = RunDir(host.run_dir(request["name"]))
    for directory in (run.path, run.checkpoints, run.tensorboard, run.launcher_dir):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    attempt = run.attempt(int(request["attempt"]))
    for directory in (attempt.path, attempt.ranks, attempt.logs):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    run.cancel_file.unlink(missing_ok=True)
    write_json(run.plan, request["plan"])
    write_json(run.record, request["record"])
    write_text(run.spec, request["spec"])
    return {"run_dir": str(run.path)}


def supervise(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Start the supervisor of a node; it hangs on this connection until it is released.

    The head says where it listens; the others are there when the head has taken them in.

    `order` is a `SupervisorOrder`; `variables` are added to its environment, the values of the run's secrets among
    them; `patience_s`: how long the launcher may be silent from now on.
    """
    order = SupervisorOrder.from_json(request["order"])
    environment = inherited_environment() | {"PYTHONPATH": _python_path(host.package)} | request["variables"]
    process = start_supervisor(order, environment, answers=True)
    host.hold(Hold(process, order.gang.token))
    host.patience_s = request["patience_s"]
    answer = read_answer(process, order.gang.start_timeout_s)
    if answer is None:
        head = order.gang.nodes[0].host
        what = "did not say where it listens" if order.is_head else f"did not reach node 0 on {head}"
        raise ClusterddpError(f"the supervisor {what}: {_last_line(supervisor_log(order.run, order.node_rank))}")
    return {"pid": process.pid, **answer}


def release(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Let the supervisors of a run go: from now on nothing of it hangs on this connection."""
    holds = [thing for thing in host.held if isinstance(thing, Hold) and thing.token == request["token"]]
    for hold in holds:
        send(hold.process, {"detach": True})
        host.let_go(hold)
    return {"released": len(holds)}


def ask(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Ask a run to stop (a checkpoint first), to report its stacks, or to end, by the files that supervisors look for.

    `reason`: of an end; the id of the report.
    """
    run = RunDir(host.run_dir(request["name"]))
    if not run.path.is_dir():
        return {"found": False}
    if request["what"] == "stop":
        attempts = run.attempts()
        if attempts:
            request_stop(attempts[-1].stop_file, request["reason"])
    elif request["what"] == "stacks":
        attempts = run.attempts()
        if attempts:
            request_stacks(attempts[-1], request["reason"])
    else:
        write_json(run.cancel_file, {"by": request["reason"], "time": time.time()}, exclusive=True)
    return {"found": True}


def end(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """End every process of a run on this host; those that answer for it may first put things in order, if asked to."""
    family = f"{request['token']}."
    deadline = time.monotonic() + (request["patience_s"] or 0.0)
    while any(answers_for_its_run(process) for process in find_processes(family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = len(find_processes(family))
    left = sweep(family, timeout_s=5.0) if found else []
    return {"ended": found - len(left), "left": left}


def beat(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Take a sign of life of the launcher."""
    return {}


OPERATIONS: dict[str, Operation] = {
    "run.prepare": prepare,
    "run.supervise": supervise,
    "run.release": release,
    "run.ask": ask,
    "run.end": end,
    "beat": beat,
}


def _python_path(package: Path) -> str:
    return os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))


def _last_line(log: Path) -> str:
    return read_tail(log).rpartition("\n")[2].strip() or "it said nothing"

"""Runs on this host: their directories, supervisors, end, and the cleanup of what they leave (ps and gc)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from clusterddp.agent.store import check_out
from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.cleanup import end_run_here
from clusterddp.run.directory import RunDir
from clusterddp.run.leftovers import end_left_over, find_runs
from clusterddp.run.stacks import request_stacks
from clusterddp.run.stop import request_stop
from clusterddp.run.stored import find_stored, remove_run, remove_stored
from clusterddp.run.supervisors import SupervisorOrder, read_answer, send, start_supervisor, supervisor_log
from clusterddp.system.files import read_tail, write_json, write_text


class Hold:
    """A supervisor that ends with this connection: it ends its gang when its standard input closes."""

    def __init__(self, process: subprocess.Popen[bytes], token: str) -> None:
        self.process = process
        self.token = token

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def prepare(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a run's directory, or bring one up to date for its next attempt; `code`: the digest of its code."""
    run = RunDir(host.run_dir(request["name"]))
    if request["code"] is not None:
        check_out(host, request["code"], run.path)
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
    """Start the supervisor of a node; it ends with this connection until it is released.

    Returns when the head listens, and reports the address; for other nodes, when the head has accepted the supervisor.

    `order` is a `SupervisorOrder`; `variables` are added to its environment, the values of the run's secrets among
    them; `patience_s`: how long the agent waits for the launcher's next request from now on.
    """
    order = SupervisorOrder.from_json(request["order"])
    environment = inherited_environment() | {"PYTHONPATH": host.python_path(os.environ)} | request["variables"]
    process = start_supervisor(order, environment, answers=True)
    host.hold(Hold(process, order.gang.token))
    host.patience_s = request["patience_s"]
    answer = read_answer(process, order.gang.start_timeout_s)
    if answer is None:
        head = order.gang.nodes[0].host
        what = "did not report where it listens" if order.is_head else f"did not reach node 0 on {head}"
        raise ClusterddpError(f"the supervisor {what}: {_last_line(supervisor_log(order.run, order.node_rank))}")
    return {"pid": process.pid, **answer}


def release(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Release the supervisors of a run: they go on when this connection ends."""
    holds = [hold for hold in host.find_held(Hold) if hold.token == request["token"]]
    for hold in holds:
        send(hold.process, {"detach": True})
        host.release(hold)
    return {"released": len(holds)}


def ask(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Ask a run to stop (a checkpoint first), to report its stacks, or to end, by the files that supervisors watch.

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
    """End every process of a run on this host; its supervisors have `patience_s` to do so themselves."""
    found, left = end_run_here(request["token"], patience_s=request["patience_s"] or 0.0)
    return {"ended": found - len(left), "left": left}


def beat(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Receive a heartbeat of the launcher."""
    return {}


def list_processes(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """List the live processes of runs on this host; `tokens`: of these runs only, null: of all."""
    found = find_runs([host.root / "runs"], only=request["tokens"])
    return {"runs": [dataclasses.asdict(run) for run in found]}


def end_left_over_runs(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """End the processes of the runs with these tokens that have no live supervisor, guard or task."""
    return {"ended": [dataclasses.asdict(end_left_over(token)) for token in request["tokens"]]}


def list_old(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """List the directories of ended runs, snapshots and packages that are that old and not in use."""
    found = find_stored(host.root, older_than_s=request["older_than_s"], in_use=[host.package.name])
    return {"stored": dataclasses.asdict(found)}


def remove_old(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Remove those of `places` that are still that old and not in use."""
    removed = remove_stored(
        host.root, request["places"], older_than_s=request["older_than_s"], in_use=[host.package.name]
    )
    return {"removed": [dataclasses.asdict(each) for each in removed]}


def remove(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Remove the directories of ended runs: `runs` maps the name of each to its token."""
    removed = [remove_run(host.run_dir(name), token) for name, token in request["runs"].items()]
    return {"removed": [dataclasses.asdict(each) for each in removed]}


OPERATIONS: dict[str, Operation] = {
    "run.prepare": prepare,
    "run.supervise": supervise,
    "run.release": release,
    "run.ask": ask,
    "run.end": end,
    "run.remove": remove,
    "beat": beat,
    "table.look": list_processes,
    "table.end": end_left_over_runs,
    "table.stored": list_old,
    "table.remove": remove_old,
}


def _last_line(log: Path) -> str:
    return read_tail(log).rpartition("\n")[2].strip() or "it wrote nothing"

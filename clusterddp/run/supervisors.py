"""How a process starts a supervisor: the order, and the lines that the two exchange.

The order is the first line on the supervisor's standard input. The pipe stays open; if the order is `parent_bound`, its
end means that the parent has died. Later lines are `{"detach": true}` (the parent exits on purpose) and, to the head
only, `{"ended": node rank, "exit_code": int}` (another node's supervisor has ended; a negative code is a signal). The
supervisor answers with one line on standard output. The head sends `{"link": {"host": str, "port": int}}`, its address
for the orders of the other nodes; over SSH the other nodes send `{"joined": true}` once the head has accepted them.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Node
from clusterddp.system.files import open_log
from clusterddp.system.python import module_command
from clusterddp.wire import Written, build, read_object

SUPERVISOR_MODULE = "clusterddp.node.supervisor"
SUPERVISOR_COMMAND = module_command(SUPERVISOR_MODULE)


class Link(TypedDict):
    """Where the head listens for the other supervisors."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOrder:
    """The batch job that a supervisor belongs to."""

    job_id: str
    restart_count: int
    """How often the job was started before."""
    used_restarts: int
    """How many restarts of the run were used before this start of the job."""
    job_tag: str | None
    heads: tuple[str, ...]
    """Names and addresses of the head's host, tried in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOrder(Written):
    """What a supervisor does; it receives this from the process that starts it."""

    run_dir: Path
    """The run's directory on the supervisor's host."""
    gang: Gang
    node_rank: int
    attempt: int
    """The number of the first attempt; restarts count on from it."""
    step: str | None = None
    """The step of a batch script that the gang is; None: the gang is the whole run."""
    link: Link | None
    """Where the head listens; None for the head itself, and in a batch job, where `job.heads` has its host."""
    parent_bound: bool
    """True: the end of standard input means that the parent has died, and ends the gang."""
    over_ssh: bool = False
    """True: the parent is an agent at the end of an SSH connection, and carries only this node."""
    one_node: bool = False
    """True: the parent carries only this node, and the nodes are on several machines."""
    hold: tuple[int, ...] = ()
    """Inherited descriptors that supervisor and guard hold until the node's processes are gone: its GPU leases."""
    tasks: int | None = None
    """The inherited socket that the node's tasks of the job connect to, which start the ranks; None: there are none."""
    job: JobOrder | None = None
    terms: tuple[dict[str, Any], ...] = ()
    """What the supervisor knew in whose place this one is started (node/term.py); empty: it is the node's first."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SupervisorOrder:
        """Read an order that `to_json` wrote."""
        order: SupervisorOrder = build(cls, data, "order")
        if all(node.node_rank != order.node_rank for node in order.gang.nodes):
            raise ValueError(f"order.node_rank is {order.node_rank}: the gang has no such node")
        return order

    @property
    def run(self) -> RunDir:
        return RunDir(self.run_dir, self.step)

    @property
    def node(self) -> Node:
        return next(node for node in self.gang.nodes if node.node_rank == self.node_rank)

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0

    @property
    def is_elsewhere(self) -> bool:
        """True if the ranks run on other machines than that of the submit."""
        return self.over_ssh or self.job is not None

    @property
    def spans_hosts(self) -> bool:
        """True if the nodes are on several hosts, which may lose each other."""
        return len({node.host for node in self.gang.nodes}) > 1

    @property
    def first_restart(self) -> int:
        """How many restarts were used before this order's first attempt."""
        return self.job.used_restarts if self.job is not None else 0

    def restarts_left_after(self, attempt: int) -> bool:
        """Return whether the run may restart after this attempt."""
        return self.first_restart + attempt - self.attempt < self.gang.restarts


def supervisor_log(run: RunDir, node_rank: int) -> Path:
    """Return the log of a node's supervisor."""
    return run.launcher_dir / f"{f'step-{run.step}-' if run.step else ''}supervisor-{node_rank}.log"


def start_supervisor(
    order: SupervisorOrder, environ: Mapping[str, str], *, answers: bool, module: str = SUPERVISOR_MODULE
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a node in a session of its own and send it its order.

    `module`: the program of a place whose nodes differ. `answers`: its standard output is a pipe for `read_answer`;
    otherwise it goes to the log, like standard error.
    """
    with open_log(supervisor_log(order.run, order.node_rank)) as log:
        process = subprocess.Popen(
            module_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            cwd=order.run.launcher_dir,
            env=dict(environ) | {COOKIE: cookie(order.gang.token, f"s{order.node_rank}")},
            start_new_session=True,
            pass_fds=order.hold if order.tasks is None else (order.tasks, *order.hold),
        )
    send(process, order.to_json())
    return process


def send(supervisor: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    """Send a supervisor one line; if it has ended, which `wait` shows, the line is dropped."""
    assert supervisor.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        supervisor.stdin.write(json.dumps(message).encode() + b"\n")
        supervisor.stdin.flush()


def read_answer(supervisor: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
    """Read a supervisor's answer; None if it has ended or sends none in time."""
    assert supervisor.stdout is not None
    readable, _, _ = select.select([supervisor.stdout], [], [], timeout_s)
    try:
        return read_object(supervisor.stdout.readline()) if readable else None
    except ValueError:
        return None


def read_link(head: subprocess.Popen[bytes], timeout_s: float) -> Link | None:
    """Read the head's address; None as for `read_answer`."""
    answer = read_answer(head, timeout_s)
    try:
        link: Link = build(Link, (answer or {}).get("link"))
    except ValueError:
        return None
    return link

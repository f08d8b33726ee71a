"""The guard of a supervisor: cleans the node up when the supervisor is killed.

`python -m clusterddp.node.guard` blocks on a pipe from its supervisor, which sends it JSON lines: the facts that the
cleanup needs, and "done" at the end. A pipe that ends without "done" means that the supervisor was killed: the guard
ends everything that the node's ranks have started (the ranks themselves die with their supervisor), completes their
records, and, for the head, records how the attempt ended. Where another attempt may take the node in (`elastic`, over
SSH), it starts another supervisor there, which joins the head again. The facts of such a node also lie on its disk:
after a reboot the agent of a command that asks for the run starts a guard with them (`start_after_reboot`).

A supervisor starts another guard when its guard was killed. When both are killed at once, the ranks end with the
supervisor, and the next start, `status` or `gc` closes the attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.node.processes import leave_to_reap
from clusterddp.ranks.environment import COOKIE, cookie, inherited_environment, rank_cookies
from clusterddp.run.attempts import close_attempt, failed_by, loss_of_nodes
from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import RankEnd, read_ranks, write_rank
from clusterddp.run.supervisors import SupervisorOrder, start_supervisor, supervisor_log
from clusterddp.system.files import is_file, open_log, read_json, write_json
from clusterddp.system.python import module_command
from clusterddp.wire import Written

OTHERS_END_S = 2.5
"""How long the other nodes' supervisors have to end their ranks after they lost the head, before the guard does."""
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A batch system signals every process of a job."""
_MAX_RESPAWNS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(Written):
    """The facts of a node that its guard needs."""

    order: SupervisorOrder
    supervisor_pid: int
    attempt: int
    is_head: bool
    started: bool = False
    """True once ranks of the attempt were ordered to start."""
    restarts_left: bool = False
    """Another start of the batch job, or over SSH another node, may begin another attempt."""
    terms: tuple[dict[str, Any], ...] = ()
    """The terms that the node has answered, over SSH in a run that may go on without it."""

    @property
    def attempt_dir(self) -> AttemptDir:
        return self.order.run.attempt(self.attempt)


class Guard:
    """The supervisor's side of its guard."""

    def __init__(
        self, order: SupervisorOrder, environment: Mapping[str, str], log: int, keep: tuple[int, ...] = ()
    ) -> None:
        """`keep`: descriptors that the guard inherits and holds until it ends."""
        restarts_left = order.job is not None and order.restarts_left_after(order.attempt)
        self.facts = Facts(
            order=order,
            supervisor_pid=os.getpid(),
            attempt=order.attempt,
            is_head=order.is_head,
            restarts_left=restarts_left,
        )
        self.pid = 0
        self._environment = dict(environment) | {COOKIE: cookie(order.gang.token, f"g{order.node_rank}")}
        self._log = log
        self._keep = keep
        self._pipe = -1
        self._respawns = 0
        self._start()

    def update(self, **changes: Any) -> None:
        """Send the guard what has changed."""
        self.facts = dataclasses.replace(self.facts, **changes)
        if self.facts.terms:
            self._save()
        self._send(self.facts.to_json())

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Start another guard when this one was killed."""
        if self.pid not in exits or self._respawns >= _MAX_RESPAWNS:
            return
        self._respawns += 1
        os.close(self._pipe)
        self._start()
        log_line("the guard was killed; another one was started")

    def dismiss(self) -> None:
        """Let the guard exit without a cleanup, and wait for its exit."""
        kept_facts(self.facts.order.run, self.facts.order.node_rank).unlink(missing_ok=True)
        self._send({"done": True})
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _start(self) -> None:
        process, self._pipe = _start_process(self._environment, self._log, self._keep)
        self.pid = leave_to_reap(process)
        self._send(self.facts.to_json())

    def _save(self) -> None:
        """Write the facts to the disk before a term is answered; a head is not started again."""
        path = kept_facts(self.facts.order.run, self.facts.order.node_rank)
        try:
            if not self.facts.is_head:
                write_json(path, self.facts.to_json())
                return
        except ClusterddpError as error:
            log_line(f"after a reboot of this host the node would not come back: {error}")
        path.unlink(missing_ok=True)  # no older terms than those that the node has answered

    def _send(self, message: dict[str, Any]) -> None:
        # A guard that was killed is started again when its end is noticed, and receives all facts then.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, json.dumps(message).encode() + b"\n")


def main() -> int:
    """Wait for the supervisor's end, and clean up if it was killed."""
    facts = read_facts()
    if facts is not None:
        node = facts.order.node
        clean_up(facts, f"supervisor of node {node.node_rank} on {node.host} (pid {facts.supervisor_pid}) was killed")
        if facts.terms and not facts.is_head and not is_file(facts.order.run.cancel_file):
            start_again(facts)
    return 0


def kept_facts(run: RunDir, node_rank: int) -> Path:
    """Return the file with the facts of a node that may come back after a reboot."""
    return run.launcher_dir / f"guard-{node_rank}.json"


def start_after_reboot(kept: Path, environ: Mapping[str, str], hold: Sequence[int]) -> None:
    """Start a guard with the facts of one that has ended with its host; at most one, however many processes ask.

    `hold`: descriptors with the leases of the node's GPUs.
    """
    taken = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        kept.rename(taken)
    except FileNotFoundError:
        return
    facts: dict[str, Any] = read_json(taken) or {}
    taken.unlink()
    order = SupervisorOrder.from_json(facts["order"] | {"hold": hold})
    environment = dict(environ) | {COOKIE: cookie(order.gang.token, f"g{order.node_rank}")}
    with open_log(supervisor_log(order.run, order.node_rank)) as log:
        _, pipe = _start_process(environment, log.fileno(), hold)
    with open(pipe, "wb") as facts_to:
        facts_to.write(json.dumps(facts | {"order": order.to_json()}).encode() + b"\n")


def _start_process(
    environment: Mapping[str, str], log: int, keep: Sequence[int]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process of a guard; return it, and the pipe that takes its facts."""
    reader, writer = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # the guard inherits it, and never unblocks them
    try:
        process = subprocess.Popen(
            module_command("clusterddp.node.guard"),
            stdin=reader,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=keep,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
    return process, writer


def start_again(facts: Facts) -> None:
    """Start another supervisor in the place of the one that was killed, with the terms that it had answered."""
    log_line("the supervisor was killed; another one is started")
    order = dataclasses.replace(facts.order, attempt=facts.attempt, parent_bound=False, terms=facts.terms)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    start_supervisor(order, inherited_environment(), answers=False)


def read_facts() -> Facts | None:
    """Read the lines of standard input until its end; None: there is nothing to clean up."""
    facts = None
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "done" in message:
            return None
        facts = Facts(**message | {"order": SupervisorOrder.from_json(message["order"])})
    return facts


def clean_up(facts: Facts, what_happened: str) -> None:
    """End the ranks of a node without its supervisor and complete their records; for the head, record the end."""
    order, gang, token = facts.order, facts.order.gang, facts.order.gang.token
    left = end_processes(*rank_cookies(token, order.node_rank), timeout_s=5.0)
    with contextlib.suppress(ClusterddpError, OSError, TypeError):
        for record in read_ranks(facts.attempt_dir):
            if record.node_rank == order.node_rank and record.ended is None:
                error = "ended with its supervisor"
                end = RankEnd(rank=record.rank, host=record.host, exit_code=137, signal="SIGKILL", error=error)
                write_rank(facts.attempt_dir, record.at_end(end))
    if not facts.is_head:
        return
    if len(gang.nodes) > 1:
        everywhere = rank_cookies(token, *(node.node_rank for node in gang.nodes))
        deadline = time.monotonic() + OTHERS_END_S
        while time.monotonic() < deadline and find_processes(*everywhere):
            time.sleep(0.05)
        left = end_processes(*everywhere, timeout_s=5.0)
    cause = loss_of_nodes(gang, (order.node,), what_happened, attempt=facts.attempt_dir if facts.started else None)
    if left:
        error = f"{cause.error}; processes {', '.join(map(str, left))} could not be killed"
        cause = dataclasses.replace(cause, error=error)
    goes_on = facts.restarts_left and not is_file(order.run.cancel_file)
    ended = dataclasses.replace(failed_by(cause, goes_on=goes_on), needs_job=goes_on and order.job is not None)
    close_attempt(facts.attempt_dir, ended, token)


if __name__ == "__main__":
    sys.exit(main())

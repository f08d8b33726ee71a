"""Ranks that torchrun starts: on each node one agent of torchrun's, a child of the supervisor, starts the ranks.

The agent starts a holder for each rank, which holds it for the supervisor as a task of Slurm's does (holder.py,
tasks.py): records, logs, the first failure and the end of a rank are the same as without torchrun. The head decides
when an attempt ends; then all holders exit with an error, and torchrun starts them again, on all nodes alike: its
restarts are the run's attempts. The agents stay from the first attempt to the last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.node.clock import Clock
from clusterddp.node.processes import start_agent
from clusterddp.node.rank_starter import Ended, Launch, Lost, Update
from clusterddp.node.store_listener import WITH_LISTENER
from clusterddp.node.tasks import Tasks
from clusterddp.node.taskwire import PREFIX
from clusterddp.ranks.environment import COOKIE, USERS, cookie
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.ranks.torchrun import torchrun_arguments
from clusterddp.run.cleanup import end_processes
from clusterddp.run.outcome import signal_name
from clusterddp.run.supervisors import SupervisorOrder
from clusterddp.system.files import read_tail

_AGENT_FIRST_S = 0.5
"""How long the end of a holder waits for the end of the agent, which may be its cause."""
_END_S = 5.0
_ITS_OWN = ("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_")
"""Prefixes of the variables that configure torchrun; one that runs around this run must not configure ours."""


class Torchrun:
    """The ranks of one node, through torchrun."""

    owns_descendants = False

    def __init__(
        self,
        order: SupervisorOrder,
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        tasks: Tasks | None,
        clock: Clock,
    ) -> None:
        """`tasks`: on Slurm the node's one task, which stays as long as this process."""
        self._gang, self._node = order.gang, order.node
        self._clock = clock
        self._environment = environment
        self._tasks = tasks
        self._launcher_dir = order.run.launcher_dir
        self._log = self._launcher_dir / f"torchrun-{order.node.node_rank}.log"
        facts = f"torchrun of {order.gang.token}:{order.attempt}:{order.node.node_rank}:{os.getpid()}"
        self._socket = hashlib.sha256(facts.encode()).hexdigest()[:40]
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(PREFIX + self._socket)
        listener.listen(1024)
        self._holders = Tasks(listener, order.node.ranks, order.node.host, selector, what="holder")
        self._agent: int | None = None
        self._waiting: dict[int, Launch] = {}
        """Ranks that wait for their holder."""
        self._due = float("inf")
        self._used = False
        """True when the holders have ranks: the next attempt needs new holders."""
        self._losses: list[tuple[float, Lost]] = []
        self._updates: list[Update] = []
        self._exit_codes: dict[int, int] = {}
        self._over = False

    def start(self, launches: Mapping[int, Launch]) -> None:
        """Let torchrun start the ranks, or start them again.

        Raises: OSError: torchrun cannot be started.
        """
        if self._used:
            self._used = False
            self._holders.release(exit_code=1)
            self._exit_codes.clear()
        if self._agent is None:
            self._agent = self._start_agent(next(iter(launches.values())))
        self._waiting |= launches
        self._due = self._clock.now + self._gang.torchrun_start_s

    def facts(self) -> dict[str, Any]:
        return {}

    def withdraw(self) -> None:
        self._waiting.clear()

    def signal(self, rank: int, number: int) -> None:
        self._holders.signal(rank, number)

    def updates(self) -> list[Update]:
        now = self._clock.now
        for each in self._holders.updates():
            if isinstance(each, Lost):
                self._losses.append((now + _AGENT_FIRST_S, each))
                continue
            if isinstance(each, Ended):
                self._exit_codes[each.rank] = each.returncode
            self._updates.append(each)
        self._take_lost_tasks()
        self._hand_over(now)
        self._updates += [lost for due, lost in self._losses if now >= due]
        self._losses = [(due, lost) for due, lost in self._losses if now < due]
        updates, self._updates = self._updates, []
        return [] if self._over else updates

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Take in which children of the supervisor have ended; the node's ranks end with the agent."""
        returncode = exits.get(self._agent) if self._agent is not None else None
        if returncode is None:
            return
        pid, self._agent = self._agent, None
        how = f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"
        last_line = read_tail(self._log).rpartition("\n")[2].strip()
        error = f"torchrun on {self._node.host} (pid {pid}) {how}; its {spell_ranks(self._node.ranks)} ended with it"
        error += f"; its last line: {last_line[:200]}" if returncode > 0 and last_line else ""
        self._waiting.clear()
        self._losses.clear()
        self._updates += [Lost(rank, error) for rank in self._node.ranks]

    def end(self, exit_code: int) -> None:
        """Let torchrun exit, wait for it, and end what it leaves behind."""
        self._over = True
        if exit_code == 0 and set(self._exit_codes) == set(self._node.ranks) and not any(self._exit_codes.values()):
            self._holders.dismiss(exit_code)
            self._await_agent(_END_S)
        if self._agent is not None:
            os.kill(self._agent, signal.SIGKILL)
            self._await_agent(_END_S)
        end_processes(cookie(self._gang.token, f"a{self._node.node_rank}"), timeout_s=_END_S)

    def _start_agent(self, launch: Launch) -> int:
        variables = launch.values()
        users = {name: variable.value for name, variable in launch.variables.items() if variable.origin == USERS}
        words = torchrun_arguments(
            run=self._gang.run,
            num_nodes=len(self._gang.nodes),
            node_rank=self._node.node_rank,
            num_ranks=len(self._node.ranks),
            master_addr=variables["MASTER_ADDR"],
            port=launch.agent_port or 0,
            restarts=max(0, self._gang.restarts - int(variables["TORCHELASTIC_RESTART_COUNT"])),
        )
        environment = {
            name: value
            for name, value in {**self._environment, **users}.items()
            if not name.startswith(_ITS_OWN) and name != "PYTHON_EXEC"
        }
        environment["OMP_NUM_THREADS"] = variables["OMP_NUM_THREADS"]
        environment[COOKIE] = cookie(self._gang.token, f"a{self._node.node_rank}")
        # Slurm signals every process of a step: the supervisor and the ranks handle its signals.
        environment["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        if launch.agents_listener is not None:
            words = ("-m", WITH_LISTENER, *words[1:])
        return start_agent(
            (*words, self._socket),
            environment=environment,
            cwd=self._launcher_dir,
            log=self._log,
            listener=launch.agents_listener,
        )

    def _take_lost_tasks(self) -> None:
        if self._tasks is not None:
            for each in self._tasks.updates():
                if isinstance(each, Lost):
                    error = f"the task of node {self._node.node_rank} on {self._node.host} was killed"
                    self._updates += [Lost(rank, error) for rank in self._node.ranks]

    def _hand_over(self, now: float) -> None:
        """Order the holders to start their ranks, once all holders of this node have connected."""
        missing = self._holders.missing
        if not self._waiting or (missing and now < self._due):
            return
        if missing:
            late = f"{spell_ranks(missing)} within {self._gang.torchrun_start_s:g} s ({self._log})"
            self._updates += [Lost(rank, f"torchrun on {self._node.host} has not started {late}") for rank in missing]
        else:
            self._used = True
            self._holders.start(self._waiting)
        self._waiting.clear()

    def _await_agent(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._agent is not None and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._agent, os.WNOHANG) == (0, 0):
                    time.sleep(0.02)
                    continue
            self._agent = None

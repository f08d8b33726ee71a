"""The supervisor's side of Slurm's tasks: each task starts its own rank, so that Slurm's binding holds for the rank.

A task and its supervisor exchange JSON over an abstract unix socket of their host, one message a packet. The task sends
`here` (rank, gpus, gpus_bound), `started` (pid; master_addr, master_port: the rank's own), `not_started` (error),
`ended` (returncode). The supervisor sends `start` (run_dir, python, variables, unless, without, stdout, stderr; with
rank 0's the socket that listens at the master port), `signal` (number), `reap`, `leave` (exit_code). Both ends check
the other one's user. The name of the socket follows from the run's token, so no other user can bind it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.network.rendezvous.server import Acceptor, Refusals
from clusterddp.node.log import log_line
from clusterddp.node.rank_starter import Ended, Launch, Lost, Started, Update
from clusterddp.node.stack_hook import peer_of
from clusterddp.places.slurm.task import MAX_PACKET
from clusterddp.ranks.environment import GPU, USERS

_UNLESS_SET = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})
"""Set for a rank only where its task's environment has no value."""


class Tasks:
    """The tasks of one node; starts ranks through them."""

    owns_descendants = False

    def __init__(
        self,
        listener: socket.socket,
        ranks: Sequence[int],
        host: str,
        selector: selectors.BaseSelector,
    ) -> None:
        self._ranks = tuple(ranks)
        self._host = host
        self._selector = selector
        self._acceptor = Acceptor(listener, selector)
        self._refusals = Refusals(log_line)
        self._unidentified: list[socket.socket] = []
        """Connections whose task has not sent `here` yet."""
        self._tasks: dict[int, _Task] = {}
        """By rank; a task that has ended stays, without its socket."""
        self._updates: list[Update] = []

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose task has not connected yet."""
        return tuple(rank for rank in self._ranks if rank not in self._tasks)

    def start(self, launches: Mapping[int, Launch]) -> None:
        """Order each task to start its rank; `updates` reports one that has ended."""
        for rank, launch in launches.items():
            self._start(rank, launch)

    def facts(self) -> dict[str, Any]:
        return {}

    def _start(self, rank: int, launch: Launch) -> None:
        task = self._tasks[rank]
        changes = launch.prepared.changes
        variables = {name: value for name, value in changes.items() if value is not None}
        variables |= launch.values() | launch.preload.environment()
        users = {name for name, variable in launch.variables.items() if variable.origin == USERS}
        choice = choose_gpus([self._tasks[each].gpus for each in self._ranks], bound=self._tasks[self._ranks[0]].bound)
        if choice.visible is not None and "CUDA_VISIBLE_DEVICES" not in users:
            own = choice.visible[self._ranks.index(rank)] if choice.one_each else None
            variables["CUDA_VISIBLE_DEVICES"] = own or ",".join(choice.visible)
            if own:
                variables[GPU] = "0"
        if choice.device is not None:
            variables[GPU] = str(choice.device)
        order = {
            "kind": "start",
            "run_dir": str(launch.run_dir),
            "variables": variables,
            "unless": sorted(_UNLESS_SET - users - changes.keys()),
            "without": [name for name, value in changes.items() if value is None],
            "python": launch.prepared.python,
            "stdout": str(launch.stdout),
            "stderr": str(launch.stderr),
        }
        self._send(task, order, launch.listener)

    def signal(self, rank: int, number: int) -> None:
        self._send(self._tasks[rank], {"kind": "signal", "number": number})

    def updates(self) -> list[Update]:
        self._accept()
        for sock in list(self._unidentified):
            self._identify(sock)
        for task in self._tasks.values():
            self._receive(task)
        updates, self._updates = self._updates, []
        return updates

    def dismiss(self, exit_code: int) -> None:
        """Let all tasks exit, each with its rank's exit code; with this one where that is 0 or there is none."""
        for task in self._tasks.values():
            if task.sock is not None:
                with contextlib.suppress(OSError):
                    task.sock.setblocking(True)
                    task.sock.settimeout(1.0)
                    task.sock.send(json.dumps({"kind": "leave", "exit_code": exit_code}).encode())

    def withdraw(self) -> None:
        pass

    def _accept(self) -> None:
        now = time.monotonic()
        self._refusals.tick(now)
        for sock, _ in self._acceptor.accept(now):
            pid, uid = peer_of(sock)
            if uid != os.getuid():
                self._refusals.add(f"process {pid} of user {uid} is not a task of this run", now)
                sock.close()
                continue
            sock.setblocking(False)
            self._unidentified.append(sock)
            self._selector.register(sock, selectors.EVENT_READ)

    def _identify(self, sock: socket.socket) -> None:
        message = _receive(sock)
        if message is None:
            return
        self._unidentified.remove(sock)
        rank = message.get("rank")
        if message.get("kind") != "here" or rank not in self._ranks or rank in self._tasks:
            self._selector.unregister(sock)
            sock.close()
            return
        pid, bound = peer_of(sock)[0], bool(message.get("gpus_bound"))
        self._tasks[rank] = _Task(rank=rank, sock=sock, pid=pid, gpus=read_gpus(message.get("gpus")), bound=bound)

    def _receive(self, task: _Task) -> None:
        while task.sock is not None and (message := _receive(task.sock)) is not None:
            kind = message.get("kind")
            if kind == "started":
                addr, port = message.get("master_addr"), str(message.get("master_port"))
                master = (str(addr), int(port)) if addr and port.isdecimal() else None
                self._updates.append(Started(task.rank, int(message["pid"]), master))
            elif kind == "ended":
                self._updates.append(Ended(task.rank, int(message["returncode"])))
                self._send(task, {"kind": "reap"})
            elif kind == "not_started":
                error = f"rank {task.rank} on {self._host} was not started: {message['error']}"
                self._updates.append(Lost(task.rank, error))
            elif kind == "gone":
                self._lose(task)

    def _send(self, task: _Task, message: dict[str, Any], descriptor: int | None = None) -> None:
        if task.sock is None:
            if message["kind"] == "start":
                self._updates.append(self._loss(task))
            return
        try:
            socket.send_fds(task.sock, [json.dumps(message).encode()], [] if descriptor is None else [descriptor])
        except BlockingIOError:
            log_line(f"the task of rank {task.rank} (pid {task.pid}) does not read its messages")
        except OSError:
            self._lose(task)

    def _lose(self, task: _Task) -> None:
        if task.sock is None:
            return
        self._selector.unregister(task.sock)
        task.sock.close()
        task.sock = None
        self._updates.append(self._loss(task))

    def _loss(self, task: _Task) -> Lost:
        who = f"the task of rank {task.rank} on {self._host} (pid {task.pid})"
        return Lost(task.rank, f"{who} was killed; the rank ended with it")


@dataclass(kw_only=True, slots=True)
class _Task:
    rank: int
    sock: socket.socket | None
    pid: int
    gpus: tuple[str, ...] | None
    """Those that Slurm gives the task; see `read_gpus`."""
    bound: bool
    """True when Slurm was asked to bind GPUs to tasks."""


def _receive(sock: socket.socket) -> dict[str, Any] | None:
    """Return the next message; `gone` at the end of the connection; None: none has arrived."""
    try:
        packet = sock.recv(MAX_PACKET)
        return dict(json.loads(packet)) if packet else {"kind": "gone"}
    except BlockingIOError:
        return None
    except (OSError, ValueError, TypeError):
        return {"kind": "gone"}


def read_gpus(visible: str | None) -> tuple[str, ...] | None:
    """Read CUDA_VISIBLE_DEVICES of a task; None: it is not set."""
    return None if visible is None else tuple(filter(None, (name.strip() for name in visible.split(","))))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuChoice:
    """The GPUs of the ranks of a node.

    Users expect LOCAL_RANK to index the GPUs that a rank sees. Slurm shows all tasks the same GPUs (--gpus-per-node,
    --gres), or each task its own (--gpus-per-task, --gpu-bind); where it also confines tasks to their devices, every
    task's own GPU is number 0.
    """

    visible: tuple[str, ...] | None = None
    """For CUDA_VISIBLE_DEVICES of all ranks; None: each keeps its task's value."""
    device: int | None = None
    """The index of a rank's own GPU among those that it sees; None: LOCAL_RANK."""
    one_each: bool = False
    """Each rank sees only its own of `visible`: CUDA shows a process one MIG slice."""


def choose_gpus(lists: Sequence[tuple[str, ...] | None], *, bound: bool) -> GpuChoice:
    """Choose the GPUs of the ranks of a node; `lists`: those of its tasks, in the order of their local ranks."""
    if not lists or any(not names for names in lists):
        return GpuChoice()
    known = [names for names in lists if names]
    if len(set(known)) == 1:
        enough = len(known[0]) >= len(known)
        if enough and len(known) > 1 and known[0][0].startswith("MIG-"):
            return GpuChoice(visible=known[0], one_each=True)
        return GpuChoice() if enough or not bound else GpuChoice(device=0)
    firsts = [names[0] for names in known]
    if len(set(firsts)) < len(firsts):
        return GpuChoice(device=0)
    numbered = all(name.isdigit() for names in known for name in names)
    if not numbered:
        # Ids of devices, which other tasks may not see: CUDA stops reading at the first one that it cannot see.
        return GpuChoice(device=0)
    return GpuChoice(visible=tuple(dict.fromkeys([*firsts, *(name for names in known for name in names)])))

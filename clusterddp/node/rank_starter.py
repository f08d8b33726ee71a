"""Starts and signals a node's ranks, and reports how they ended; here as children of the supervisor.

In a batch job of Slurm's, its tasks start the ranks (places/slurm/tasks.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clusterddp.node.fork_server import receive_line, send_line
from clusterddp.node.preparation import Prepared
from clusterddp.node.processes import signal_group, start_fork_server, start_rank
from clusterddp.ranks.environment import (
    NCCL_VARIABLES,
    OF_THE_ATTEMPT,
    SETTINGS,
    SUPERVISOR_PID,
    USERS,
    Variable,
    inherited_environment,
)
from clusterddp.run.attempts import signal_name
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.preload import Preload


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The variables, files and sockets that a rank is started with."""

    run_dir: Path
    variables: Mapping[str, Variable]
    stdout: Path
    stderr: Path
    preload: Preload
    prepared: Prepared
    listener: int | None = None
    """The socket at the master port, for rank 0."""

    def values(self) -> dict[str, str]:
        """Return the variables as an environment has them."""
        return {name: variable.value for name, variable in self.variables.items()}


@dataclass(frozen=True, slots=True)
class Started:
    """A rank has started."""

    rank: int
    pid: int
    master: tuple[str, int] | None = None
    """Address and port of the rank's own rendezvous, where its launcher has chosen them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended; a negative return code: by a signal."""

    rank: int
    returncode: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank could not be started, or ended because the process that started it was killed."""

    rank: int
    error: str


Update = Started | Ended | Lost


class RankStarter(Protocol):
    """Starts the ranks of one node."""

    owns_descendants: bool
    """True when all descendants of the supervisor, except its guard, come from ranks."""

    def start(self, launches: Mapping[int, Launch]) -> None:
        """Start the ranks of the node, or order their start."""

    def facts(self) -> Mapping[str, Any]:
        """Return how the ranks were started, for the record of the start; after they were."""

    def withdraw(self) -> None:
        """Drop the starts that are still under way."""

    def signal(self, rank: int, number: int) -> None:
        """Signal the process group of a rank whose end was not reported."""

    def updates(self) -> list[Update]:
        """Return what has happened since the last call."""


class Children:
    """Ranks as children of the supervisor: forked by a fork server where possible, else started one by one."""

    owns_descendants = True

    def __init__(self, environment: Mapping[str, str], supervisor_pid: int, gang: Gang) -> None:
        self._environment = dict(environment) | {SUPERVISOR_PID: str(supervisor_pid)}
        self._gang = gang
        self._ranks: dict[int, int] = {}
        """Of ranks that were not reaped yet, by pid."""
        self._updates: list[Update] = []
        self._server: _ForkServer | None = None
        """That forks the ranks of the attempt."""
        self._waiting: _ForkServer | None = None
        """That has imported, or does so, for the next attempt."""
        self._facts: dict[str, Any] = {}

    @property
    def pids(self) -> set[int]:
        """Of processes that no cleanup of ranks may end."""
        return set() if self._waiting is None else {self._waiting.pid}

    def import_for(self, launches: Mapping[int, Launch]) -> None:
        """Have a process import what these ranks do, unless one has that they can be forked from."""
        if _why_not_forked(launches) or (self._waiting is not None and self._waiting.suits(launches)):
            return
        self.end()
        self._waiting = _ForkServer.started_for(launches, self._environment)

    def start(self, launches: Mapping[int, Launch]) -> None:
        self._facts = {}
        if why_not := _why_not_forked(launches):
            self._start_apart(launches, why_not)
            return
        self.import_for(launches)
        if self._waiting is not None:
            self._server, self._waiting = self._waiting, None
            entry, once = self._gang.entry, self._gang.restarts == 0
            self._server.fork(launches, self._environment, ours=entry.is_ours, once=once)

    def end(self) -> None:
        """End the process that waits for another attempt."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting = None

    def facts(self) -> dict[str, Any]:
        return self._facts

    def withdraw(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None

    def signal(self, rank: int, number: int) -> None:
        for pid, each in self._ranks.items():
            if each == rank:
                signal_group(pid, number)

    def updates(self) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Take in which children have ended; the others than ranks are orphans that a rank left behind."""
        if self._server is not None and self._server.pid in exits:
            self._on_server_exit(self._server, exits[self._server.pid])
        if self._waiting is not None and self._waiting.pid in exits:  # maybe together with the one that has forked it
            self._waiting.close()
            self._waiting = None
        for pid, returncode in exits.items():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._updates.append(Ended(rank, returncode))

    def _on_server_exit(self, server: _ForkServer, returncode: int) -> None:
        """Let the forked ranks begin, which are now our children; start them one by one if they were not forked."""
        self._server = None
        answer, self._waiting = server.read_answer(returncode)
        if "refused" in answer:
            server.close()
            try:
                self._start_apart(server.launches, answer["refused"])
            except OSError as error:
                self._updates += [Lost(rank, f"rank {rank} was not started: {error}") for rank in server.launches]
            return
        self._facts = {"import_s": answer["import_s"]}
        for rank, pid in answer["pids"].items():
            self._ranks[pid] = int(rank)
            self._updates.append(Started(int(rank), pid))
        server.let_begin()

    def _start_apart(self, launches: Mapping[int, Launch], why: str) -> None:
        """Start the ranks one by one."""
        self._facts = {"not_forked": why}
        for rank, launch in launches.items():
            pid = start_rank(
                launch.run_dir,
                environment=launch.prepared.applied(self._environment) | launch.values() | launch.preload.environment(),
                stdout=launch.stdout,
                stderr=launch.stderr,
                listener=launch.listener,
                python=launch.prepared.python,
            )
            self._ranks[pid] = rank
            self._updates.append(Started(rank, pid))


def _why_not_forked(launches: Mapping[int, Launch]) -> str:
    """Return why the ranks have to be started one by one; empty: they may be forked."""
    if len(launches) < 2:
        return "the node has one rank"
    return next(iter(launches.values())).preload.why_not


@dataclass(eq=False, slots=True)
class _ForkServer:
    """The supervisor's side of a fork server."""

    pid: int
    _link: socket.socket
    _preload: Preload
    _prepared: Prepared
    _common: dict[str, str]
    """What the ranks of its first attempt had in common, as /proc shows it for all that are forked from it."""
    launches: Mapping[int, Launch] = field(default_factory=dict)
    """Of the ranks that it forks."""

    @classmethod
    def started_for(cls, launches: Mapping[int, Launch], environment: Mapping[str, str]) -> _ForkServer:
        """Start one, which imports what these ranks do and then waits for an order to fork."""
        first = next(iter(launches.values()))
        common = dict(set.intersection(*(set(launch.values().items()) for launch in launches.values())))
        common = {name: value for name, value in common.items() if name not in OF_THE_ATTEMPT}
        pid, link = start_fork_server(
            first.run_dir,
            environment=first.prepared.applied(environment) | common | first.preload.environment(),
            log=sys.stderr.fileno(),
            python=first.prepared.python,
        )
        return cls(pid, link, first.preload, first.prepared, common)

    def suits(self, launches: Mapping[int, Launch]) -> bool:
        """Return whether these ranks import the same in the same way; libraries read OMP_NUM_THREADS then."""
        first, threads = next(iter(launches.values())), "OMP_NUM_THREADS"
        how = first.preload, first.prepared, first.values().get(threads)
        return how == (self._preload, self._prepared, self._common.get(threads))

    def fork(self, launches: Mapping[int, Launch], environment: Mapping[str, str], **how: bool) -> None:
        """Order it to fork these ranks; `how`: `ours` and `once` of fork_server.py."""
        self.launches = launches
        listener = next((launch.listener for launch in launches.values() if launch.listener is not None), None)
        gone = {name: environment.get(name) for name in self._common}
        ranks = {
            rank: {
                "variables": {
                    name: value
                    for name, value in {**gone, **launch.values()}.items()
                    if value != self._common.get(name)
                },
                "stdout": str(launch.stdout),
                "stderr": str(launch.stderr),
            }
            for rank, launch in launches.items()
        }
        send_line(self._link, {"ranks": ranks, **how}, listener)

    def read_answer(self, returncode: int) -> tuple[dict[str, Any], _ForkServer | None]:
        """Return its answer, after its exit, and the one that waits in its place."""
        self._link.setblocking(False)
        text, descriptor = receive_line(self._link)
        link = None if descriptor is None else socket.socket(fileno=descriptor)
        if returncode == 0 and text:
            answer = dict(json.loads(text))
            if link is None:
                return answer, None
            return answer, dataclasses.replace(self, pid=answer["waits"], _link=link, launches={})
        if link is not None:
            link.close()
        how = f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)
        return {"refused": f"the fork server ended with {how}"}, None

    def let_begin(self) -> None:
        with contextlib.suppress(OSError):  # all ranks have ended
            self._link.sendall(b"." * len(self.launches))
        self.close()

    def close(self) -> None:
        self._link.close()

    def kill(self) -> None:
        """Kill it, and with it the ranks that wait."""
        signal_group(self.pid, signal.SIGKILL)
        self.close()


def plan_launch(
    run: RunDir, gang: Gang, rank: int, order: Mapping[str, Any], *, preload: Preload, prepared: Prepared
) -> Launch:
    """Plan the start of a rank for the head's order to start an attempt."""
    attempt, master_port = run.attempt(int(order["attempt"])), int(order["master_port"])
    variables = gang.variables_of(
        rank,
        run_dir=str(run.path),
        attempt=attempt.number,
        restart=order["restart"],
        master_port=master_port,
        step=run.step,
    )
    if not inherited_environment().keys().isdisjoint(NCCL_VARIABLES):
        variables = {
            name: each for name, each in variables.items() if name not in NCCL_VARIABLES or each.origin == USERS
        }
    given = {name for name, value in prepared.changes.items() if value is not None and name in SETTINGS}
    variables = {name: each for name, each in variables.items() if name not in given or each.origin == USERS}
    return Launch(
        run_dir=run.path,
        variables=variables,
        stdout=attempt.stdout(rank),
        stderr=attempt.stderr(rank),
        preload=preload,
        prepared=prepared,
        listener=order.get("listener") if rank == 0 else None,
    )

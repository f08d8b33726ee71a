"""Who starts a node's ranks, signals them, learns how they ended: the supervisor itself, Slurm's tasks, or torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterddp.dist.environment import SUPERVISOR_PID, Variable
from clusterddp.node.processes import signal_group, start_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a rank is started with."""

    run_dir: Path
    variables: Mapping[str, Variable]
    stdout: Path
    stderr: Path
    agent_port: int | None = None
    """Where torchrun's agents meet on node 0, if torchrun starts the ranks."""


@dataclass(frozen=True, slots=True)
class Started:
    """A rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended; negative: by a signal."""

    rank: int
    returncode: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank could not be started, or what started it is gone and the rank with it."""

    rank: int
    error: str


News = Started | Ended | Lost


class Starter(Protocol):
    """Starts the ranks of one node."""

    sweeps_descendants: bool
    """True when whatever descends from the supervisor, its guard apart, comes from a rank."""

    def start(self, rank: int, launch: Launch) -> None:
        """Start a rank, or have it started.

        Raises: OSError: it cannot be.
        """

    def withdraw(self) -> None:
        """Start no rank any more that was to be started."""

    def signal(self, rank: int, number: int) -> None:
        """Signal the process group of a rank whose end was not told yet."""

    def news(self) -> list[News]:
        """Return what has happened since the last call."""


class Children:
    """Ranks as children of the supervisor."""

    sweeps_descendants = True

    def __init__(self, environment: Mapping[str, str], supervisor_pid: int) -> None:
        self._environment = dict(environment) | {SUPERVISOR_PID: str(supervisor_pid)}
        self._ranks: dict[int, int] = {}
        """pid -> rank, of ranks that were not reaped yet."""
        self._news: list[News] = []

    def start(self, rank: int, launch: Launch) -> None:
        variables = {name: variable.value for name, variable in launch.variables.items()}
        pid = start_rank(
            launch.run_dir, environment=self._environment | variables, stdout=launch.stdout, stderr=launch.stderr
        )
        self._ranks[pid] = rank
        self._news.append(Started(rank, pid))

    def withdraw(self) -> None:
        pass

    def signal(self, rank: int, number: int) -> None:
        for pid, each in self._ranks.items():
            if each == rank:
                signal_group(pid, number)

    def news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Take in which children have ended; those that are no ranks are orphans that a rank left behind."""
        for pid, returncode in exits.items():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._news.append(Ended(rank, returncode))

"""The sweep: find and end the processes of a run by the cookie that each of them carries in its environment.

A cookie is `<token>.<role>`: `task` (what carries the run), `s2` (node 2's supervisor), `g2` (its guard), `n2` (node
2's ranks and everything that they started), `a2` (its torchrun, where that starts the ranks), `w2` (ranks of a run that
another launcher has started). The environment that a process was started with cannot be lost by a double fork, a new
session or a dead parent, and no pid of a stranger ever matches it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from clusterddp.ranks.environment import COOKIE
from clusterddp.system.processes import Process, find_carriers, find_descendants, read_environment

_EMPTY_PASSES = 2
"""A pass over the process table can miss a process that is being forked or is between two programs."""


def find_processes(*cookie_prefixes: str, uid: int | None = None) -> list[Process]:
    """Find the live processes that carry one of the cookies; of this user (or of `uid`) only, and never the caller.

    `<token>.` means every process of the run, `<token>.n2` exactly that role (node 2, not node 20).
    """
    families = tuple(prefix for prefix in cookie_prefixes if prefix.endswith("."))

    def wanted(cookie: str) -> bool:
        return cookie in cookie_prefixes or cookie.startswith(families)

    owner = os.getuid() if uid is None else uid
    return [process for process in find_carriers(COOKIE, wanted, uid=owner) if process.pid != os.getpid()]


def read_cookie(process: Process) -> str:
    """Read a process's cookie; empty when it has none, or is gone."""
    return read_environment(process.pid).get(COOKIE, "")


def answers_for_its_run(process: Process) -> bool:
    """Say whether a process of a run puts things in order when the run ends, and records the end; ranks do not.

    What another launcher has started is that launcher's to end.
    """
    role = read_cookie(process).rpartition(".")[2]
    return role == "task" or role[:1] in {"s", "g", "w"}


@dataclass(slots=True)
class Sweep:
    """Ends everything that carries one of the cookies (`<token>.n2`; `<token>.` means the whole run).

    One `step` is one pass; passes are a few dozen milliseconds and the caller may do other things in between.
    """

    cookies: tuple[str, ...]
    descendants_but: int | None = None
    """End the caller's descendants too, except this pid (0: none). Finds a process that overwrote its environment."""
    left: list[int] = field(default_factory=list)
    """What the last pass found: after `clear` is False for long, what cannot be killed."""
    killed: set[int] = field(default_factory=set)
    _empty: int = 0

    @property
    def clear(self) -> bool:
        return self._empty >= _EMPTY_PASSES

    def step(self) -> None:
        """Kill what is found now."""
        found = {process.pid: process for process in find_processes(*self.cookies)}
        if self.descendants_but is not None:
            found |= _descendants(self.descendants_but)
        for process in found.values():
            if process.send_signal(signal.SIGKILL):
                self.killed.add(process.pid)
        self.left = sorted(found)
        self._empty = 0 if found else self._empty + 1


def sweep(*cookies: str, timeout_s: float) -> list[int]:
    """Sweep until nothing is found twice in a row, or the time is up; return the pids that would not die.

    Nothing is reaped: the exit code of a child of the caller stays for the caller.
    """
    work = Sweep(cookies=cookies)
    deadline = time.monotonic() + timeout_s
    while True:
        work.step()
        if work.clear or (work.left and time.monotonic() >= deadline):
            return work.left
        time.sleep(0.02)


def _descendants(but: int) -> dict[int, Process]:
    found = find_descendants([os.getpid()])
    spared = {but, *find_descendants([but])} if but else set()
    return {pid: process for pid, process in found.items() if pid not in spared}

"""The sweep: find and end the processes of a run by the cookie that each of them carries in its environment.

A cookie is `<token>.<role>`: `task` (what carries the run), `s2` (node 2's supervisor), `g2` (its guard), `n2` (node
2's ranks and everything that they started). The environment that a process was started with cannot be lost by a
double fork, a new session or a dead parent, and no pid of a stranger ever matches it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

import psutil

from clusterddp.dist.environment import COOKIE

_EMPTY_PASSES = 2
"""A pass over the process table can miss a process that is being forked or is between two programs."""


def find_processes(cookie_prefix: str, *, uid: int | None = None) -> list[psutil.Process]:
    """Find the live processes that carry the cookie; of this user (or of `uid`) only, and never the caller itself.

    `<token>.` means every process of the run, `<token>.n2` exactly that role (node 2, not node 20).
    """
    owner = os.getuid() if uid is None else uid
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _matches(process, cookie_prefix, owner)
    ]


def read_cookie(process: psutil.Process) -> str:
    """Read a process's cookie; empty when it has none, or is gone."""
    try:
        return str(process.environ().get(COOKIE, ""))
    except (psutil.Error, OSError):
        return ""


def answers_for_its_run(process: psutil.Process) -> bool:
    """Say whether a process of a run puts things in order when the run ends, and records the end; ranks do not."""
    role = read_cookie(process).rpartition(".")[2]
    return role == "task" or role[:1] in {"s", "g"}


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
        found = {process.pid: process for cookie in self.cookies for process in find_processes(cookie)}
        if self.descendants_but is not None:
            found |= {process.pid: process for process in _descendants(self.descendants_but)}
        for process in found.values():
            if _kill(process):
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


def _matches(process: psutil.Process, cookie_prefix: str, owner: int) -> bool:
    try:
        if process.uids().real != owner or process.status() == psutil.STATUS_ZOMBIE:
            return False
    except psutil.Error:
        return False
    cookie = read_cookie(process)
    return cookie.startswith(cookie_prefix) if cookie_prefix.endswith(".") else cookie == cookie_prefix


def _descendants(but: int) -> list[psutil.Process]:
    spared = {but} | {process.pid for process in _children(but)}
    return [process for process in _children(os.getpid()) if process.pid not in spared and not _is_zombie(process)]


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True) if pid else []
    except psutil.Error:
        return []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _kill(process: psutil.Process) -> bool:
    """Kill exactly this process, not one that was given its pid meanwhile; say whether the signal was sent."""
    try:
        if not hasattr(os, "pidfd_open"):
            process.kill()  # psutil compares the start time first
            return True
        handle = os.pidfd_open(process.pid)
        try:
            if not process.is_running():  # the handle may be a successor's
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    except (psutil.Error, OSError):
        return False
    return True

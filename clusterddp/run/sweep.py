"""The sweep: find and end the processes of a run by the cookie that each of them carries in its environment.

A cookie is `<token>.<role>`: `task` (what carries the run), `s2` (node 2's supervisor), `g2` (its guard), `n2` (node
2's ranks and everything that they started). The environment that a process was started with cannot be lost by a
double fork, a new session or a dead parent, and no pid of a stranger ever matches it.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

COOKIE = "CLUSTERDDP_COOKIE"


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


def sweep(cookie_prefix: str, *, timeout_s: float) -> list[int]:
    """Kill every process that `find_processes` finds until none is found; return the pids that would not die.

    It looks until it has found nothing twice in a row: a process may start another one while it is being killed, and
    one that is just between two programs shows no environment.
    """
    deadline = time.monotonic() + timeout_s
    empty_passes = 0
    while empty_passes < 2:
        found = find_processes(cookie_prefix)
        for process in found:
            # psutil compares the start time before it sends the signal, so a pid that was given away stays unharmed.
            with contextlib.suppress(psutil.Error):
                process.kill()
        empty_passes = 0 if found else empty_passes + 1
        if found and time.monotonic() >= deadline:
            return sorted(process.pid for process in found)
        # Not psutil.wait_procs: it would reap children of the caller, whose exit code is then gone.
        time.sleep(0.02)
    return []


def _matches(process: psutil.Process, cookie_prefix: str, owner: int) -> bool:
    try:
        if process.uids().real != owner or process.status() == psutil.STATUS_ZOMBIE:
            return False
    except psutil.Error:
        return False
    cookie = read_cookie(process)
    return cookie.startswith(cookie_prefix) if cookie_prefix.endswith(".") else cookie == cookie_prefix

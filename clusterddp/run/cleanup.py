"""Find and end the processes of a run by the cookie in their environment, or by their mark where they have none.

A cookie is `<token>.<role>`. The roles: `task` (the process that carries the run), `b0` (a batch script), `s2` (the
supervisor of node 2), `g2` (its guard), `n2` (node 2's ranks and their descendants), `x2` (commands beside them,
node/exec_command.py), `w2` (ranks that another launcher started). A process keeps the environment that it was started
with through a double fork, a new session or the death of its parent, and a pid that the kernel reuses does not match.

A process that was started with another environment, or has overwritten its own, has no cookie. So ranks, and commands
beside them, also have a mark: a number in the soft limit RLIMIT_LOCKS, which the kernel passes on to each child and
which has had no other effect since Linux 2.4.25. It stands for `#<hash of the token>.<hash of the step>.n2`, since all
users may read it. A cookie, also another run's, takes precedence over the mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from clusterddp.ranks.environment import COOKIE
from clusterddp.system.processes import Process, find_carriers, find_descendants, read_environment

_RLIMIT_LOCKS = 10
"""Python has no name for it. Source: include/uapi/asm-generic/resource.h of Linux; no kind of machine has another."""
_MARKED, _RUN_BITS, _STEP_BITS, _NODE_BITS = 1 << 62, 32, 16, 14
_EMPTY_PASSES = 2
"""A pass over the process table can miss a process during its fork or exec, so one empty pass proves nothing."""


def find_processes(*cookie_prefixes: str, uid: int | None = None) -> list[Process]:
    """Find the live processes of this user (or of `uid`) that carry one of the cookies, except the caller.

    `<token>.` matches every process of the run, `<token>.n2` only that role (node 2, not node 20).
    """
    prefixes = {hashed(prefix) for prefix in cookie_prefixes}
    families = tuple(prefix for prefix in prefixes if prefix.endswith("."))

    def wanted(cookie: str) -> bool:
        return (known := hashed(cookie)) in prefixes or known.startswith(families)

    owner = os.getuid() if uid is None else uid
    found = find_carriers(COOKIE, wanted, uid=owner, otherwise=read_mark)
    return [process for process in found if process.pid != os.getpid()]


def read_cookie(process: Process) -> str:
    """Read a process's cookie, else what its mark says (`hashed`); empty if it has neither or has ended."""
    cookie = read_environment(process.pid).get(COOKIE)
    return read_mark(process.pid) or "" if cookie is None else cookie


def hash_token(token: str) -> str:
    """Return what stands for a run's token in a mark; a hash stays as it is."""
    return token if token.startswith("#") else f"#{_hash(token, _RUN_BITS)}"


def hashed(cookie: str) -> str:
    """Return a cookie, or the beginning of one, with the hashes of its token and of its step.

    All that belongs to a run begins with what this returns for `<token>.`, and of its step 3 for `<token>.3.`.
    """
    run, dot, rest = cookie.partition(".")
    if run.startswith("#") or not rest:
        return hash_token(run) + dot + rest
    step, _, role = rest.rpartition(".")
    return f"{hash_token(run)}.{_hash(step, _STEP_BITS)}.{role}"


def _hash(text: str, bits: int) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[: bits // 4]


@contextlib.contextmanager
def marking(cookie: str | None) -> Iterator[None]:
    """Mark the children that are started meanwhile; None: they lose the mark that this process has inherited."""
    soft, hard = resource.getrlimit(_RLIMIT_LOCKS)
    mark = hard
    if cookie is not None:
        run, step, role = hashed(cookie).split(".")
        mark = _MARKED | int(run[1:] + step, 16) << _NODE_BITS | int(role[1:]) % (1 << _NODE_BITS)
    with contextlib.suppress(OSError, ValueError):  # the system has set a lower limit
        resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))
    try:
        yield
    finally:
        resource.setrlimit(_RLIMIT_LOCKS, (soft, hard))


def read_mark(pid: int) -> str | None:
    """Read the mark of a process as a cookie, `#1f0c25e0.aa31.n2`; None: it has no mark."""
    try:
        mark = resource.prlimit(pid, _RLIMIT_LOCKS)[0]
    except OSError:
        return None
    if not _MARKED <= mark < 2 * _MARKED:
        return None
    hashes = f"{(mark ^ _MARKED) >> _NODE_BITS:0{(_RUN_BITS + _STEP_BITS) // 4}x}"
    return f"#{hashes[: _RUN_BITS // 4]}.{hashes[_RUN_BITS // 4 :]}.n{mark % (1 << _NODE_BITS)}"


def is_supervising(process: Process) -> bool:
    """Return whether a process cleans up when its run ends and records the end; ranks do not.

    Ranks that another launcher started count: that launcher ends them.
    """
    role = read_cookie(process).rpartition(".")[2]
    return role == "task" or role[:1] in {"s", "g", "w"}


@dataclass(slots=True)
class Cleanup:
    """Kills the processes that carry one of the cookies (`<token>.n2`; `<token>.` means the whole run).

    One `step` is one pass over the process table, a few dozen milliseconds; the caller decides when the next one is.
    """

    cookies: tuple[str, ...]
    but: frozenset[int] = frozenset()
    """Pids that are not ended."""
    descendants: bool = False
    """End the caller's descendants, too, except those of `but`.

    This finds processes without a cookie where the system takes no marks.
    """
    answered_by: Callable[[Collection[Process]], str | None] | None = None
    """Names the processes that will end those that were found, for people; None: they are left over.

    A pass then kills only if neither it nor the one before has found such processes: a run that is started again
    meanwhile survives.
    """
    answer: str | None = None
    """What the last pass has found so."""
    left: list[int] = field(default_factory=list)
    """The pids that the last pass found; pids that stay here for seconds cannot be killed."""
    killed: set[int] = field(default_factory=set)
    _empty: int = 0
    _passes: int = 0

    @property
    def clear(self) -> bool:
        return self._empty >= _EMPTY_PASSES

    def step(self) -> None:
        """Find processes once and kill them."""
        found = {process.pid: process for process in find_processes(*self.cookies) if process.pid not in self.but}
        if self.descendants:
            spared = {*self.but, *find_descendants(self.but)}
            own = find_descendants([os.getpid()])
            found |= {pid: process for pid, process in own.items() if pid not in spared}
        self._passes += 1
        kills = self.answered_by is None
        if self.answered_by is not None:
            self.answer = self.answered_by(found.values())
            kills = self.answer is None and self._passes > 1
        for process in found.values() if kills else ():
            if process.send_signal(signal.SIGKILL):
                self.killed.add(process.pid)
        self.left = sorted(found)
        self._empty = 0 if found else self._empty + 1

    def run(self, timeout_s: float) -> None:
        """Make passes until two in a row find none, the time is up, or other processes will end what was found."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.step()
            if self.clear or self.answer is not None or (self.left and time.monotonic() >= deadline):
                return
            time.sleep(0.02)


def end_processes(*cookies: str, timeout_s: float, but: Collection[int] = ()) -> list[int]:
    """Kill the processes, except `but`, until two passes in a row find none, or the time is up; return the pids left.

    It does not reap: the caller still reads the exit codes of its children.
    """
    cleanup = Cleanup(cookies=cookies, but=frozenset(but))
    cleanup.run(timeout_s)
    return cleanup.left


def end_run_here(token: str, *, patience_s: float = 0.0, timeout_s: float = 5.0) -> tuple[int, list[int]]:
    """End every process of a run on this machine; its supervisors have `patience_s` to do so themselves.

    They kill every process with the run's cookie, so the next attempt must not start before they have exited. Return
    how many processes were left for this function, and the pids that cannot be killed.
    """
    family = f"{token}."
    deadline = time.monotonic() + patience_s
    while any(is_supervising(process) for process in find_processes(family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = len(find_processes(family))
    return found, end_processes(family, timeout_s=timeout_s) if found else []

"""Processes of one node: started, signalled, and, whatever they turned into, found and ended.

A process is known by identity, never by a pattern: a rank that was not reaped yet by its pid, anything else by the
run's cookie in its environment or by descent from the supervisor, and it is signalled through a handle (pidfd) that
cannot come to mean another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from clusterddp.run.sweep import find_processes

_PR_SET_CHILD_SUBREAPER = 36
_EMPTY_PASSES = 2
"""A pass over the process table can miss a process that is being forked or is between two programs."""


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


def sweep(cookies: Iterable[str], *, timeout_s: float, descendants_but: int | None = None) -> Sweep:
    """Sweep until nothing is found twice in a row or the time is up; `left` of the result would not die."""
    work = Sweep(cookies=tuple(cookies), descendants_but=descendants_but)
    deadline = time.monotonic() + timeout_s
    while True:
        work.step()
        reap()
        if work.clear or time.monotonic() >= deadline:
            return work
        time.sleep(0.02)


def start_rank(run_dir: Path, *, environment: dict[str, str], stdout: Path, stderr: Path) -> int:
    """Start a rank in a session of its own and return its pid.

    Its output goes straight into files (appended): no pipe to fill, nobody whose death would break it. It starts in the
    run directory, where no file shadows a module, and goes to its working directory itself.
    Raises: OSError: no process, no memory, no space.
    """
    with _append_to(stdout) as out, _append_to(stderr) as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp.node.rank", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=run_dir,
            env=environment,
            start_new_session=True,
        )
    return _take_over(process)


def start_guard(*, environment: dict[str, str], log: int) -> tuple[int, int]:
    """Start the guard in a session of its own; return its pid and the pipe whose end tells it that we are gone."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp.node.guard"],
            stdin=reader,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return _take_over(process), writer


def signal_group(pid: int, number: int) -> None:
    """Signal the process group of a rank that was not reaped yet: its number cannot belong to anybody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> return code, negative for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def become_subreaper() -> None:
    """Adopt the orphans among our descendants, so that a double fork does not hide them (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def count_oom_kills() -> int | None:
    """Count the processes that the kernel of this host has killed for want of memory; None where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


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


@contextlib.contextmanager
def _append_to(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take_over(process: subprocess.Popen[bytes]) -> int:
    """Leave the waiting to `reap`, which collects whatever ends, and keep Popen from warning about it."""
    process.returncode = 0
    return process.pid

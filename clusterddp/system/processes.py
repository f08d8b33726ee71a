"""The process table of this machine: each process with its parent, start time, user and environment.

It reads /proc, which needs no package.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn

_CHUNK = 1 << 16
_ROOT = 0
_CPU_FIELDS, _IO_WORDS = 13, 4
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its start time distinguishes it from a later one with the same pid."""

    pid: int
    parent: int
    started: float
    """Seconds since the boot, as the kernel counts them."""
    zombie: bool

    def alive(self) -> bool:
        """Return whether it still runs."""
        try:
            now = read_process(self.pid)
        except ProcessLookupError:
            return False
        return now.started == self.started and not now.zombie

    def send_signal(self, number: int) -> bool:
        """Signal this process, never a later one with its pid; return whether the signal was sent."""
        try:
            handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
            try:
                if not self.alive():  # the handle may belong to a later process
                    return False
                if handle is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(handle, number)
            finally:
                if handle is not None:
                    os.close(handle)
        except OSError:
            return False
        return True


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends.

    `parent`: its pid; this process ends at once where it has ended already, which None leaves unnoticed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_by(number: int) -> NoReturn:
    """End by the signal that ended our program, without a core of our own; exit where it does not end a process."""
    faulthandler.disable()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


def read_process(pid: int) -> Process:
    """Read one process.

    Raises: ProcessLookupError: no process has that pid.
    """
    try:
        # The name, in brackets, may contain anything; after the last bracket come state, ppid, ... start (field 22).
        state, parent, *fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except FileNotFoundError as error:
        raise ProcessLookupError(error.errno, "no such process", str(pid)) from error
    ticks = int(fields[17])
    return Process(pid=pid, parent=int(parent), started=ticks / os.sysconf("SC_CLK_TCK"), zombie=state in b"ZX")


def read_state(pid: int) -> str:
    """Read what a process does, by the letter of /proc: R runs, S sleeps, D waits for a disk, T is stopped.

    Empty when it is gone.
    """
    fields = _read_or_nothing(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0].decode() if fields else ""


def read_usage(pid: int) -> tuple[float, int]:
    """Read how much a process has used so far: seconds of a core, and bytes that it has read and written.

    The time that its main thread waited for a core counts, too: on a machine with too much to do it works all the same.
    Zeros when it is gone; bytes through sockets do not count.
    """
    fields = _read_or_nothing(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    ticks = sum(map(int, fields[11:13])) if len(fields) > _CPU_FIELDS else 0
    waited = _read_or_nothing(f"/proc/{pid}/schedstat").split()[1:2]
    waited_s = int(waited[0]) / 1e9 if waited else 0.0
    words = _read_or_nothing(f"/proc/{pid}/io").split()
    moved = int(words[1]) + int(words[3]) if len(words) > _IO_WORDS else 0
    return ticks / os.sysconf("SC_CLK_TCK") + waited_s, moved


def read_cpu_and_memory(pid: int) -> tuple[float, int, int]:
    """Read the seconds of a core that a process has used, and the bytes of memory that it has: all, and not shared.

    Zeros when it is gone.
    """
    fields = _read_or_nothing(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    pages = [int(word) for word in _read_or_nothing(f"/proc/{pid}/statm").split()[1:3]]
    if len(fields) <= _CPU_FIELDS or len(pages) != 2:
        return 0.0, 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), pages[0] * page, (pages[0] - pages[1]) * page


def read_age_s() -> float:
    """Return the seconds since this process was started."""
    started = read_process(os.getpid()).started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def find_carriers(
    variable: str, wanted: Callable[[str], bool], *, uid: int, otherwise: Callable[[int], str | None] = lambda pid: None
) -> list[Process]:
    """Find the live processes of a user that were started with a variable whose value is `wanted`.

    It is one pass over the process table, which can miss a process during its fork or exec. `otherwise` reads the value
    of a process without the variable in another way.
    """

    def carries(pid: int) -> bool:
        value = _read_variable(pid, variable)
        value = otherwise(pid) if value is None else value
        return value is not None and wanted(value)

    found = []
    for pid in list_pids():
        if not _may_be_owned_by(uid, pid) or not carries(pid):
            continue
        try:
            process = read_process(pid)
            # The process may have ended since, and its pid may belong to another one: check again.
            if not process.zombie and read_owner(pid) == uid and carries(pid):
                found.append(process)
        except (OSError, ValueError):
            continue
    return found


def find_descendants(ancestors: Collection[int]) -> dict[int, Process]:
    """Find the live descendants of these processes: pid -> process."""
    children: dict[int, list[Process]] = {}
    for process in _read_all():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    todo = [child for pid in ancestors for child in children.get(pid, ())]
    while todo:
        process = todo.pop()
        if process.pid not in found:
            found[process.pid] = process
            todo += children.get(process.pid, ())
    return {pid: process for pid, process in found.items() if not process.zombie}


def list_pids() -> list[int]:
    """List the pids of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_owner(pid: int) -> int:
    """Read the real user id of a process.

    Raises: ProcessLookupError: no process has that pid.
    """
    try:
        status = _read(f"/proc/{pid}/status")
    except FileNotFoundError as error:
        raise ProcessLookupError(error.errno, "no such process", str(pid)) from error
    return int(status.partition(b"\nUid:")[2].split(maxsplit=1)[0])


def read_environment(pid: int) -> dict[str, str]:
    """Read the environment that a process was started with; empty if it has ended or may not be read."""
    entries = (entry.partition(b"=") for entry in _read_or_nothing(f"/proc/{pid}/environ").split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in entries if equals}


def read_command(pid: int) -> list[str]:
    """Read the command line of a process; empty if it has ended."""
    return [os.fsdecode(word) for word in _read_or_nothing(f"/proc/{pid}/cmdline").split(b"\0")[:-1]]


def _may_be_owned_by(uid: int, pid: int) -> bool:
    """Exclude most processes with one call; the real owner is read only for the others."""
    try:
        # In /proc a process that must not be traced belongs to root, whatever its user.
        return os.stat(f"/proc/{pid}").st_uid in (uid, _ROOT)
    except OSError:
        return False


def _read_variable(pid: int, variable: str) -> str | None:
    text = b"\0" + _read_or_nothing(f"/proc/{pid}/environ")
    _, found, rest = text.partition(b"\0" + os.fsencode(variable) + b"=")
    return os.fsdecode(rest.partition(b"\0")[0]) if found else None


def _read_all() -> Iterable[Process]:
    for pid in list_pids():
        try:
            yield read_process(pid)
        except (OSError, ValueError):
            continue


def _read_or_nothing(path: str) -> bytes:
    try:
        return _read(path)
    except OSError:
        return b""


def _read(path: str) -> bytes:
    """Read a file of /proc with as few calls as possible: a cleanup reads hundreds, several times a second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = chunk = os.read(descriptor, _CHUNK)
        while len(chunk) == _CHUNK:
            chunk = os.read(descriptor, _CHUNK)
            data += chunk
        return data
    finally:
        os.close(descriptor)

"""Processes of one node: started, signalled while their pid is theirs, and reaped.

run/cleanup.py finds and ends the processes that they leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from clusterddp.ranks.environment import COOKIE, LISTENER_FD
from clusterddp.run.cleanup import marking
from clusterddp.system.files import open_log
from clusterddp.system.processes import die_with_parent
from clusterddp.system.python import module_command

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR2})
"""A supervisor that receives one asks the whole gang to stop."""
PASSED_ON = tuple(
    getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "ALRM", "CONT")
)
"""What the processes before a user's batch script, or before a rank of it, pass on to it."""
_PR_SET_CHILD_SUBREAPER = 36


def start_rank(
    run_dir: Path,
    *,
    environment: dict[str, str],
    stdout: Path,
    stderr: Path,
    listener: int | None = None,
    python: str | None = None,
) -> int:
    """Start a rank in a session of its own and return its pid; it inherits `listener`, a descriptor.

    `python`: another one than that of this process.

    Its output is appended to files: a pipe could fill, or break with its reader. It starts in the run directory, and
    changes to its working directory itself.
    """
    with open_log(stdout) as out, open_log(stderr) as err, marking(environment[COOKIE]):
        process = subprocess.Popen(
            module_command("clusterddp.node.rank", str(run_dir), python=python),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=run_dir,
            env=environment if listener is None else environment | {LISTENER_FD: str(listener)},
            start_new_session=True,
            pass_fds=() if listener is None else (listener,),
        )
    return leave_to_reap(process)


def start_fork_server(
    run_dir: Path, *, environment: dict[str, str], log: int, python: str | None = None
) -> tuple[int, socket.socket]:
    """Start a fork server (fork_server.py) in a session of its own; return its pid and the socket to it."""
    ours, its = socket.socketpair()
    with its:
        try:
            with marking(environment[COOKIE]):
                process = subprocess.Popen(
                    module_command("clusterddp.node.rank", "--fork", str(run_dir), python=python),
                    stdin=its.fileno(),
                    stdout=log,
                    stderr=log,
                    cwd=run_dir,
                    env=environment,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
    return leave_to_reap(process), ours


def lead_group() -> None:
    """In a child before it becomes a program: lead a process group, as a task of a batch job; die with the parent."""
    os.setpgid(0, 0)
    die_with_parent()


def signal_group(pid: int, number: int) -> None:
    """Signal the process group of a rank that was not reaped yet, so that no other process has its pid."""
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
    """Adopt the orphans among our descendants, so that a double fork does not hide them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_into_memory(program: str, *arguments: str) -> int | None:
    """Start a program of PATH; return memory (a memfd) that gets its output, None where it cannot be started.

    The caller closes it; what ends is collected by `reap`.
    """
    path = shutil.which(program)
    if path is None:
        return None
    memory = os.memfd_create(f"clusterddp-{program}")
    try:
        leave_to_reap(
            subprocess.Popen([path, *arguments], stdin=subprocess.DEVNULL, stdout=memory, stderr=subprocess.DEVNULL)
        )
    except OSError:
        os.close(memory)
        return None
    return memory


def leave_to_reap(process: subprocess.Popen[bytes]) -> int:
    """Leave the waiting to `reap`, which collects all children, and keep Popen from warning."""
    process.returncode = 0
    return process.pid


class Signals:
    """Signals as bytes on a pipe, which the loop waits for like everything else."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A handler and not SIG_IGN, also for those without a meaning: an ignored signal stays ignored in the ranks.
        for number in (signal.SIGCHLD, *STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a task of a batch job has blocked them

    def take(self) -> set[int]:
        """Return the numbers of the signals since the last call."""
        try:
            return set(os.read(self.reader, 4096))
        except BlockingIOError:
            return set()

"""The command of `exec` and `shell` beside ranks of one node: what a launcher gets, and its start as a child."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clusterddp.planning.environment import process_environment
from clusterddp.ranks.environment import COOKIE
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.keyboard import Keyboard, catching_signals, kept_terminal

MODULE = "clusterddp.node.exec_command"
"""Runs the command on the machine of the ranks."""
_END_S = 5.0
"""How long a command may take to end after SIGTERM: the wrapper's grace is 2 s."""

Write = Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecCommand:
    """A command beside ranks of one node."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    keyboard: Keyboard | None = None
    """What the command reads; None: nothing, as with several ranks."""
    lines: tuple[Write, Write] | None = None
    """What takes the lines of its output and of its errors; None: they are written here as they come."""
    interrupted: threading.Event | None = None
    """Set by Ctrl-C where this call is in a thread of its own."""

    def arguments(self, run_dir: str, attempt: AttemptDir) -> list[str]:
        """Return the arguments of `MODULE`; `run_dir`: the run's directory on the machine of the ranks."""
        return [run_dir, str(attempt.number), ",".join(map(str, self.ranks)), *self.argv]


def exec_here(run: RunDir, attempt: AttemptDir, command: ExecCommand, environ: Mapping[str, str]) -> int:
    """Run a command beside ranks of this machine; return its exit code."""
    environment = process_environment("", environ)
    environment.pop(COOKIE)
    argv = [sys.executable, "-m", MODULE, *command.arguments(str(run.path), attempt)]
    return run_child(argv, environment, command, cwd=run.launcher_dir)


def run_child(argv: Sequence[str], environ: Mapping[str, str], command: ExecCommand, *, cwd: Path) -> int:
    """Run a program that has this process's terminal and gets its signals; return the exit code, as a shell has it.

    `cwd` has no file that hides a module of Python's.
    """
    pipe = None if command.lines is None else subprocess.PIPE
    with _in_charge(command):
        process = subprocess.Popen(
            list(argv),
            env=dict(environ),
            cwd=cwd,
            stdin=None if command.keyboard else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )
        try:
            _pass_on(process, command)
            code = process.wait()
        finally:
            _end(process)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _in_charge(command: ExecCommand) -> Iterator[None]:
    """Leave Ctrl-C to the program, which the terminal signals, too; end by SIGTERM, and restore the terminal."""
    if command.interrupted is not None:  # the main thread does it
        yield
        return
    with kept_terminal(), catching_signals():
        yield


def _pass_on(process: subprocess.Popen[bytes], command: ExecCommand) -> None:
    if command.lines is None:
        return
    pumps = [
        threading.Thread(target=_pump, args=(source, write), daemon=True)
        for source, write in zip((process.stdout, process.stderr), command.lines, strict=True)
    ]
    for pump in pumps:
        pump.start()
    for pump in pumps:
        pump.join()


def _pump(source: IO[bytes], write: Write) -> None:
    for line in source:
        write(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that is left."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

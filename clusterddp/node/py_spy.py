"""Asks py-spy, where it is on the host, for the stacks of a Python that clusterddp has not started: a command's.

It needs the right to trace the process: root has it, and a user where `kernel.yama.ptrace_scope` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from clusterddp.node.processes import start_into_memory
from clusterddp.run.stacks import Frame
from clusterddp.system.processes import read_command, read_process

_THREAD = re.compile(r"Thread (\d+)\b.*")
_FRAME = re.compile(r"    (.+?) \((.+):(\d+)\)")


def find_python(children: Sequence[int]) -> int | None:
    """Choose the process whose stacks say where a command is: the first Python that is no launcher of another program.

    The workers of a DataLoader have the command line of their parent; what a launcher starts has another one.
    """
    commands = {pid: read_command(pid) for pid in children}
    pythons = {pid: words for pid, words in commands.items() if words and PurePath(words[0]).name.startswith("python")}
    parents = _parents(pythons)
    launchers = {parents[pid] for pid, words in pythons.items() if pythons.get(parents[pid], words) != words}
    return next((pid for pid in sorted(pythons) if pid not in launchers), None)


def start_py_spy(pid: int) -> int | None:
    """Start py-spy on a process; see `start_into_memory`."""
    return start_into_memory("py-spy", "dump", "--nonblocking", "--full-filenames", "--pid", str(pid))


def parse_py_spy(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames, innermost first: of the thread whose number is the process's."""
    lines = text.splitlines()
    pid = lines[0].partition(":")[0].rpartition(" ")[2] if lines else ""
    frames: list[Frame] = []
    wanted = False
    for line in lines:
        if thread := _THREAD.fullmatch(line):
            wanted = thread[1] == pid
        elif wanted and (found := _FRAME.fullmatch(line)):
            frames.append(Frame(file=found[2], line=int(found[3]), function=found[1]))
    return tuple(frames)


def _parents(pids: Mapping[int, object]) -> dict[int, int]:
    parents = {}
    for pid in pids:
        try:
            parents[pid] = read_process(pid).parent
        except (OSError, ValueError):
            parents[pid] = 0
    return parents

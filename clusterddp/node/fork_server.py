"""The fork server: a process that imports the packages of a node's ranks once, forks the ranks, and exits.

`python -m clusterddp.node.rank --fork RUN_DIR` has a socket to its supervisor as standard input. It reads one line of
JSON, `{"modules": [str], "ours": bool, "listener": int | null, "ranks": {rank: {"variables": {}, "stdout": path,
"stderr": path}}}`, and answers with one: `{"pids": {rank: pid}, "import_s": float}` or `{"refused": reason}`. `ours`:
the entry is clusterddp's own, whose modules need no end of Python. `listener`: the inherited socket for rank 0.

Then it exits, and the supervisor, a subreaper, becomes the parent of the ranks. Each rank waits for one byte from the
supervisor; when the socket ends first, it exits. So all ranks of a node begin, or none.

Why a fork is safe here: docs/decisions/0007-ranks-are-forked.md.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from clusterddp.node.entry import import_first
from clusterddp.ranks.environment import LISTENER_FD, SUPERVISOR_PID
from clusterddp.system.files import open_log
from clusterddp.system.processes import die_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Users and batch systems send these to all processes of a run to stop it. The supervisor handles them."""
_MAX_PRINTED = 65536


class RefusedError(Exception):
    """The ranks cannot be forked; the message is the reason."""


def serve(run_rank: Callable[[], None]) -> None:
    """Import, fork and exit; in the ranks, call `run_rank` and return as it does."""
    supervisor = int(os.environ[SUPERVISOR_PID])
    die_with_parent()
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    link = socket.socket(fileno=os.dup(0))
    try:
        with link.makefile("r", encoding="utf-8") as lines:
            order = dict(json.loads(lines.readline()))
        begun = time.monotonic()
        with _captured() as read:
            # The garbage collector stays off until the fork: a visit to these objects copies their memory.
            import_first(order["modules"])
            printed = read()  # for each rank's standard error
        import_s = time.monotonic() - begun
        _demand_forkable()
        pids = _fork_ranks(order["ranks"], link, order["listener"], printed)
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        _answer(link, {"refused": why})
    if pids is not None:
        _answer(link, {"pids": pids, "import_s": round(import_s, 3)})
    for number, handler in handlers.items():
        signal.signal(number, handler)
    run_rank()
    if order["ours"]:
        # The end of Python touches every object of every module, and so copies the memory that the ranks share: 0.25 s
        # and 185 MB a rank, after `import torch`.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


def _answer(link: socket.socket, answer: Mapping[str, Any]) -> NoReturn:
    """Send the answer, and exit without Python's own end, which is left to the ranks."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], bytes]]:
    """Redirect standard output and error, also of C code, into memory."""
    kept = os.dup(1), os.dup(2)
    memory = os.memfd_create("printed")
    os.dup2(memory, 1)
    os.dup2(memory, 2)
    try:
        yield lambda: os.pread(memory, _MAX_PRINTED, 0)
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, memory):
            os.close(descriptor)


def _demand_forkable() -> None:
    """Raise RefusedError if a thread lives, or CUDA was initialised: neither survives a fork.

    Some libraries (OpenBLAS) end their threads before a fork, so the threads are counted after a first one.
    """
    pid = os.fork()
    if pid == 0:
        torch = sys.modules.get("torch")
        in_bad_fork = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
        os._exit(bool(in_bad_fork and in_bad_fork()))
    if os.waitpid(pid, 0)[1] != 0:
        raise RefusedError("CUDA was initialised when the packages were imported")
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        names = sorted((thread / "comm").read_text().strip() for thread in threads if thread.name != str(os.getpid()))
        raise RefusedError(f"threads run after the imports: {', '.join(names)}")


def _fork_ranks(
    ranks: Mapping[str, Mapping[str, Any]], link: socket.socket, listener: int | None, printed: bytes
) -> dict[str, int] | None:
    """Fork all ranks and return their pids once each leads its own session; return None in a rank that is to begin."""
    files = {rank: [open_log(Path(each[name])) for name in ("stdout", "stderr")] for rank, each in ranks.items()}
    reader, writer = os.pipe()
    pids: dict[str, int] = {}
    for rank, each in ranks.items():
        pid = os.fork()
        if pid == 0:
            _become_rank(link, writer, files[rank], each["variables"], printed)
            os.close(reader)
            for file in (file for pair in files.values() for file in pair):
                file.close()
            if listener is not None and rank == "0":
                os.environ[LISTENER_FD] = str(listener)
            elif listener is not None:
                os.close(listener)
            return None
        pids[rank] = pid
    os.close(writer)
    while os.read(reader, 4096):
        pass
    return pids


def _become_rank(
    link: socket.socket, led: int, files: Sequence[BinaryIO], variables: Mapping[str, str], printed: bytes
) -> None:
    """Start a session, wait until the supervisor lets this rank begin, and set its own files and variables.

    `led`: closed once this process leads its session and its group can be signalled.
    """
    try:
        os.setsid()
        os.close(led)
        if link.recv(1) == b"":
            os._exit(1)
        link.close()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(files[0].fileno(), 1)
        os.dup2(files[1].fileno(), 2)
        if printed:
            os.write(2, printed)
    except OSError:
        os._exit(1)
    os.environ.update(variables)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as after an import of its own
    gc.enable()

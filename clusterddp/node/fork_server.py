"""The fork server: a process that imports the packages of a node's ranks once, forks the ranks, and exits.

`python -m clusterddp.node.rank --fork RUN_DIR` has a socket to its supervisor as standard input. It imports what
`CLUSTERDDP_PRELOAD` names, reads one line of JSON, `{"ours": bool, "once": bool, "ranks": {rank: {"variables": {name:
value | null}, "stdout": path, "stderr": path}}}`, with the socket for rank 0 to listen at, and answers with one:
`{"pids": {rank: pid}, "import_s": float, "waits": pid}` or `{"refused": reason}`. `ours`: the entry is clusterddp's
own, whose modules need no end of Python.

Then it exits, and the supervisor, a subreaper, becomes the parent of the ranks. Each rank waits for one byte from the
supervisor; when the socket ends first, it exits. So all ranks of a node begin, or none. Unless the order says `once`, a
copy that was forked before them stays: it waits for the order of the next attempt, which then imports nothing, at a
socket of its own, whose other end comes with the answer. It exits when the supervisor closes that.

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
from typing import Any, BinaryIO, NamedTuple, NoReturn

from clusterddp.node.entry import change_environment, import_first
from clusterddp.ranks.environment import LISTENER_FD, PRELOAD, SUPERVISOR_PID
from clusterddp.system.files import open_log
from clusterddp.system.processes import die_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Users and batch systems send these to all processes of a run to stop it. The supervisor handles them."""
_MAX_PRINTED = 65536


class RefusedError(Exception):
    """The ranks cannot be forked; the message is the reason."""


class _Copy(NamedTuple):
    """A copy of the fork server, or in the copy itself: pid 0."""

    pid: int
    link: socket.socket
    """Between the copy and the supervisor: here the other's end, or the own one."""


def serve(run_rank: Callable[[], None]) -> None:
    """Import, fork and exit; in the ranks, call `run_rank` and return as it does."""
    supervisor = int(os.environ[SUPERVISOR_PID])
    die_with_parent(supervisor)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    link = socket.socket(fileno=os.dup(0))
    try:
        begun = time.monotonic()
        with _captured() as read:
            # The garbage collector stays off until the fork: a visit to these objects copies their memory.
            import_first(os.environ.pop(PRELOAD).split(","))
            printed = read()  # for each rank's standard error
        import_s = time.monotonic() - begun
        _demand_forkable()
        while True:
            order, listener = _read_order(link)
            die_with_parent(supervisor)
            copy = None if order["once"] else _fork_copy()
            if copy is None or copy.pid:
                break
            link.close()
            if listener is not None:
                os.close(listener)
            link, import_s = copy.link, 0.0
        pids = _fork_ranks(order["ranks"], link, listener, printed)
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        _answer(link, {"refused": why})
    if pids is not None:
        answer = {"pids": pids, "import_s": round(import_s, 3)}
        _answer(link, answer if copy is None else answer | {"waits": copy.pid}, copy)
    if copy is not None:
        copy.link.close()
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


def _read_order(link: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Wait for the order, with the socket for rank 0 if there is one; exit when the supervisor wants no more ranks."""
    text, listener = receive_line(link)
    if not text:
        os._exit(0)
    return json.loads(text), listener


def send_line(link: socket.socket, content: Mapping[str, Any], descriptor: int | None = None) -> None:
    """Send one line of JSON, with a descriptor; nothing where the other side has ended, which its exit tells."""
    line = json.dumps(content).encode() + b"\n"
    with contextlib.suppress(OSError):
        sent = socket.send_fds(link, [line], [] if descriptor is None else [descriptor])
        link.sendall(line[sent:])


def receive_line(link: socket.socket) -> tuple[bytes, int | None]:
    """Receive such a line; it is empty where the other side has ended, or does not block and there is none."""
    text, descriptors = b"", list[int]()
    with contextlib.suppress(OSError):
        while not text.endswith(b"\n"):
            data, found, _, _ = socket.recv_fds(link, 65536, 1, socket.MSG_CMSG_CLOEXEC)
            descriptors += found
            if not data:
                break
            text += data
    return text if text.endswith(b"\n") else b"", descriptors[0] if descriptors else None


def _fork_copy() -> _Copy:
    """Fork a copy of this process, which leads a group of its own, so that it can be signalled alone."""
    theirs, its = socket.socketpair()
    pid = os.fork()
    os.setpgid(pid, pid or os.getpid())  # whichever of the two is first
    if pid == 0:
        theirs.close()
        return _Copy(0, its)
    its.close()
    return _Copy(pid, theirs)


def _answer(link: socket.socket, answer: Mapping[str, Any], copy: _Copy | None = None) -> NoReturn:
    """Send the answer, and exit without Python's own end, which is left to the ranks."""
    send_line(link, answer, None if copy is None else copy.link.fileno())
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
    link: socket.socket, led: int, files: Sequence[BinaryIO], variables: Mapping[str, str | None], printed: bytes
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
    change_environment(variables)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as after an import of its own
    gc.enable()

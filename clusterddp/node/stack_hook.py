"""What lets the supervisor ask a rank where it is and how fast: a thread that answers, a signal for when it cannot.

The thread has the GIL while it reads the stacks of all threads and how far the collectives are. That it does not answer
means that C code holds the GIL; then faulthandler writes the main thread's stack in a signal handler, into memory (a
memfd) that the supervisor opens by /proc. The handler writes its own thread only: to walk the stack of a thread that
runs crashes Python (3.11: after 405 signals beside two busy threads).
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import zlib
from types import FrameType
from typing import Any

STACKS, PACE = b"s", b"p"
"""What is asked."""
MEMORY_PREFIX = "clusterddp-stacks-"
"""How the memory is named; the rest names the socket of the thread that answers."""
ROOT = 0
_PEER = struct.Struct("3i")
_MAX_THREADS, _MAX_FRAMES = 64, 60
_SEND_S = 2.0
_DEFAULT_GROUP = "default_pg"


def stack_signal() -> int:
    """Return the signal: real-time, and none that a threading library, NCCL or a profiler is known to take."""
    return int(signal.SIGRTMIN) + 7


def socket_name(key: str) -> str:
    """Return the abstract address at which a rank answers."""
    return f"\0clusterddp-rank-{key}"


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end of a unix socket."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def answer_stack_requests() -> None:
    """Make this process write its stacks when it gets the signal, and answer at its socket.

    It is left out where the kernel refuses; the run goes on without it.
    """
    if not hasattr(os, "memfd_create"):  # a Python built for an old C library
        return
    key = os.urandom(8).hex()
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(socket_name(key))
        listener.listen(4)
        _thread.start_new_thread(_answer, (listener, _thread.get_ident()))
        memory = os.memfd_create(MEMORY_PREFIX + key)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(stack_signal(), file=memory, all_threads=False, chain=False)


def read_collectives() -> dict[str, dict[str, Any]]:
    """Read how far each process group is; empty where torch's Flight Recorder records nothing."""
    try:
        recorded = _dump_recorder()
        groups = {
            group: {
                "enqueued": int(each["last_enqueued_collective"]),
                "completed": int(each["last_completed_collective"]),
                "name": "",
            }
            for group, each in recorded.get("pg_status", {}).items()
        }
        for entry in recorded.get("entries", ()):
            group = groups.get(str(entry.get("pg_id")))
            if group is not None and entry.get("collective_seq_id") == group["enqueued"]:
                group["name"] = str(entry.get("profiling_name", "")).rpartition(":")[2][:60]
    except Exception:  # whatever a later torch answers, the rank goes on
        return {}
    return groups


def read_pace(most: int = 200) -> dict[str, Any]:
    """Read how far the program is, and when it entered its newest collectives.

    `entered`: the newest `most` of the default group, oldest first: number, kind, nanoseconds since the epoch. Two of
    one kind have the same name and the same sizes, as a bucket of gradients in each step. `meets`: whether the program
    has entered any collective of any group; None: that is not known.
    """
    reached = getattr(sys.modules.get("clusterddp.run.metrics"), "reached", None)
    entered, meets = [], None
    with contextlib.suppress(Exception):  # as in `read_collectives`
        recorded = _dump_recorder()
        meets = bool(recorded.get("entries")) if recorded else None
        for entry in recorded.get("entries", ())[-most:]:
            if not entry["is_p2p"] and entry["process_group"][1] == _DEFAULT_GROUP:
                kind = zlib.crc32(f"{entry['profiling_name']} {entry['input_sizes']}".encode()) & 0xFFFF
                entered.append((int(entry["collective_seq_id"]), kind, int(entry["time_created_ns"])))
    return {
        "step": getattr(reached, "step", None),
        "own_step_s": getattr(reached, "own_step_s", None),
        "entered": entered,
        "meets": meets,
    }


def _dump_recorder() -> dict[str, Any]:
    """Return what torch's Flight Recorder has recorded.

    Its function is private (torch 2.13); where it is absent, or answers otherwise, nothing is known.
    """
    c10d = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    return {} if dump is None else dict(json.loads(dump(True, False)))


def read_threads(main: int) -> list[dict[str, Any]]:
    """Read where the threads of this process are, innermost frame first; the calling thread is left out."""
    names = getattr(sys.modules.get("threading"), "_active", {})
    found = []
    for ident, frame in list(sys._current_frames().items())[:_MAX_THREADS]:
        frames: list[tuple[str, int, str]] = []
        inner: FrameType | None = frame
        while inner is not None and len(frames) < _MAX_FRAMES:
            code = inner.f_code
            frames.append((code.co_filename, inner.f_lineno or 0, getattr(code, "co_qualname", code.co_name)))
            inner = inner.f_back
        name = str(getattr(names.get(ident), "name", ident))
        if ident != _thread.get_ident():
            found.append({"main": ident == main, "name": name, "frames": frames})
    return found


def _answer(listener: socket.socket, main: int) -> None:
    """Answer the question of each connection of the same user with one JSON object, while the process lives."""
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        # Whatever goes wrong here is not the program's: it prints nothing, and the next question is answered.
        with contextlib.suppress(Exception), connection:
            connection.settimeout(_SEND_S)
            if peer_of(connection)[1] in (ROOT, os.getuid()):
                stacks = connection.recv(1) == STACKS
                answer = {"threads": read_threads(main), "collectives": read_collectives()} if stacks else read_pace()
                connection.sendall(json.dumps(answer).encode())

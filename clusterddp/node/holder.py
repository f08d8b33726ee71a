"""A process that holds one rank: it starts the rank as its own child when the node's supervisor orders it.

Slurm's tasks (task.py) and the processes that torchrun starts (torchrun_rank.py) are holders. tasks.py lists the
messages between them and the supervisor. This imports next to nothing: sixteen of them start at once on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.processes import STOP_SIGNALS, become_subreaper, signal_group, start_rank
from clusterddp.node.taskwire import MAX_PACKET, peer_of
from clusterddp.ranks.environment import SUPERVISOR_PID, inherited_environment

_ONE_DESCRIPTOR = socket.CMSG_LEN(4)


class Holder:
    """Holds a rank for the supervisor; `serve` returns when the supervisor lets it exit, or has ended."""

    def __init__(self) -> None:
        self.forward: Callable[[int], object] = lambda number: None
        """Receives each signal that asks for a stop; those before `serve` when it begins."""
        self._rank_pid: int | None = None
        self._returncode: int | None = None
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            # A handler and not SIG_IGN: what is ignored stays ignored in the rank.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        become_subreaper()
        self._sock: socket.socket

    def serve(self, sock: socket.socket, here: dict[str, Any]) -> int | None:
        """Send `here`, carry out the supervisor's orders, and return the exit code of its `leave`; None: it has ended.

        `exit_code` gives the rank's own exit code, where that is not 0.
        """
        self._sock = sock
        self._send({"kind": "here", **here})
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        while True:
            poll.poll()
            self._take_signals()
            self._look_at_children()
            order = self._receive()
            if order is None:
                continue
            if order["kind"] == "leave":
                return int(order["exit_code"])
            if order["kind"] == "gone":
                return None
            self._obey(order)

    def kill_rank(self) -> None:
        """Kill the rank, because its supervisor has ended."""
        if self._rank_pid is not None:
            signal_group(self._rank_pid, signal.SIGKILL)
            os.waitpid(self._rank_pid, 0)
            self._returncode = self._returncode if self._returncode is not None else -signal.SIGKILL

    def exit_code(self, otherwise: int) -> int:
        """Return the rank's exit code as a shell has it; `otherwise` where it is 0 or there is none."""
        code = self._returncode
        if code is None:
            return otherwise
        return 128 - code if code < 0 else code or otherwise

    def _obey(self, order: dict[str, Any]) -> None:
        if order["kind"] == "start":
            self._start_rank(order)
        elif order["kind"] == "signal" and self._rank_pid is not None:
            signal_group(self._rank_pid, order["number"])
        elif order["kind"] == "reap" and self._rank_pid is not None:
            os.waitpid(self._rank_pid, 0)
            self._rank_pid = None

    def _start_rank(self, order: dict[str, Any]) -> None:
        variables = {
            name: value
            for name, value in order["variables"].items()
            if name not in order["unless"] or name not in os.environ
        }
        environment = inherited_environment() | variables | {SUPERVISOR_PID: str(os.getpid())}
        self._returncode = None
        try:
            self._rank_pid = start_rank(
                Path(order["run_dir"]),
                environment=environment,
                stdout=Path(order["stdout"]),
                stderr=Path(order["stderr"]),
                listener=order.get("listener"),
            )
        except OSError as error:
            self._send({"kind": "not_started", "error": str(error)})
        else:
            self._send({"kind": "started", "pid": self._rank_pid})
        if "listener" in order:
            os.close(order["listener"])

    def _take_signals(self) -> None:
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers |= set(data)
        for number in sorted(numbers & STOP_SIGNALS):
            self.forward(number)

    def _look_at_children(self) -> None:
        """Report the rank's end; it stays a zombie and keeps its pid until the supervisor sends `reap`."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid == self._rank_pid:
                if self._returncode is None:
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    self._returncode = code
                    self._send({"kind": "ended", "returncode": code})
                return
            os.waitpid(ended.si_pid, 0)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(message).encode())
        except OSError:
            return  # it has ended, which the next receive finds

    def _receive(self) -> dict[str, Any] | None:
        try:
            # Not socket.recv_fds, which ignores its flags, and so would wait (Python 3.11).
            packet, ancillary, _, _ = self._sock.recvmsg(MAX_PACKET, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            packet, ancillary = b"", []
        message = dict(json.loads(packet)) if packet else {"kind": "gone"}
        given = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        return message | ({"listener": int.from_bytes(given[0][:4], sys.byteorder)} if given and given[0] else {})


def connect(name: str) -> socket.socket | None:
    """Connect to the supervisor, or to its guard, which holds the same socket; None: no process listens.

    Raises: ClusterddpError: another user's process has taken the name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise ClusterddpError(f"process {pid} of user {uid} listens in place of the supervisor of this node")
    return sock

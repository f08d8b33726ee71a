"""A process that holds one rank: it starts it as a child of its own when the node's supervisor says so.

Slurm's tasks are such processes (task.py), and what torchrun starts (torchrun_rank.py). What they and the supervisor
say to each other is listed in tasks.py. It imports next to nothing: sixteen of these start at once on two cores.
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
    """Holds a rank for the supervisor; `serve` returns when that lets it go, or is gone."""

    def __init__(self) -> None:
        self.forward: Callable[[int], object] = lambda number: None
        """Gets each signal that asks for a stop, if need be after `serve` has begun."""
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
        """Say who we are, do what the supervisor says; return the exit code it lets us go with, None when it is gone.

        The rank's own exit code, where there is one that is not 0, is `exit_code`'s.
        """
        self._sock = sock
        self._say({"kind": "here", **here})
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        while True:
            poll.poll()
            self._take_signals()
            self._look_at_children()
            words = self._hear()
            if words is None:
                continue
            if words["kind"] == "leave":
                return int(words["exit_code"])
            if words["kind"] == "gone":
                return None
            self._obey(words)

    def kill_rank(self) -> None:
        """End the rank, for nobody is left to ask for it."""
        if self._rank_pid is not None:
            signal_group(self._rank_pid, signal.SIGKILL)
            os.waitpid(self._rank_pid, 0)
            self._returncode = self._returncode if self._returncode is not None else -signal.SIGKILL

    def exit_code(self, otherwise: int) -> int:
        """Return the rank's exit code as a shell would say it; `otherwise` where it is 0 or there is none."""
        code = self._returncode
        if code is None:
            return otherwise
        return 128 - code if code < 0 else code or otherwise

    def _obey(self, words: dict[str, Any]) -> None:
        if words["kind"] == "start":
            self._start_rank(words)
        elif words["kind"] == "signal" and self._rank_pid is not None:
            signal_group(self._rank_pid, words["number"])
        elif words["kind"] == "reap" and self._rank_pid is not None:
            os.waitpid(self._rank_pid, 0)
            self._rank_pid = None

    def _start_rank(self, words: dict[str, Any]) -> None:
        variables = {
            name: value
            for name, value in words["variables"].items()
            if name not in words["unless"] or name not in os.environ
        }
        environment = inherited_environment() | variables | {SUPERVISOR_PID: str(os.getpid())}
        self._returncode = None
        try:
            self._rank_pid = start_rank(
                Path(words["run_dir"]),
                environment=environment,
                stdout=Path(words["stdout"]),
                stderr=Path(words["stderr"]),
                listener=words.get("listener"),
            )
        except OSError as error:
            self._say({"kind": "not_started", "error": str(error)})
        else:
            self._say({"kind": "started", "pid": self._rank_pid})
        if "listener" in words:
            os.close(words["listener"])

    def _take_signals(self) -> None:
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers |= set(data)
        for number in sorted(numbers & STOP_SIGNALS):
            self.forward(number)

    def _look_at_children(self) -> None:
        """Report the rank's end; it stays a zombie, its pid its own, until the supervisor has taken note."""
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
                    self._say({"kind": "ended", "returncode": code})
                return
            os.waitpid(ended.si_pid, 0)

    def _say(self, words: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(words).encode())
        except OSError:
            return  # it is gone, which is heard next

    def _hear(self) -> dict[str, Any] | None:
        try:
            # Not socket.recv_fds, which ignores its flags, and so would wait (Python 3.11).
            packet, ancillary, _, _ = self._sock.recvmsg(MAX_PACKET, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            packet, ancillary = b"", []
        words = dict(json.loads(packet)) if packet else {"kind": "gone"}
        given = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        return words | ({"listener": int.from_bytes(given[0][:4], sys.byteorder)} if given and given[0] else {})


def connect(name: str) -> socket.socket | None:
    """Connect to our supervisor, or whoever holds its socket; None: nobody does.

    Raises: ClusterddpError: somebody else has taken its name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise ClusterddpError(f"process {pid} of user {uid} poses as the supervisor of this node")
    return sock

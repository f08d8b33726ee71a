"""Runs a clusterddp command on a host: passes on its output while it is written, and sends it Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import SshError
from clusterddp.ssh.session import BOOT_TIMEOUT_S, HostAccess, Package, Session

HEARTBEAT_INTERVAL_S = 10.0
_HEARTBEAT_TIMEOUT_S = 20.0
_STATUS_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 15
_MARK = b"clusterddp-agent "
_START = b"""\
import json, os, sys
order = json.loads(sys.stdin.buffer.readline())
root = os.path.abspath(os.path.expanduser(order["root"]))
sys.path.insert(0, os.path.join(root, "packages", order["package"]))
from clusterddp.agent.command import main
main()
"""
"""What the constant command runs in place of the boot, which has uploaded the package before."""

Write = Callable[[bytes], object]


@dataclass(kw_only=True)
class Command(Session):
    """A second session on the connection of an agent, in which a command runs; made by `open_command`."""

    _sending: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Command:
        return self

    def start(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send what to run; return the host's answer before it runs it.

        Raises: SshError.
        """
        self._send_line(order, BOOT_TIMEOUT_S)
        return self.read_marked({"missing": list[str], "python": str}, BOOT_TIMEOUT_S)

    def wait(self, agent: Session, write_out: Write, write_err: Write) -> int | None:
        """Pass on the command's output until it has ended; return its exit code, None when the connection broke.

        Raises: OSError: the output cannot be written here; the command then gets SIGTERM.
        """
        self.channel.settimeout(None)
        failures: list[OSError] = []
        ended = threading.Event()
        streams = ((self._out_chunks(), write_out), (self._err_chunks(), write_err))
        pumps = [threading.Thread(target=self._pump, args=(*each, failures), daemon=True) for each in streams]
        threading.Thread(target=self._send_heartbeats, args=(agent, ended), daemon=True).start()
        for pump in pumps:
            pump.start()
        try:
            self._await(pumps)
        finally:
            ended.set()
        if failures:
            raise failures[0]
        self.channel.status_event.wait(_STATUS_TIMEOUT_S)
        return self.channel.exit_status if self.channel.exit_status >= 0 else None

    def interrupt(self) -> None:
        """Send the command Ctrl-C."""
        self._notify({"signal": int(signal.SIGINT)})

    def _notify(self, message: Mapping[str, Any]) -> None:
        """Send a line to the process that runs the command, if it still runs (agent/command.py)."""
        with contextlib.suppress(OSError), self._sending:
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def _await(self, pumps: list[threading.Thread]) -> None:
        """Wait until the streams have ended; the first Ctrl-C goes to the command, the second one ends this wait."""
        interrupted = False
        while any(pump.is_alive() for pump in pumps):
            try:
                for pump in pumps:
                    pump.join(timeout=1.0)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.interrupt()

    def _pump(self, chunks: Iterator[bytes], write: Write, failures: list[OSError]) -> None:
        try:
            for chunk in chunks:
                write(chunk)
        except OSError as error:  # the reader of a pipe has ended, or the disk is full
            failures.append(error)
            self._notify({"signal": int(signal.SIGTERM)})
            self.channel.close()

    def _send_heartbeats(self, agent: Session, ended: threading.Event) -> None:
        """Send heartbeats to that process and to the agent; close the channel when the agent does not answer."""
        while not ended.wait(HEARTBEAT_INTERVAL_S):
            self._notify({})
            try:
                agent.ask("beat", timeout_s=_HEARTBEAT_TIMEOUT_S)
            except SshError:
                self.channel.close()
                return

    def _out_chunks(self) -> Iterator[bytes]:
        yield self._unread
        while chunk := self.channel.recv(_CHUNK_BYTES):
            yield chunk

    def _err_chunks(self) -> Iterator[bytes]:
        """Skip what a login shell, or `module load`, prints before the command starts."""
        preface = b""
        while chunk := self.channel.recv_stderr(_CHUNK_BYTES):
            preface += chunk
            _, mark, rest = preface.partition(_MARK + b"\n")
            if mark:
                yield rest
                break
        while chunk := self.channel.recv_stderr(_CHUNK_BYTES):
            yield chunk


def open_command(agent: Session, access: HostAccess, package: Package) -> Command:
    """Open a second session on the agent's connection, to run a command in.

    Raises: SshError.
    """
    if not agent.connection.retain():
        raise SshError(agent.host, "start", "the connection broke", dropped=True)
    try:
        channel = agent.connection.execute(package.command)
        command = Command(host=access.host, connection=agent.connection, channel=channel, answers={})
        command.begin(access, dataclasses.replace(package, boot=_START, hello={"have": bool}))
    except BaseException:
        agent.connection.close()
        raise
    return command

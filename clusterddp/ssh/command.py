"""A command of ours on a host, with its streams: what it writes comes back as it is written, Ctrl-C goes there."""

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

BEAT_S = 10.0
"""How often the host hears that somebody is here, and has to answer."""
_SILENCE_S = 20.0
_STATUS_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 15
_MARK = b"clusterddp-agent "
_START = b"""\
import json, os, sys
order = json.loads(sys.stdin.buffer.readline())
root = os.path.abspath(os.path.expanduser(order["root"]))
sys.path.insert(0, os.path.join(root, "packages", order["package"]))
from clusterddp.agent.relay import main
main()
"""
"""What the constant command runs, in the place of the boot, when that has put our package on the host."""

Write = Callable[[bytes], object]


@dataclass(kw_only=True)
class Command(Session):
    """A second conversation with a host whose agent we talk to already; made by `open_command`."""

    _telling: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Command:
        return self

    def order(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Say what is to be run; return what the host says before it does so.

        Raises: SshError.
        """
        self._send_line(words, BOOT_TIMEOUT_S)
        return self.read_marked({"missing": list[str], "python": str}, BOOT_TIMEOUT_S)

    def stay(self, agent: Session, write_out: Write, write_err: Write) -> int | None:
        """Hand on what the command writes until it has ended; return its exit code, None: the connection broke.

        Raises: OSError: what it writes cannot be written here; it is then told to end.
        """
        self.channel.settimeout(None)
        refused: list[OSError] = []
        ended = threading.Event()
        streams = ((self._out_chunks(), write_out), (self._err_chunks(), write_err))
        pumps = [threading.Thread(target=self._pump, args=(*each, refused), daemon=True) for each in streams]
        threading.Thread(target=self._beat, args=(agent, ended), daemon=True).start()
        for pump in pumps:
            pump.start()
        try:
            self._await(pumps)
        finally:
            ended.set()
        if refused:
            raise refused[0]
        self.channel.status_event.wait(_STATUS_TIMEOUT_S)
        return self.channel.exit_status if self.channel.exit_status >= 0 else None

    def tell(self, words: Mapping[str, Any]) -> None:
        """Say a line to the command's keeper, if there is still one."""
        with contextlib.suppress(OSError), self._telling:
            self.channel.sendall(json.dumps(words).encode() + b"\n")

    def _await(self, pumps: list[threading.Thread]) -> None:
        """Wait until the streams have ended; the first Ctrl-C is the command's, the second one ours."""
        interrupted = False
        while any(pump.is_alive() for pump in pumps):
            try:
                for pump in pumps:
                    pump.join(timeout=1.0)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.tell({"signal": int(signal.SIGINT)})

    def _pump(self, chunks: Iterator[bytes], write: Write, refused: list[OSError]) -> None:
        try:
            for chunk in chunks:
                write(chunk)
        except OSError as error:  # nobody reads it any more, or the disk is full
            refused.append(error)
            self.tell({"signal": int(signal.SIGTERM)})
            self.channel.close()

    def _beat(self, agent: Session, ended: threading.Event) -> None:
        """Notice a connection of which nobody says that it is broken, and be heard at the other end."""
        while not ended.wait(BEAT_S):
            self.tell({})
            try:
                agent.ask("beat", timeout_s=_SILENCE_S)
            except SshError:
                self.channel.close()
                return

    def _out_chunks(self) -> Iterator[bytes]:
        yield self._unread
        while chunk := self.channel.recv(_CHUNK_BYTES):
            yield chunk

    def _err_chunks(self) -> Iterator[bytes]:
        """Leave out what a login shell, or `module load`, says before the command starts."""
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
    """Open the conversation in which a command is run.

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

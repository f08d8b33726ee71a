"""A connection to a host whose key is checked and that has accepted the user's key."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination
from clusterddp.ssh.host_keys import HostKey

if TYPE_CHECKING:
    import paramiko

    from clusterddp.ssh.stream import Stream

_SESSION_TIMEOUT_S = 15.0


@dataclass(kw_only=True)
class Connection:
    """A connection to one host; made by `Connector`. The caller closes it."""

    destination: Destination
    key: HostKey
    transport: paramiko.Transport
    below: Stream | Connection
    """What carries it: a stream of its own, or a connection to the last jump host, which others may share."""
    users: int = 1
    """How many hold it; the last `close` closes it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_session(self, timeout_s: float = _SESSION_TIMEOUT_S) -> paramiko.Channel:
        """Open a channel for one command.

        Raises: SshError.
        """
        import paramiko

        try:
            return self.transport.open_session(timeout=timeout_s)
        except (paramiko.SSHException, EOFError, OSError) as error:
            found = f"{self.destination.address} opens no session ({' '.join(str(error).split())})"
            hint = "is the host overloaded? MaxSessions of its sshd"
            raise SshError(self.destination.host, "connect", found, hint=hint) from error

    def execute(self, command: str, timeout_s: float = _SESSION_TIMEOUT_S) -> paramiko.Channel:
        """Run a command on the host; the channel carries its standard streams.

        Raises: SshError.
        """
        import paramiko

        channel = self.open_session(timeout_s)
        channel.settimeout(timeout_s)
        try:
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            found = f"{self.destination.address} runs no command ({' '.join(str(error).split()) or 'no answer'})"
            raise SshError(self.destination.host, "start", found, hint="a forced command, or a login shell?") from error
        return channel

    def measure_round_trip_s(self) -> float:
        """Open a session on the host, and return how long its answer took.

        Raises: SshError.
        """
        start = time.monotonic()
        with self.open_session():
            return time.monotonic() - start

    def retain(self) -> bool:
        """Share an open connection; return False when it is closed already."""
        with self.lock:
            if self.users == 0 or not self.transport.is_active():
                return False
            self.users += 1
            return True

    def close(self) -> None:
        """Release the connection; the last user closes it, and what carries it."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
        self.transport.close()
        self.below.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

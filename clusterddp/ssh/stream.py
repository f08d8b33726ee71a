"""The bytes to and from the first hop: a TCP connection, or the ProxyCommand of the user's configuration."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination

CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 30
"""How long the kernel waits for a peer that acknowledges nothing (TCP_USER_TIMEOUT)."""
_PROBE_S = 8
_FAMILIES = {None: socket.AF_UNSPEC, 4: socket.AF_INET, 6: socket.AF_INET6}


@dataclass(kw_only=True)
class Stream:
    """A socket to a host, and the ProxyCommand behind it, where there is one."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None
    stderr: IO[bytes] | None = None
    """The file that takes the ProxyCommand's standard error."""

    def last_error_line(self) -> str:
        """Return the last line that the ProxyCommand wrote to stderr."""
        if self.stderr is None or self.stderr.closed:
            return ""
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Close the socket and end the ProxyCommand; a second call does nothing."""
        self.socket.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.stderr is not None:
            self.stderr.close()


def open_stream(destination: Destination, environ: Mapping[str, str]) -> Stream:
    """Connect to a host, or start its ProxyCommand.

    Raises: SshError.
    """
    if destination.proxy_command is not None:
        return _start_proxy(destination, destination.proxy_command, environ)
    last: OSError | None = None
    for family, address in _addresses(destination):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(destination.connect_timeout_s or CONNECT_TIMEOUT_S)
            connection.connect(address)
        except OSError as error:
            connection.close()
            last = error
        else:
            _set_timeouts(connection)
            return Stream(socket=connection)
    assert last is not None
    raise _unreachable(destination, last) from last


def _addresses(destination: Destination) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(
            destination.hostname, destination.port, _FAMILIES[destination.ip_version], socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:
        text = error.strerror if isinstance(error, socket.gaierror) else str(error)
        found_text = f"{destination.hostname}: {text}"
        hint = f"its HostName in ~/.ssh/config; getent hosts {destination.hostname}"
        raise SshError(destination.host, "resolve", found_text, hint=hint) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


def _set_timeouts(connection: socket.socket) -> None:
    """Have the kernel detect a dead peer: by keepalive while nothing is sent, by missing acknowledgements otherwise."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _unreachable(destination: Destination, error: OSError) -> SshError:
    if isinstance(error, TimeoutError):
        limit_s = destination.connect_timeout_s or CONNECT_TIMEOUT_S
        found = f"{destination.address} did not answer within {limit_s:g} s"
        hint = f"is it on, and not behind a firewall? ping {destination.hostname}"
    elif isinstance(error, ConnectionRefusedError):
        found = f"{destination.address} refused the connection"
        hint = "nothing listens there: is sshd running, on this port?"
    else:
        found = f"{destination.address}: {os.strerror(error.errno) if error.errno else error}"
        hint = f"is it on, and on this network? ping {destination.hostname}"
    dropped = isinstance(error, ConnectionResetError)
    return SshError(destination.host, "connect", found, hint=hint, dropped=dropped)


def _start_proxy(destination: Destination, command: str, environ: Mapping[str, str]) -> Stream:
    """Start a ProxyCommand as OpenSSH does: by the user's shell, with a socket as its standard input and output."""
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    shell = environ.get("SHELL") or "/bin/sh"
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        found = f"the ProxyCommand's shell {shell}: {error.strerror}"
        raise SshError(destination.host, "connect", found, hint=f"ssh -G {destination.host}") from error
    finally:
        theirs.close()
    return Stream(socket=ours, process=process, stderr=stderr)

"""One hop of an SSH connection on paramiko: the handshake, and a tunnel to the next hop. Checks no host key."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import paramiko
from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from clusterddp.errors import SshError
from clusterddp.ssh.certificate import CERTIFICATE
from clusterddp.ssh.config import Destination
from clusterddp.ssh.host_keys import HostKey

HANDSHAKE_TIMEOUT_S = 15.0
AUTHENTICATION_TIMEOUT_S = 30.0
_PROHIBITED = 1  # RFC 4254, 5.1

_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


class Transport(paramiko.Transport):
    """A transport that asks for the host keys of `algorithms`, in their order, and prefers ciphers that cost little."""

    algorithms: tuple[str, ...] = ()
    # Half the processor time of paramiko's first choice, AES-CTR with a separate MAC: benchmarks/ssh_send.py.
    _preferred_ciphers = (
        *_CIPHERS,
        *(name for name in paramiko.Transport._preferred_ciphers if name not in _CIPHERS),  # type: ignore[attr-defined]
    )

    @property
    def preferred_keys(self) -> Sequence[str]:
        return self.algorithms


def shake_hands(
    stream: socket.socket | paramiko.Channel, destination: Destination, algorithms: Sequence[str]
) -> tuple[Transport, HostKey]:
    """Shake hands with a host; return the key that it has proved to hold, which the caller checks.

    Raises: SshError: with `dropped` when the host hung up before it showed a key.
    """
    logger = logging.getLogger("paramiko")
    if not logger.handlers:  # else Python writes what paramiko logs, tracebacks too, to stderr
        logger.addHandler(logging.NullHandler())
    limit_s = destination.connect_timeout_s or HANDSHAKE_TIMEOUT_S
    transport = Transport(stream)
    transport.algorithms = tuple(algorithms)
    transport.banner_timeout = transport.handshake_timeout = limit_s
    transport.auth_timeout = AUTHENTICATION_TIMEOUT_S
    try:
        transport.start_client(timeout=2 * limit_s)
        if not transport.initial_kex_done:
            raise TimeoutError
        return transport, _host_key(transport)
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport.close()
        raise _no_handshake(transport, destination, error, limit_s) from error
    except BaseException:
        transport.close()
        raise


def open_tunnel(transport: paramiko.Transport, jump: Destination, destination: Destination) -> paramiko.Channel:
    """Have a jump host connect to the next host.

    Raises: SshError.
    """
    limit_s = destination.connect_timeout_s or HANDSHAKE_TIMEOUT_S
    target = (destination.hostname, destination.port)
    hint = f"is it on? on {jump.host}: ping {destination.hostname}"
    try:
        return transport.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=limit_s)
    except ChannelException as error:
        if error.code == _PROHIBITED:
            found = f"{jump.host} does not forward connections to {destination.address}"
            hint = f"AllowTcpForwarding and PermitOpen of the sshd on {jump.host}"
        else:
            found = f"{jump.host} cannot connect to {destination.address} ({error.text})"
    except (paramiko.SSHException, EOFError, OSError) as error:
        found = f"{jump.host} did not connect to {destination.address} within {limit_s:g} s ({_text(error)})"
    raise SshError(destination.host, "connect", found, hint=hint)


def _host_key(transport: Transport) -> HostKey:
    key = transport.get_remote_server_key()
    blob = key.public_blob
    certificate = blob.key_blob if blob is not None and CERTIFICATE in (transport.host_key_type or "") else None
    return HostKey(type=key.get_name(), blob=key.asbytes(), certificate=certificate)


def _no_handshake(transport: Transport, destination: Destination, error: Exception, limit_s: float) -> SshError:
    causes = [error, error.__context__]  # paramiko raises the same error for every failure at the first line
    if isinstance(error, IncompatiblePeer):
        found = f"no common algorithm: {_text(error)}"
        return SshError(destination.host, "connect", found, hint=f"ssh -vv {destination.host} lists what each side has")
    if any(isinstance(cause, EOFError | ConnectionError) for cause in causes):
        found = f"{destination.address} hung up during the handshake"
        hint = "too many connections at once (MaxStartups of sshd), or no sshd; its log shows which"
        return SshError(destination.host, "connect", found, hint=hint, dropped=True)
    if any(isinstance(cause, TimeoutError) for cause in causes):
        sent = f"sent {transport.remote_version}" if transport.remote_version else "accepted the connection"
        found = f"{destination.address} {sent}, then nothing for {limit_s:g} s"
        return SshError(
            destination.host, "connect", found, hint="is this sshd? is the host overloaded or out of memory?"
        )
    found = f"{destination.address}: {_text(error)}"
    return SshError(destination.host, "connect", found, hint=f"ssh -v {destination.host}")


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

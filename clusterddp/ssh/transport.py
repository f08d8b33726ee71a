"""One hop of an SSH connection on paramiko: the handshake, and the user's keys; nothing here trusts a host key."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import paramiko
from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from clusterddp.errors import SshError
from clusterddp.ssh.certificate import CERTIFICATE
from clusterddp.ssh.config import Destination
from clusterddp.ssh.identity import offers
from clusterddp.ssh.keys import HostKey

HANDSHAKE_TIMEOUT_S = 15.0
AUTHENTICATION_TIMEOUT_S = 30.0
_PROHIBITED = 1  # RFC 4254, 5.1
_HUNG_UP = "the host hung up"
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


class Transport(paramiko.Transport):
    """A transport that asks the host for keys in an order of its own, and for ciphers that cost little first."""

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
    """Agree on keys with a host; it has proved that it holds the key that is returned, and nothing else.

    Raises: SshError: with `dropped` when the host hung up before it said who it is.
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


def authenticate(transport: Transport, destination: Destination) -> None:
    """Offer the user's keys, those of the agent first; only a host whose key was checked may be asked.

    Raises: SshError.
    """
    refused: list[str] = []
    accepted: list[str] = []
    notes: list[str] = []
    with offers(destination, notes) as keys:
        for label, key in keys:
            try:
                more = transport.auth_publickey(destination.user, key)
            except paramiko.BadAuthenticationType as error:
                accepted = list(error.allowed_types)
                break
            except (paramiko.SSHException, EOFError, OSError) as error:
                if "timeout" in str(error).lower():  # paramiko has no error of its own for it
                    notes.append(f"no answer to {label} within {AUTHENTICATION_TIMEOUT_S:g} s")
                    break
                refused.append(label)
                if not transport.is_active():
                    notes.append(_HUNG_UP)
                    break
                continue
            if not more:
                return
            raise SshError(
                destination.host,
                "authentication",
                f"{destination.user} is let in with a key and {' or '.join(more)} only",
                hint="clusterddp asks for no password: have the host let keys in alone",
            )
    raise _denied(destination, refused, accepted, notes)


def open_tunnel(transport: paramiko.Transport, jump: Destination, destination: Destination) -> paramiko.Channel:
    """Let a host on the way connect to the next one.

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
        found = f"{jump.host} did not connect to {destination.address} within {limit_s:g} s ({_words(error)})"
    raise SshError(destination.host, "connect", found, hint=hint)


def _host_key(transport: Transport) -> HostKey:
    key = transport.get_remote_server_key()
    blob = key.public_blob
    certificate = blob.key_blob if blob is not None and CERTIFICATE in (transport.host_key_type or "") else None
    return HostKey(type=key.get_name(), blob=key.asbytes(), certificate=certificate)


def _no_handshake(transport: Transport, destination: Destination, error: Exception, limit_s: float) -> SshError:
    causes = [error, error.__context__]  # paramiko raises one error for all that befalls the first line
    if isinstance(error, IncompatiblePeer):
        found = f"no common algorithm: {_words(error)}"
        return SshError(destination.host, "connect", found, hint=f"ssh -vv {destination.host} lists what each side has")
    if any(isinstance(cause, EOFError | ConnectionError) for cause in causes):
        found = f"{destination.address} hung up before it said who it is"
        hint = "too many connections at once (MaxStartups of sshd), or no sshd; its log says which"
        return SshError(destination.host, "connect", found, hint=hint, dropped=True)
    if any(isinstance(cause, TimeoutError) for cause in causes):
        said = f"said {transport.remote_version} and" if transport.remote_version else "accepted the connection and"
        found = f"{destination.address} {said} then nothing for {limit_s:g} s"
        return SshError(
            destination.host, "connect", found, hint="is this sshd? is the host overloaded or out of memory?"
        )
    found = f"{destination.address}: {_words(error)}"
    return SshError(destination.host, "connect", found, hint=f"ssh -v {destination.host}")


def _denied(destination: Destination, refused: list[str], accepted: list[str], notes: list[str]) -> SshError:
    login = f"{destination.user}@{destination.hostname}"
    tried = f"refused {', '.join(refused)}" if refused else "took no key" if accepted or notes else "no key to offer"
    ways = f"; it lets in by {', '.join(accepted)} only" if accepted else ""
    also = f"; {'; '.join(notes)}" if notes else ""
    locked = next((note.split()[0] for note in notes if "encrypted" in note), None)
    if locked:
        hint = f"ssh-add {locked}"
    elif _HUNG_UP in notes:
        hint = "perhaps too many keys (MaxAuthTries): IdentitiesOnly yes and one IdentityFile in ~/.ssh/config"
    else:
        hint = f"ssh-copy-id {destination.host}, or its User and IdentityFile in ~/.ssh/config"
    return SshError(destination.host, "authentication", f"{login}: {tried}{ways}{also}", hint=hint)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""One hop of an SSH connection on paramiko: the handshake, a tunnel to the next hop, the user's keys.

Checks no host key, and never asks for a password or a passphrase.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import logging
import socket
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import ChannelException, IncompatiblePeer, SSHException

from clusterddp.errors import SshError
from clusterddp.places.ssh.config import Destination
from clusterddp.places.ssh.keys import CERTIFICATE, HostKey

HANDSHAKE_TIMEOUT_S = 15.0
AUTHENTICATION_TIMEOUT_S = 30.0
_CHANNEL_TIMEOUT_S = 15.0
_PROHIBITED = 1  # RFC 4254, 5.1
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
_AGENT_TIMEOUT_S = 60  # the user may have to touch a security key
_HUNG_UP = "the host hung up"


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
        key = transport.get_remote_server_key()
        blob = key.public_blob if CERTIFICATE in (transport.host_key_type or "") else None
        certificate = blob.key_blob if blob is not None else None
        return transport, HostKey(type=key.get_name(), blob=key.asbytes(), certificate=certificate)
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


def open_channel(transport: paramiko.Transport, destination: Destination) -> paramiko.Channel:
    """Open a channel for one command.

    Raises: SshError.
    """
    try:
        return transport.open_session(timeout=_CHANNEL_TIMEOUT_S)
    except (paramiko.SSHException, EOFError, OSError) as error:
        found = f"{destination.address} opens no session ({_text(error)})"
        hint = "is the host overloaded? MaxSessions of its sshd may be 0, as on a host that only forwards connections"
        raise SshError(destination.host, "connect", found, hint=hint) from error


def execute(transport: paramiko.Transport, destination: Destination, command: str) -> paramiko.Channel:
    """Run a command on the host; the channel carries its standard streams.

    Raises: SshError.
    """
    channel = open_channel(transport, destination)
    channel.settimeout(_CHANNEL_TIMEOUT_S)
    try:
        channel.exec_command(command)
    except (paramiko.SSHException, EOFError, OSError) as error:
        channel.close()
        found = f"{destination.address} runs no command ({_text(error)})"
        raise SshError(destination.host, "start", found, hint="a forced command, or a login shell?") from error
    return channel


def authenticate(transport: paramiko.Transport, destination: Destination) -> None:
    """Offer the user's keys, those of the agent first. The host's key has to be checked before.

    Raises: SshError.
    """
    refused: list[str] = []
    accepted: list[str] = []
    notes: list[str] = []
    with contextlib.closing(_offers(destination, notes)) as keys:
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
                f"the host accepts {destination.user} with a key and {' or '.join(more)} only",
                hint="clusterddp asks for no password: configure sshd to accept a key by itself",
            )
    raise _denied(destination, refused, accepted, notes)


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
    if isinstance(error, ChannelException):  # its own text is the name of the class and a number
        return error.text
    return " ".join(str(error).split()) or type(error).__name__


def _denied(destination: Destination, refused: list[str], accepted: list[str], notes: list[str]) -> SshError:
    login = f"{destination.user}@{destination.hostname}"
    refusal = "accepted no key" if accepted or notes else "no key to offer"
    tried = f"refused {', '.join(refused)}" if refused else refusal
    ways = f"; it accepts {', '.join(accepted)} only" if accepted else ""
    also = f"; {'; '.join(notes)}" if notes else ""
    locked = next((note.split()[0] for note in notes if "encrypted" in note), None)
    if locked:
        hint = f"ssh-add {locked}"
    elif _HUNG_UP in notes:
        hint = "perhaps too many keys (MaxAuthTries): IdentitiesOnly yes and one IdentityFile in ~/.ssh/config"
    else:
        hint = f"ssh-copy-id {destination.host}, or its User and IdentityFile in ~/.ssh/config"
    return SshError(destination.host, "authentication", f"{login}: {tried}{ways}{also}", hint=hint)


def _offers(destination: Destination, notes: list[str]) -> Generator[tuple[str, paramiko.PKey]]:
    """Yield the keys to offer, each with the user's name for it; `notes` gets why a key is left out.

    Keys of the agent that an IdentityFile names come first, then the agent's others unless IdentitiesOnly, then files.
    """
    named = {blob: path for path in destination.identity_files for blob in [_public_half(path)] if blob is not None}
    with _agent_keys(destination.agent, notes) as in_agent:
        chosen = [key for key in in_agent if key.asbytes() in named]
        others = [] if destination.identities_only else [key for key in in_agent if key.asbytes() not in named]
        for key in chosen + others:
            comment = getattr(key, "comment", "") or key.get_name()
            yield f"{named.get(key.asbytes(), comment)} (agent)", key
    from_agent = {key.asbytes() for key in chosen}
    for path in destination.identity_files:
        if _public_half(path) not in from_agent:
            yield from _read_key(path, notes)


@contextlib.contextmanager
def _agent_keys(path: str | None, notes: list[str]) -> Iterator[list[paramiko.PKey]]:
    if path is None:
        yield []
        return
    agent = AgentSSH()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_AGENT_TIMEOUT_S)
        try:
            connection.connect(path)
            # paramiko's own way to an agent reads SSH_AUTH_SOCK, and knows no IdentityAgent.
            agent._connect(connection)  # type: ignore[attr-defined]
        except (OSError, SSHException) as error:
            notes.append(f"the agent at {path} does not answer ({error})")
        yield list(agent.get_keys())


def _read_key(path: Path, notes: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Read one file; a certificate beside it is offered first, then the plain key."""
    if not path.is_file():
        return
    try:
        if path.stat().st_mode & 0o077:
            notes.append(f"{path} is readable by others, so it is not used (chmod 600)")
            return
        key = paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):  # TypeError: cryptography misses a passphrase
        notes.append(f"{path} is encrypted and not in the agent")
    except (OSError, ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm) as error:
        if not _is_public(path):  # a public key here names one of the agent's keys
            notes.append(f"{path} cannot be read ({str(error).splitlines()[0] if str(error) else 'unknown kind'})")
    else:
        if key.public_blob is not None:
            yield f"{path} with its certificate", key
            key = copy.copy(key)
            key.public_blob = None
        yield str(path), key


def _public_half(path: Path) -> bytes | None:
    for candidate in (path, path.with_name(f"{path.name}.pub")):
        if _is_public(candidate):
            try:
                return base64.b64decode(candidate.read_text().split()[1])
            except (binascii.Error, IndexError):
                return None
    return None


def _is_public(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) in {b"ssh-", b"ecds", b"sk-s", b"sk-e"}
    except OSError:
        return False

"""Which of the user's keys are offered to a host, and in which order: as OpenSSH would, without asking for anything."""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.ssh.config import Destination

if TYPE_CHECKING:
    import paramiko

_AGENT_TIMEOUT_S = 60  # somebody may have to touch a token


@contextlib.contextmanager
def offers(destination: Destination, notes: list[str]) -> Iterator[Iterator[tuple[str, paramiko.PKey]]]:
    """Give the keys to offer, each with the name by which the user knows it; `notes` takes why one is left out.

    Keys of the agent that an IdentityFile names come first, then the agent's others unless IdentitiesOnly, then files.
    """
    with _agent_keys(destination.agent, notes) as in_agent:
        yield _in_order(destination, in_agent, notes)


def _in_order(
    destination: Destination, in_agent: list[paramiko.PKey], notes: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    named = {blob: path for path in destination.identity_files for blob in [_public_half(path)] if blob is not None}
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
    from paramiko.agent import AgentSSH
    from paramiko.ssh_exception import SSHException

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
    import paramiko
    from cryptography.exceptions import UnsupportedAlgorithm
    from paramiko.pkey import UnknownKeyType

    if not path.is_file():
        return
    try:
        if path.stat().st_mode & 0o077:
            notes.append(f"{path} can be read by others, so it is not used (chmod 600)")
            return
        key = paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):  # cryptography's word for a missing passphrase
        notes.append(f"{path} is encrypted and not in the agent")
    except (OSError, ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm) as error:
        if not _is_public(path):  # a public key there means: the one in the agent
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

"""Trusting hosts: their keys become lines of the user's known_hosts, and no line of somebody else is lost."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.ssh.config import Destination
from clusterddp.ssh.keys import HostKey, KnownKey, fingerprint


def check_expected(shown: Mapping[Destination, HostKey], expected: Mapping[str, str]) -> None:
    """Compare the keys that hosts showed with the fingerprints that somebody expects, by the host's name.

    Raises: SshError: of the first host that shows another key.
    """
    for destination, key in shown.items():
        wanted = expected.get(destination.host)
        if wanted is not None and wanted != key.fingerprint:
            found = f"the host shows {key.type} {key.fingerprint}, expected is {wanted}"
            raise SshError(destination.host, "host key", found, hint="nothing was written; somebody may sit in between")


def check_known(destination: Destination, known: Iterable[KnownKey], expected: Mapping[str, str]) -> None:
    """Compare the keys of a host that is known with the fingerprint that somebody expects.

    Raises: SshError.
    """
    wanted = expected.get(destination.host)
    prints = [fingerprint(key.blob) for key in known if key.marker == "key"]
    if wanted is not None and prints and wanted not in prints:
        found = f"known_hosts has {', '.join(prints)}, expected is {wanted}"
        raise SshError(destination.host, "host key", found, hint=f"clusterddp hosts check {destination.host}")


def add_known_hosts(keys: Mapping[Destination, HostKey]) -> dict[Path, int]:
    """Append keys to the known_hosts of the user; return how many lines each file got.

    Raises: ClusterddpError, OSError.
    """
    lines: dict[Path, list[str]] = {}
    for destination, key in keys.items():
        if destination.user_known_hosts is None:
            hint = f"UserKnownHostsFile in ~/.ssh/config; ssh -G {destination.host} shows what holds"
            raise ClusterddpError(f"{destination.host}: there is no known_hosts file to write to", hint=hint)
        lines.setdefault(destination.user_known_hosts, []).append(_line(destination, key))
    for path, new in lines.items():
        _append(path, "".join(line for line in dict.fromkeys(new)))
    return {path: len(set(new)) for path, new in lines.items()}


def _line(destination: Destination, key: HostKey) -> str:
    name = _hashed(destination.known_as) if destination.hash_known_hosts else destination.known_as
    return f"{name} {key.type} {base64.b64encode(key.blob).decode()}\n"


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()  # the only form that OpenSSH knows
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _append(path: Path, text: str) -> None:
    """Append in one write, so that it is there whole or not at all, whoever else appends meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)  # two of us; OpenSSH takes no lock
            size = os.fstat(number).st_size
            ends_line = size == 0 or os.pread(number, 1, size - 1) == b"\n"
            data = (text if ends_line else f"\n{text}").encode()
            if os.write(number, data) != len(data):
                raise ClusterddpError(f"{path}: the disk is full, its last line may be cut", hint="look at its end")
            os.fsync(number)
            if _is_still(path, number):
                return
        finally:
            os.close(number)


def _is_still(path: Path, number: int) -> bool:
    """Say whether a path still names an open file: `ssh-keygen -R` may have put another in its place meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except FileNotFoundError:
        return False

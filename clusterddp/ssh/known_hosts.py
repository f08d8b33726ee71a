"""The user's known_hosts: finds the lines about a host, and appends keys without losing a line of another process."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.ssh.config import DEFAULT_PORT, Destination
from clusterddp.ssh.host_keys import HostKey, KnownKey, Marker

_LINE = re.compile(r": line ([0-9]{1,9})\b")
_MARKERS: dict[str, Marker] = {"@cert-authority": "authority", "@revoked": "revoked"}


def read_known_keys(destination: Destination) -> tuple[KnownKey, ...]:
    """Find the lines of the user's and the machine's known_hosts that are about a host.

    Raises: SshError.
    """
    found = _find(destination, destination.known_as)
    bare = destination.hostname.lower()
    if destination.host_key_alias is None and destination.port != DEFAULT_PORT:
        # OpenSSH accepts the key of the plain name for a host on another port, unless that port has a key of its own.
        plain = _find(destination, bare)
        known = any(key.marker == "key" for key in found)
        found += tuple(key for key in plain if key.marker != "key" or not known)
    return found


def add_known_hosts(keys: Mapping[Destination, HostKey]) -> dict[Path, int]:
    """Append keys to the known_hosts of the user; return how many lines each file got.

    Raises: ClusterddpError, OSError.
    """
    lines: dict[Path, list[str]] = {}
    for destination, key in keys.items():
        if destination.user_known_hosts is None:
            hint = f"UserKnownHostsFile in ~/.ssh/config; ssh -G {destination.host} shows its value"
            raise ClusterddpError(f"{destination.host}: there is no known_hosts file to write to", hint=hint)
        lines.setdefault(destination.user_known_hosts, []).append(_line(destination, key))
    for path, new in lines.items():
        _append(path, "".join(line for line in dict.fromkeys(new)))
    return {path: len(set(new)) for path, new in lines.items()}


def _find(destination: Destination, name: str) -> tuple[KnownKey, ...]:
    found: list[KnownKey] = []
    for path in destination.known_hosts:
        if not path.exists():
            continue
        argv = ["ssh-keygen", "-F", name, "-f", str(path)]
        try:
            done = subprocess.run(
                argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            hint = "install OpenSSH's client"
            raise SshError(destination.host, "host key", "ssh-keygen cannot be run", hint=hint) from error
        if done.returncode not in (0, 1):
            raise SshError(destination.host, "host key", f"{path}: {done.stderr.strip()}", hint=shlex.join(argv))
        found += _parse(done.stdout, path)
    return tuple(found)


def _parse(text: str, path: Path) -> list[KnownKey]:
    """Read pairs of lines: `# Host NAME found: line 3`, and that line; one that holds no key is left out."""
    keys: list[KnownKey] = []
    number = 0
    for line in text.splitlines():
        if line.startswith("# Host "):
            found = _LINE.search(line)
            number = int(found[1]) if found else 0
            continue
        words = line.split()
        marker = _MARKERS.get(words[0], "key") if words else "key"
        fields = words[1:] if marker != "key" else words
        if len(fields) < 3:
            continue
        try:
            blob = base64.b64decode(fields[2])
        except ValueError:
            continue
        keys.append(KnownKey(marker=marker, type=fields[1], blob=blob, file=path, line=number))
    return keys


def _line(destination: Destination, key: HostKey) -> str:
    name = _hashed(destination.known_as) if destination.hash_known_hosts else destination.known_as
    return f"{name} {key.type} {base64.b64encode(key.blob).decode()}\n"


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()  # the only digest that OpenSSH reads
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _append(path: Path, text: str) -> None:
    """Append in one write: the file gets the whole text or nothing, whatever other processes append meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)  # against another clusterddp; OpenSSH takes no lock
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
    """Return whether a path still names an open file: `ssh-keygen -R` may have replaced it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except FileNotFoundError:
        return False

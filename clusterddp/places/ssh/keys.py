"""Host keys: what known_hosts and certificates prove, decided as OpenSSH does."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from clusterddp.errors import SshError
from clusterddp.places.ssh.config import DEFAULT_PORT, Destination

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization import SSHCertificate

KEY_TYPES = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""The type of a key, as files name it -> the algorithms in which it signs."""
_INTERCEPTED = "the connection may be intercepted"
Marker = Literal["key", "authority", "revoked"]
_LINE = re.compile(r": line ([0-9]{1,9})\b")
_MARKERS: dict[str, Marker] = {"@cert-authority": "authority", "@revoked": "revoked"}
CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of an algorithm's name when a certificate goes with the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKey:
    """The key that a host showed and proved to hold, and its certificate where it showed one."""

    type: str
    blob: bytes
    certificate: bytes | None = None

    @property
    def fingerprint(self) -> str:
        """Write it as OpenSSH does."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownKey(HostKey):
    """A line of known_hosts about a host."""

    marker: Marker
    file: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def signing_algorithms(destination: Destination, known: Sequence[KnownKey], pinned: str | None) -> tuple[str, ...]:
    """List the algorithms to ask a host for: those of its known keys first, else it might show another of its keys.

    Certificates come before plain keys where known_hosts has an authority for the host.
    """
    first = [key.type for key in known if key.marker == "key"] if pinned is None else [pinned.split()[0]]
    types = [name for name in dict.fromkeys((*first, *KEY_TYPES)) if name in KEY_TYPES]
    plain = [name for key_type in types for name in KEY_TYPES[key_type]]
    wanted = [f"{name}{CERTIFICATE}" for name in plain] if any(key.marker == "authority" for key in known) else []
    return tuple(name for name in wanted + plain if name in destination.host_key_algorithms)


def check_host_key(
    destination: Destination, known: Sequence[KnownKey], shown: HostKey, *, pinned: str | None = None
) -> None:
    """Check that the key that a host shows proves that it is the host that the user means.

    `pinned`: `SHA256:...` or `TYPE BASE64`: the only key that is accepted then. A revoked key is always refused.
    Raises: SshError.
    """
    certificate = shown.certificate and _read_certificate(destination, shown.certificate)
    _refuse_revoked(destination, known, shown, certificate.authority if certificate else None)
    others = [key for key in known if key.marker == "key"]
    if pinned is not None:
        _check_pinned(destination, shown, pinned)
    elif any(key.blob == shown.blob for key in others):
        return
    elif certificate and any(key.marker == "authority" and key.blob == certificate.authority for key in known):
        _check_certificate(destination, certificate)
    else:
        raise _changed(destination, others, shown) if others else _unknown(destination, known, shown)


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


class _Certificate(NamedTuple):
    """A certificate whose signature is right."""

    fields: SSHCertificate
    authority: bytes
    """The key that signed it."""
    algorithm: str
    """How it was signed."""


def _read_certificate(destination: Destination, blob: bytes) -> _Certificate:
    """Read a certificate as it came over the wire, and check its signature.

    Raises: SshError.
    """
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, SSHCertificate
    from cryptography.hazmat.primitives.serialization import load_ssh_public_identity as load

    try:
        fields = load(_field(blob, 0) + b" " + base64.b64encode(blob))
        if not isinstance(fields, SSHCertificate):
            raise ValueError("it is a plain key")
        fields.verify_cert_signature()
        authority_line = fields.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        found = f"its certificate cannot be checked: {error or 'its signature is wrong'}"
        raise SshError(destination.host, "host key", found, hint="ask who signs them") from error
    authority = base64.b64decode(authority_line.split()[1])
    # What follows the authority's key, at the very end, is the signature; its first field names the algorithm.
    end_of_authority = blob.rindex(struct.pack(">I", len(authority)) + authority) + 4 + len(authority)
    algorithm = _field(blob, end_of_authority + 4).decode(errors="replace")
    return _Certificate(fields, authority, algorithm)


def _check_certificate(destination: Destination, certificate: _Certificate) -> None:
    """Check that the certificate of a known authority is valid for a host, now.

    Raises: SshError.
    """
    from cryptography.hazmat.primitives.serialization import SSHCertificateType

    fields, now = certificate.fields, time.time()
    name = destination.host_key_alias or destination.hostname.lower()
    principals = [principal.decode(errors="replace") for principal in fields.valid_principals]
    if fields.type != SSHCertificateType.HOST:
        found = "is for a user, not for a host"
    elif principals and name not in principals:
        found = f"is for {', '.join(principals)}, not for {name}"
    elif now < fields.valid_after:
        found = f"is not valid before {_date(fields.valid_after)}"
    elif now >= fields.valid_before:
        found = f"has expired at {_date(fields.valid_before)}"
    elif fields.critical_options:
        found = "has a critical option that is not known"
    elif certificate.algorithm not in destination.ca_algorithms:
        found = f"is signed with {certificate.algorithm}, which CASignatureAlgorithms does not allow"
    else:
        return
    hint = "the host needs a new certificate: ask who signs them"
    raise SshError(destination.host, "host key", f"its certificate {found}", hint=hint)


def _refuse_revoked(
    destination: Destination, known: Sequence[KnownKey], shown: HostKey, authority: bytes | None
) -> None:
    hint = "the host needs a new key: ask who runs it"
    for key in known:
        if key.marker == "revoked" and key.blob in (shown.blob, authority):
            found = f"the key {key.fingerprint} is revoked ({key.place})"
            raise SshError(destination.host, "host key", found, hint=hint)
    if (revoked := destination.revoked_keys) is None:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as key_file:
        key_file.write(f"{shown.type} {base64.b64encode(shown.blob).decode()}\n")
        key_file.flush()
        done = _ssh_keygen(destination, "-Q", "-f", str(revoked), key_file.name)
    if done.returncode:  # a list that cannot be read refuses every key, as with OpenSSH
        found = f"the key {shown.fingerprint} is revoked, or RevokedHostKeys {revoked} cannot be read"
        raise SshError(destination.host, "host key", found, hint=hint)


def _check_pinned(destination: Destination, shown: HostKey, pinned: str) -> None:
    expected = pinned.rstrip("=")
    if not pinned.startswith("SHA256:"):
        try:
            expected = HostKey(type="", blob=base64.b64decode(pinned.split()[1], validate=True)).fingerprint
        except (IndexError, ValueError) as error:
            found = f"host_key {pinned!r} is not a key"
            raise SshError(destination.host, "host key", found, hint="SHA256:... or `TYPE BASE64`") from error
    if shown.fingerprint != expected:
        found = f"the host shows {shown.type} {shown.fingerprint}, the pinned host_key is {expected}"
        hint = f"{_INTERCEPTED}; if the host has a new key for a good reason, pin that one"
        raise SshError(destination.host, "host key", found, hint=hint)


def _unknown(destination: Destination, known: Sequence[KnownKey], shown: HostKey) -> SshError:
    found = f"{destination.known_as} is not known; it shows {shown.type} {shown.fingerprint}"
    if any(key.marker == "authority" for key in known):
        found += ", and no certificate of the authority that known_hosts names"
    hint = f"it shows the fingerprint, asks, and keeps the key: ssh {shlex.quote(destination.host)}"
    return SshError(destination.host, "host key", found, hint=hint)


def _changed(destination: Destination, others: Sequence[KnownKey], shown: HostKey) -> SshError:
    same = next((key for key in others if key.type == shown.type), others[0])
    found = (
        f"HAS CHANGED: {destination.known_as} shows {shown.type} {shown.fingerprint}, "
        f"known is {same.type} {same.fingerprint} ({same.place})"
    )
    forget = shlex.join(["ssh-keygen", "-R", destination.known_as, "-f", str(same.file)])
    hint = f"{_INTERCEPTED}; if the host was installed anew: {forget}; ssh {shlex.quote(destination.host)}"
    return SshError(destination.host, "host key", found, hint=hint)


def _find(destination: Destination, name: str) -> tuple[KnownKey, ...]:
    found: list[KnownKey] = []
    for path in filter(Path.exists, destination.known_hosts):
        done = _ssh_keygen(destination, "-F", name, "-f", str(path))
        if done.returncode not in (0, 1):
            hint = shlex.join(done.args)
            raise SshError(destination.host, "host key", f"{path}: {done.stderr.strip()}", hint=hint)
        found += _parse(done.stdout, path)
    return tuple(found)


def _ssh_keygen(destination: Destination, *words: str) -> subprocess.CompletedProcess[str]:
    argv = ["ssh-keygen", *words]
    try:
        return subprocess.run(
            argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        hint = "install OpenSSH's client"
        raise SshError(destination.host, "host key", "ssh-keygen cannot be run", hint=hint) from error


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


def _field(blob: bytes, offset: int) -> bytes:
    """Read one field: its length in four bytes, and as many bytes."""
    (length,) = struct.unpack_from(">I", blob, offset)
    return blob[offset + 4 : offset + 4 + length]


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

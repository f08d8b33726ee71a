"""Host keys: what known_hosts and certificates prove, decided as OpenSSH does; new keys are appended to known_hosts."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shlex
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.places.ssh.config import DEFAULT_PORT, Destination

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
Proof = Literal["known_hosts", "certificate", "pinned"]
_LINE = re.compile(r": line ([0-9]{1,9})\b")
_MARKERS: dict[str, Marker] = {"@cert-authority": "authority", "@revoked": "revoked"}
CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of an algorithm's name when a certificate goes with the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownKey:
    """One line of known_hosts about a host."""

    marker: Marker
    type: str
    blob: bytes
    file: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKey:
    """The key that a host showed and proved to hold, and its certificate where it showed one."""

    type: str
    blob: bytes
    certificate: bytes | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)


def fingerprint(blob: bytes) -> str:
    """Write a key's fingerprint as OpenSSH does."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


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
) -> Proof:
    """Check the key that a host shows; return what proves that it is the host that the user means.

    `pinned`: `SHA256:...` or `TYPE BASE64`: the only key that is accepted then. A revoked key is always refused.

    Raises: SshError.
    """
    _refuse_revoked(destination, known, shown)
    if pinned is not None:
        return _check_pinned(destination, shown, pinned)
    if any(key.marker == "key" and key.blob == shown.blob for key in known):
        return "known_hosts"
    if shown.certificate is not None and _check_certificate(destination, known, shown.certificate):
        return "certificate"
    others = [key for key in known if key.marker == "key"]
    raise _changed(destination, others, shown) if others else _unknown(destination, known, shown)


def check_expected(shown: Mapping[Destination, HostKey], expected: Mapping[str, str]) -> None:
    """Compare the keys that hosts showed with the expected fingerprints: host's name -> fingerprint.

    Raises: SshError: of the first host that shows another key.
    """
    for destination, key in shown.items():
        wanted = expected.get(destination.host)
        if wanted is not None and wanted != key.fingerprint:
            found = f"the host shows {key.type} {key.fingerprint}, expected is {wanted}"
            raise SshError(destination.host, "host key", found, hint=f"nothing was written; {_INTERCEPTED}")


def check_known(destination: Destination, known: Iterable[KnownKey], expected: Mapping[str, str]) -> None:
    """Compare the keys of a known host with its expected fingerprint.

    Raises: SshError.
    """
    wanted = expected.get(destination.host)
    prints = [fingerprint(key.blob) for key in known if key.marker == "key"]
    if wanted is not None and prints and wanted not in prints:
        found = f"known_hosts has {', '.join(prints)}, expected is {wanted}"
        raise SshError(destination.host, "host key", found, hint=f"clusterddp hosts check {destination.host}")


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


class CertificateError(Exception):
    """A certificate is not valid; the message continues the words `its certificate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The fields of a certificate; `read_certificate` has checked its signature."""

    is_for_host: bool
    principals: tuple[str, ...]
    """The host names that it is valid for; empty: any."""
    valid_after: int
    valid_before: int
    """Seconds since the epoch."""
    has_critical_options: bool
    authority: bytes
    """The key that signed it."""
    algorithm: str
    """How it was signed."""

    def check(self, name: str, ca_algorithms: Sequence[str]) -> None:
        """Check that it is valid for a host of this name, now.

        Raises: CertificateError.
        """
        now = time.time()
        if not self.is_for_host:
            raise CertificateError("is for a user, not for a host")
        if self.principals and name not in self.principals:
            raise CertificateError(f"is for {', '.join(self.principals)}, not for {name}")
        if now < self.valid_after:
            raise CertificateError(f"is not valid before {_date(self.valid_after)}")
        if now >= self.valid_before:
            raise CertificateError(f"has expired at {_date(self.valid_before)}")
        if self.has_critical_options:
            raise CertificateError("has a critical option that is not known")
        if self.algorithm not in ca_algorithms:
            raise CertificateError(f"is signed with {self.algorithm}, which CASignatureAlgorithms does not allow")


def read_certificate(blob: bytes) -> Certificate:
    """Read a certificate as it came over the wire, and check its signature.

    Raises: CertificateError.
    """
    import base64

    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        SSHCertificate,
        SSHCertificateType,
        load_ssh_public_identity,
    )

    name = _text(blob, 0)
    try:
        read = load_ssh_public_identity(name + b" " + base64.b64encode(blob))
        if not isinstance(read, SSHCertificate):
            raise CertificateError("is a plain key")
        read.verify_cert_signature()
        authority_line = read.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise CertificateError(f"cannot be checked: {error or 'its signature is wrong'}") from error
    authority = base64.b64decode(authority_line.split()[1])
    # What follows the authority's key, at the very end, is the signature; its first field names the algorithm.
    end_of_authority = blob.rindex(struct.pack(">I", len(authority)) + authority) + 4 + len(authority)
    return Certificate(
        is_for_host=read.type == SSHCertificateType.HOST,
        principals=tuple(principal.decode(errors="replace") for principal in read.valid_principals),
        valid_after=read.valid_after,
        valid_before=read.valid_before,
        has_critical_options=bool(read.critical_options),
        authority=authority,
        algorithm=_text(blob, end_of_authority + 4).decode(errors="replace"),
    )


def _refuse_revoked(destination: Destination, known: Sequence[KnownKey], shown: HostKey) -> None:
    blobs = [shown.blob]
    if shown.certificate is not None:
        try:
            blobs.append(read_certificate(shown.certificate).authority)
        except CertificateError as error:
            raise SshError(
                destination.host, "host key", f"its certificate {error}", hint="ask who signs them"
            ) from error
    for key in known:
        if key.marker == "revoked" and key.blob in blobs:
            found = f"the key {fingerprint(key.blob)} is revoked ({key.place})"
            raise SshError(destination.host, "host key", found, hint="the host needs a new key: ask who runs it")
    if destination.revoked_keys is not None:
        _ask_revocation_list(destination, destination.revoked_keys, shown)


def _ask_revocation_list(destination: Destination, revoked: Path, shown: HostKey) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as key_file:
        key_file.write(f"{shown.type} {base64.b64encode(shown.blob).decode()}\n")
        key_file.flush()
        argv = ["ssh-keygen", "-Q", "-f", str(revoked), key_file.name]
        done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:  # a list that cannot be read refuses every key, as with OpenSSH
        found = f"the key {shown.fingerprint} is revoked, or RevokedHostKeys {revoked} cannot be read"
        raise SshError(destination.host, "host key", found, hint="the host needs a new key: ask who runs it")


def _check_pinned(destination: Destination, shown: HostKey, pinned: str) -> Proof:
    if pinned.startswith("SHA256:"):
        expected = pinned.rstrip("=")
    else:
        try:
            expected = fingerprint(base64.b64decode(pinned.split()[1], validate=True))
        except (IndexError, ValueError) as error:
            found = f"host_key {pinned!r} is no key"
            raise SshError(destination.host, "host key", found, hint="SHA256:... or `TYPE BASE64`") from error
    if shown.fingerprint == expected:
        return "pinned"
    found = f"the host shows {shown.type} {shown.fingerprint}, the pinned host_key is {expected}"
    hint = f"{_INTERCEPTED}; if the host has a new key for a good reason, pin that one"
    raise SshError(destination.host, "host key", found, hint=hint)


def _check_certificate(destination: Destination, known: Sequence[KnownKey], blob: bytes) -> bool:
    """Return whether a known authority has signed the certificate; other authorities do not count.

    Raises: SshError: a known authority signed it, and it is not valid for this host, or not now.
    """
    certificate: Certificate = read_certificate(blob)
    if not any(key.marker == "authority" and key.blob == certificate.authority for key in known):
        return False
    name = destination.host_key_alias or destination.hostname.lower()
    try:
        certificate.check(name, destination.ca_algorithms)
    except CertificateError as error:
        hint = "the host needs a new certificate: ask who signs them"
        raise SshError(destination.host, "host key", f"its certificate {error}", hint=hint) from error
    return True


def _unknown(destination: Destination, known: Sequence[KnownKey], shown: HostKey) -> SshError:
    found = f"{destination.known_as} is not known; it shows {shown.type} {shown.fingerprint}"
    if any(key.marker == "authority" for key in known):
        found += ", and no certificate of the authority that known_hosts names"
    hint = f"compare the fingerprint, then: clusterddp hosts trust {shlex.quote(destination.host)}"
    return SshError(destination.host, "host key", found, hint=hint)


def _changed(destination: Destination, others: Sequence[KnownKey], shown: HostKey) -> SshError:
    same = next((key for key in others if key.type == shown.type), others[0])
    found = (
        f"HAS CHANGED: {destination.known_as} shows {shown.type} {shown.fingerprint}, "
        f"known is {same.type} {fingerprint(same.blob)} ({same.place})"
    )
    forget = shlex.join(["ssh-keygen", "-R", destination.known_as, "-f", str(same.file)])
    host = shlex.quote(destination.host)
    hint = f"{_INTERCEPTED}; if the host was installed anew: {forget}; clusterddp hosts trust {host}"
    return SshError(destination.host, "host key", found, hint=hint)


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


def _text(blob: bytes, offset: int) -> bytes:
    """Read one field: its length in four bytes, and as many bytes."""
    (length,) = struct.unpack_from(">I", blob, offset)
    return blob[offset + 4 : offset + 4 + length]


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

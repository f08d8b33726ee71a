"""Decides, as OpenSSH does, whether the key that a host shows proves that it is the host that the user means."""

from __future__ import annotations

import base64
import hashlib
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clusterddp.errors import SshError
from clusterddp.ssh.certificate import CERTIFICATE, Certificate, CertificateError, read_certificate
from clusterddp.ssh.config import Destination

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

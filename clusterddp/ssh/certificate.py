"""Host certificates: reads one, checks its signature, and whether it is valid for a host now."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

CERTIFICATE = "-cert-v01@openssh.com"
"""The suffix of an algorithm's name when a certificate goes with the key."""


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


def _text(blob: bytes, offset: int) -> bytes:
    """Read one field: its length in four bytes, and as many bytes."""
    (length,) = struct.unpack_from(">I", blob, offset)
    return blob[offset + 4 : offset + 4 + length]


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

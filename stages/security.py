"""Certificates and keys: read from files, and again when the files change, so that short-lived ones can be renewed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from stages.certificate import CERTIFICATE_MARK, KEY_MARK, Certificate, check_authority, examine
from stages.errors import InputError

log = logging.getLogger(__name__)

SECRET_MODE = 0o027
"""What a secret's file must not allow: a group may read it, and nobody else may do anything."""

FileStamp = tuple[int, int, int] | None
Stamp = tuple[FileStamp, ...]
"""Tells whether files changed."""


@dataclass(frozen=True)
class Tls:
    """Files in PEM."""

    authority: Path
    """Whose certificates are believed."""
    certificate: Path | None = None
    """Our own; who only asks a router needs none."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("a certificate and its key go together: give both --tls-cert and --tls-key, or neither")

    def stamp(self) -> Stamp:
        """Differs once a file was changed or replaced."""
        return tuple(stamp_of(path) for path in (self.authority, self.certificate, self.key) if path is not None)

    def read(self) -> Material:
        """What the files hold now. Raises InputError when it would not make a handshake."""
        authority = read_file(self.authority)
        check_authority(self.authority, authority)
        if self.certificate is None or self.key is None:
            return Material(authority)
        chain, key = read_file(self.certificate), read_file(self.key)
        check_secret(self.key)
        if CERTIFICATE_MARK not in chain:
            raise InputError(f"{self.certificate} is no certificate (PEM)")
        if KEY_MARK not in key:
            raise InputError(f"{self.key} is no private key (PEM)")
        return Material(authority, chain, key, examine(self.authority, self.certificate, self.key))

    def own(self, *roles: str) -> Certificate:
        """Our certificate, if it has one of these roles. Raises InputError."""
        certificate = self.read().certificate
        if certificate is None:
            raise InputError("a server needs a certificate: give --tls-cert and --tls-key")
        identity = certificate.identity
        if identity is None or identity.role not in roles:
            shown = identity.uri if identity else "nobody of onesweep"
            due = " or ".join(roles)
            raise InputError(f"{self.certificate} is for {shown}: make one with `onesweep certs {due} NAME`")
        return certificate


@dataclass(frozen=True)
class Material:
    """What goes into handshakes."""

    authority: bytes
    chain: bytes | None = None
    key: bytes | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True)
class Security:
    """How a process talks to others: over TLS where it has that, else only on its own machine or where told so."""

    tls: Tls | None = None
    insecure: bool = False
    """Whether plain text may leave the machine."""

    def stamp(self) -> Stamp:
        """Differs once certificates changed."""
        return self.tls.stamp() if self.tls else ()


LOOPBACK_ONLY = Security()


class ServerCertificate:
    """A server's certificate, looked up anew for every handshake."""

    def __init__(self, tls: Tls, mutual: bool) -> None:
        """:param mutual: whether callers must show a certificate, too."""
        self.tls, self.mutual = tls, mutual
        self._stamp = tls.stamp()
        self._first = tls.read()
        self._said = ""

    def credentials(self) -> grpc.ServerCredentials:
        renewed: Any = self.renewed  # that None stands for no change is missing in the stubs
        return grpc.dynamic_ssl_server_credentials(self._configuration(self._first), renewed, self.mutual)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The files' new content; None while they are as they were. Called by gRPC's threads."""
        stamp = self.tls.stamp()
        if stamp == self._stamp:
            return None
        try:
            material = self.tls.read()
        except InputError as error:  # half of it may be replaced yet, or it is not valid yet
            if str(error) != self._said:
                log.warning("new certificate not taken: %s", error)
            self._said = str(error)
            return None
        self._stamp, self._said = stamp, ""
        if material.certificate is not None:
            log.info("new certificate %s, valid until %s", self.tls.certificate, material.certificate.until)
        return self._configuration(material)

    def _configuration(self, material: Material) -> grpc.ServerCertificateConfiguration:
        assert material.key is not None
        assert material.chain is not None
        pair = (material.key, material.chain)
        return grpc.ssl_server_certificate_configuration([pair], material.authority if self.mutual else None)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """For connections that are opened from now on. Raises InputError."""
    material = tls.read()
    return grpc.ssl_channel_credentials(material.authority, material.key, material.chain)


def read_file(path: Path) -> bytes:
    """Raises InputError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def check_secret(path: Path) -> None:
    """Raise InputError when others than the owner can change the file, or others than its group read it."""
    if path.stat().st_mode & SECRET_MODE:
        raise InputError(f"{path} is a secret, and others can read or change it: chmod 600 {path}")


def stamp_of(path: Path) -> FileStamp:
    """Tells whether a file changed; None while it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

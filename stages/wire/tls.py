"""TLS: certificate files that are reread when they change, and checked by a handshake before any peer sees them."""

import argparse
import logging
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from stages.errors import InputError
from stages.wire.auth import Identity
from stages.wire.secret_files import FileStamp, check_secret, read_file, stamp_of

log = logging.getLogger(__name__)

CERTIFICATE_MARK = b"-----BEGIN CERTIFICATE-----"
KEY_MARK = b"PRIVATE KEY-----"
ROUND_TRIPS = 4  # of a handshake in memory: more than one needs

LAST_DAYS = 7  # of a certificate, in which people are told; deploy/alerts.yml has the same
Stamp = tuple[FileStamp, ...]  # state of some files, to detect changes

OTHER_AUTHORITY = "presented a certificate from another authority than --tls-ca: give both sides the same ca.pem"
PLAIN = "WRONG_VERSION_NUMBER"
CLOSED = ("Socket closed", "Connection reset by peer", "Broken pipe")
# gRPC's words for a connection that failed to open, as opposed to one that broke
FIRST_CONTACT = "failed to connect"
_SENTENCES = (
    ("certificate has expired", "presented a certificate that has expired: renew it there with `onesweep certs renew`"),
    ("not yet valid", "presented a certificate that is not valid yet: check that the clocks are right"),
    ("Hostname Verification", "presented a certificate for another address: make it again with --address"),
    ("certificate purpose", "presented a certificate not meant for servers: make one with `onesweep certs issue host`"),
    ("subtree violation", "presented a certificate with a name that its authority may not certify"),
    ("issuer certificate", OTHER_AUTHORITY),
    ("certificate signature", OTHER_AUTHORITY),
    ("self-signed", OTHER_AUTHORITY),
    ("self signed", OTHER_AUTHORITY),
    ("HTTP proxy returned response code 410", "was removed from this run: `onesweep invite` lets another machine join"),
    ("HTTP proxy returned", "is offline or cannot be reached: check that `onesweep join` is running there"),
    (PLAIN, "does not speak TLS: start it with --tls-cert, or omit --tls-ca here"),
)


@dataclass(frozen=True)
class Certificate:
    """A valid certificate."""

    identity: Identity | None  # none if it was not made for onesweep
    until: datetime


@dataclass(frozen=True)
class TlsMaterial:
    """Contents of the files, for a handshake."""

    authority: bytes
    chain: bytes | None = None
    key: bytes | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files."""

    authority: Path  # the authority that verifies peers' certificates
    certificate: Path | None = None  # our own; a router's client needs none
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("a certificate and its key go together: give both --tls-cert and --tls-key, or neither")

    def stamp(self) -> Stamp:
        """The state of the files; differs once one was changed or replaced."""
        return tuple(stamp_of(path) for path in (self.authority, self.certificate, self.key) if path is not None)

    def read(self) -> TlsMaterial:
        """Read the files. Raises InputError if a handshake with them fails."""
        # checked before use, so that the error appears on the machine where it can be fixed, and a half-copied pair
        # is never used
        authority = read_file(self.authority)
        check_authority(self.authority, authority)
        if self.certificate is None or self.key is None:
            return TlsMaterial(authority)
        chain, key = read_file(self.certificate), read_file(self.key)
        check_secret(self.key)
        if CERTIFICATE_MARK not in chain:
            raise InputError(f"{self.certificate} is not a certificate (PEM)")
        if KEY_MARK not in key:
            raise InputError(f"{self.key} is not a private key (PEM)")
        return TlsMaterial(authority, chain, key, examine(self.authority, self.certificate, self.key))

    def own(self, *roles: str) -> Certificate:
        """Our certificate, which must have one of these roles. Raises InputError."""
        certificate = self.read().certificate
        if certificate is None:
            raise InputError("a server needs a certificate: give --tls-cert and --tls-key")
        identity = certificate.identity
        if identity is None or identity.role not in roles:
            shown = f"for {identity.uri}" if identity else "not from `onesweep certs`"
            role = " or ".join(roles)
            raise InputError(f"{self.certificate} is {shown}: make one with `onesweep certs issue {role} NAME`")
        return certificate


@dataclass(frozen=True)
class Security:
    """The rules of a process for its connections: TLS if it has certificates, else its own machine only."""

    tls: Tls | None = None
    insecure: bool = False  # allow plain text to and from other machines

    def stamp(self) -> Stamp:
        """The state of the certificates; differs once they change."""
        return self.tls.stamp() if self.tls else ()


LOOPBACK_ONLY = Security()


class ServerCertificate:
    """A gRPC server's certificate, looked up for every handshake, so that a renewal needs no restart."""

    # No revocation lists: gRPC for Python accepts none per handshake. Certificates live 30 days; a new authority shuts
    # out a stolen key.

    def __init__(self, tls: Tls, mutual: bool) -> None:
        """:param mutual: callers must show a certificate, too."""
        self.tls, self.mutual = tls, mutual
        self._stamp = tls.stamp()
        self._first = tls.read()
        self._logged = ""

    def credentials(self) -> grpc.ServerCredentials:
        renewed: Any = self.renewed  # the stubs do not say that None means no change
        return grpc.dynamic_ssl_server_credentials(self._configuration(self._first), renewed, self.mutual)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new contents of changed files, else None. Called by gRPC's threads."""
        stamp = self.tls.stamp()
        if stamp == self._stamp:
            return None
        try:
            material = self.tls.read()
        except InputError as error:  # perhaps only one of the files is replaced so far
            if str(error) != self._logged:
                log.warning("new certificate rejected: %s", error)
            self._logged = str(error)
            return None
        self._stamp, self._logged = stamp, ""
        if material.certificate is not None:
            log.info("new certificate %s, valid until %s", self.tls.certificate, material.certificate.until)
        return self._configuration(material)

    def _configuration(self, material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        assert material.key is not None
        assert material.chain is not None
        pair = (material.key, material.chain)
        return grpc.ssl_server_certificate_configuration([pair], material.authority if self.mutual else None)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials for connections opened from now on. Raises InputError."""
    material = tls.read()
    return grpc.ssl_channel_credentials(material.authority, material.key, material.chain)


class Expiry:
    """The expiry of this process's own certificate."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls, self._until_s = tls, 0
        self._stamp: Stamp | None = None

    def until_s(self) -> int:
        """Unix time, 0 without a certificate; while the files cannot be used, the last known value."""
        if self._tls is not None and (stamp := self._tls.stamp()) != self._stamp:
            with suppress(InputError):
                certificate = self._tls.read().certificate
                self._stamp, self._until_s = stamp, int(certificate.until.timestamp()) if certificate else 0
        return self._until_s


def ending(until_s: int) -> str:
    """A sentence about a certificate in its last days; empty before them, and without one (0)."""
    if not until_s or until_s > time.time() + LAST_DAYS * 86400:
        return ""
    day = datetime.fromtimestamp(until_s, UTC)
    remedy = "run `onesweep certs renew`, and copy it there (if the machine joined: restart `onesweep join` there)"
    return f"its certificate ends on {day:%Y-%m-%d}: {remedy}"


def check_authority(path: Path, raw: bytes) -> None:
    """Raise InputError unless `raw`, read from `path`, consists of certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=raw.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise InputError(f"{path} is not a CA certificate (PEM): give the ca.pem of `onesweep certs`") from None


def examine(authority: Path, certificate: Path, key: Path) -> Certificate:
    """Show a certificate to a peer in memory that trusts `authority`. Raises InputError with the peer's reason."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED

    def no_password() -> str:
        raise InputError(f"{key} has a password, which no one is there to type: store it without one, chmod 600")

    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_verify_locations(authority)
        for context in (client, server):
            context.load_cert_chain(certificate, key, no_password)
        sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
        for side in sides * ROUND_TRIPS:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise InputError(f"{certificate} is refused: {_reason(error.verify_message, authority)}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"{key} is not the key of {certificate}: give the two that were made together") from None
        raise InputError(
            f"{certificate} and {key} cannot be used ({error.reason or 'damaged'}): make new ones"
        ) from None
    shown: dict[str, Any] = sides[1].getpeercert() or {}
    uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    return Certificate(Identity.of(uris), datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC))


def _reason(problem: str, authority: Path) -> str:
    if "expired" in problem:
        return "it has expired; renew it with `onesweep certs renew`"
    if "not yet valid" in problem:
        return "it is not valid yet; check that the clocks are right"
    if "issuer" in problem or "self-signed" in problem or "signature" in problem:
        return f"it was not issued by the authority in {authority}; give both from the same `onesweep certs`"
    return problem


def handshake_problem(details: str, security: Security) -> str:
    """The end of a sentence that begins with the peer's name; empty if no handshake failed.

    :param details: of a status UNAVAILABLE.
    """
    if FIRST_CONTACT not in details:
        return ""
    for mark, sentence in _SENTENCES:
        if mark in details:
            return sentence
    if "handshake failed" in details:
        return f"and this side have no TLS version in common ({details})"
    if any(mark in details for mark in CLOSED):
        return _closed_handshake_reason(security)
    return ""


def _closed_handshake_reason(security: Security) -> str:
    """The likely reason why a peer silently closed the connection after our part of the handshake."""
    tls = security.tls
    if tls is None:
        return "closed the connection: if it still runs, it speaks TLS: give --tls-ca"
    if tls.certificate is None:
        return "closed the connection: if it still runs, it needs a certificate, as hosts do: give the router's address"
    try:
        tls.read()
    except InputError as error:
        return f"closed the connection in the handshake: {error}"
    return f"closed the connection in the handshake: its authority is probably not that of {tls.certificate}"


def security_of(options: argparse.Namespace, default: Tls | None = None) -> Security:
    """The security that the flags ask for, with `default` if they name no certificates. Raises InputError."""
    certificate, key = getattr(options, "tls_cert", None), getattr(options, "tls_key", None)
    if options.tls_ca is not None:
        return Security(Tls(options.tls_ca, certificate, key), options.insecure)
    if certificate or key:
        raise InputError("--tls-cert and --tls-key need --tls-ca, the authority to check the other side against")
    return Security(default, options.insecure)

"""A certificate as its peers will see it, found out by a handshake with ourselves before anybody else tries one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.errors import InputError
from stages.identity import Identity

CERTIFICATE_MARK = b"-----BEGIN CERTIFICATE-----"
KEY_MARK = b"PRIVATE KEY-----"
ROUND_TRIPS = 4
"""More than a handshake takes."""


@dataclass(frozen=True)
class Certificate:
    """What a valid certificate says."""

    identity: Identity | None
    """None for one that was not made for onesweep."""
    until: datetime


def check_authority(path: Path, raw: bytes) -> None:
    """Raise InputError unless `raw`, read from `path`, are certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=raw.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise InputError(f"{path} is no authority's certificate (PEM): give the ca.pem of `onesweep certs`") from None


def examine(authority: Path, certificate: Path, key: Path) -> Certificate:
    """Show a certificate to one who trusts `authority`. Raises InputError that says why it would be refused."""
    shower, viewer = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shower.check_hostname, shower.verify_mode = False, ssl.CERT_NONE
    viewer.verify_mode = ssl.CERT_REQUIRED

    def no_password() -> str:
        raise InputError(f"{key} has a password, which nobody is there to type: store it without, chmod 600")

    try:
        viewer.load_verify_locations(authority)
        for context in (shower, viewer):
            context.load_cert_chain(certificate, key, no_password)
        shown = _shown(shower, viewer)
    except ssl.SSLCertVerificationError as error:
        raise InputError(f"{certificate} is refused: {_reason(error, authority)}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"{key} is not the key of {certificate}: give the two that were made together") from None
        raise InputError(
            f"{certificate} and {key} cannot be used ({error.reason or 'damaged'}): make new ones"
        ) from None
    uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    until = datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC)
    return Certificate(Identity.of(uris), until)


def _shown(shower: ssl.SSLContext, viewer: ssl.SSLContext) -> dict[str, Any]:
    """What the viewer sees of the shower's certificate, after a handshake in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (shower.wrap_bio(back, there), viewer.wrap_bio(there, back, server_side=True))
    for side in sides * ROUND_TRIPS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return sides[1].getpeercert() or {}


def _reason(error: ssl.SSLCertVerificationError, authority: Path) -> str:
    said = error.verify_message
    if "expired" in said:
        return "it has expired; renew it with `onesweep certs renew`"
    if "not yet valid" in said:
        return "it is not valid yet; see that the clocks are right"
    if "issuer" in said or "self-signed" in said or "signature" in said:
        return f"it is not of the authority in {authority}; give both from one `onesweep certs`"
    return said

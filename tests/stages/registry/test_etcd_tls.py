"""A registry that is spoken to over TLS, with a certificate on both sides."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.errors import ServiceError
from stages.registry import RegistrySettings
from stages.registry.settings import parse_url

pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'onesweep[etcd]'")
pytest.importorskip("cryptography", reason="certificates are made with cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stages.registry.etcd import EtcdRegistry


def write_identity(directory: Path, name: str, authority: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """`name`.pem and `name`.key for 127.0.0.1, signed by an authority or by itself."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    issuer, signer = (authority[0].subject, authority[1]) if authority else (subject, key)
    # etcd's gateway is a client of its own server, with the server's certificate
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(usages, critical=False)
        .sign(signer, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / f"{name}.key").write_bytes(pem)
    return certificate, key


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    authority = write_identity(tmp_path, "authority", None)
    write_identity(tmp_path, "etcd", authority)
    write_identity(tmp_path, "paris", authority)
    write_identity(tmp_path, "stranger", None)
    return tmp_path


def test_who_shows_a_certificate_is_let_in(identities: Path, etcd_with: Callable[..., Any]) -> None:
    names = {"ca": "authority.pem", "cert": "etcd.pem", "key": "etcd.key"}
    files = {kind: identities / name for kind, name in names.items()}

    def check(ca: str, name: str | None) -> None:
        pair = {"cert": identities / f"{name}.pem", "key": identities / f"{name}.key"} if name else {}
        asyncio.run(EtcdRegistry(RegistrySettings(*where, ca=identities / ca, **pair)).check())

    with etcd_with("--client-cert-auth", tls=files) as etcd:
        where = parse_url(etcd.url)
        check("authority.pem", "paris")
        for name in ("stranger", None):
            with pytest.raises(ServiceError, match="no registry answers"):
                check("authority.pem", name)
        with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
            check("stranger.pem", "paris")

"""Files of certificates and keys that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import InputError
from stages.identity import HOST, ROUTER, Identity
from stages.security import Tls
from tests.stages.paris import NewPki


def broken(tls: Tls, how: str) -> Tls:
    assert tls.certificate is not None
    assert tls.key is not None
    if how == "missing":
        tls.key.unlink()
    elif how == "readable":
        tls.key.chmod(0o644)
    elif how == "group may write":
        tls.key.chmod(0o660)
    elif how == "swapped":
        return Tls(tls.authority, tls.key, tls.certificate)
    elif how == "garbage":
        tls.authority.write_text("x")
    elif how == "damaged":
        tls.certificate.write_bytes(tls.certificate.read_bytes().replace(b"M", b"N"))
    return tls


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", r"cannot read .*paris\.key: No such file"),
        ("readable", r"paris\.key is a secret, and others can read or change it: chmod 600 "),
        ("group may write", r"paris\.key is a secret"),
        ("garbage", r"ca\.pem is no authority's certificate \(PEM\)"),
        ("damaged", r"paris\.pem and .*paris\.key cannot be used"),
    ],
)
def test_files_that_cannot_be_used(new_pki: NewPki, how: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        broken(new_pki("a").issue(HOST, "paris"), how).read()


def test_files_in_each_others_place(new_pki: NewPki) -> None:
    tls = new_pki("a").issue(HOST, "paris")
    tls.certificate.chmod(0o600)
    with pytest.raises(InputError, match=r"paris\.key is no certificate"):
        broken(tls, "swapped").read()
    with pytest.raises(InputError, match=r"paris\.pem is no private key"):
        Tls(tls.authority, tls.certificate, tls.certificate).read()


def test_a_group_may_read_a_key(new_pki: NewPki) -> None:
    tls = new_pki("a").issue(HOST, "paris")
    tls.key.chmod(0o640)
    assert tls.own(HOST).identity == Identity(HOST, "paris")


def test_a_key_of_another_certificate(new_pki: NewPki) -> None:
    pki = new_pki("a")
    paris, tokyo = pki.issue(HOST, "paris"), pki.issue(HOST, "tokyo")
    with pytest.raises(InputError, match=r"tokyo\.key is not the key of .*paris\.pem"):
        Tls(paris.authority, paris.certificate, tokyo.key).read()


def test_a_key_with_a_password(new_pki: NewPki) -> None:
    from cryptography.hazmat.primitives import serialization as s

    tls = new_pki("a").issue(HOST, "paris")
    key = s.load_pem_private_key(tls.key.read_bytes(), None)
    raw = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x"))
    tls.key.write_bytes(raw)
    with pytest.raises(InputError, match=r"paris\.key has a password"):
        tls.read()


def test_half_a_pair() -> None:
    with pytest.raises(InputError, match="give both --tls-cert and --tls-key, or neither"):
        Tls(Path("ca.pem"), Path("a.pem"))


def test_a_server_needs_a_certificate_of_its_role(new_pki: NewPki) -> None:
    pki = new_pki("a")
    router = pki.issue(ROUTER, "r")
    with pytest.raises(InputError, match=r"r\.pem is for onesweep://router/r: make one with `onesweep certs host"):
        router.own(HOST)
    with pytest.raises(InputError, match="a server needs a certificate"):
        Tls(router.authority).own(HOST)

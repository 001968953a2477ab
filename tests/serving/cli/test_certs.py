"""`onesweep certs`: the files, their permissions, and errors."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from stages.checkpoint.release_store import SIGNATURES_NAME, ReleaseStore, read_release_manifest
from stages.errors import CheckpointError, InputError
from stages.wire.auth import CLIENT, HOST, ROLES, ROUTER, Identity
from stages.wire.certificates import is_signed, read_signers
from stages.wire.tls import Tls
from tests.conftest import Run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def certs(onesweep: Run, tmp_path: Path) -> Run:
    """Run `onesweep certs ACTION ...` in a directory of the test's."""

    def run(action: str, *arguments: object) -> tuple[int, str, str]:
        words = (action,) if action in ("init", "renew") else ("issue", action)
        return onesweep("certs", *words, *arguments, "--dir", tmp_path / "certs")

    return run


def test_an_authority_issues_certificates_for_each_role(certs: Run, tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    code, out, _ = certs("init", "--days", 100)
    assert (code, mode(directory), mode(directory / "ca.key")) == (0, 0o700, 0o600)
    assert "100 days" in out
    for role, name, *addresses in (
        (HOST, "paris", "--address", "10.8.0.1", "--address", "paris.example.org"),
        (ROUTER, "router", "--address", "::1"),
        (CLIENT, "alice"),
    ):
        code, out, _ = certs(role, name, *addresses)
        assert (code, f"{role} {name}" in out) == (0, True), out
        assert "30 days" in out
        assert mode(directory / f"{name}.key") == 0o600
        tls = Tls(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")
        assert tls.own(role).identity == Identity(role, name)
        key = x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes()).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_renewal_keeps_key_and_addresses(certs: Run, tmp_path: Path) -> None:
    certs("init", "--days", 100)
    certs("host", "paris", "--address", "10.8.0.1", "--address", "paris.example.org", "--days", 2)
    certs("client", "alice")
    path = tmp_path / "certs" / "paris.pem"
    before = x509.load_pem_x509_certificate(path.read_bytes())
    (tmp_path / "certs" / "paris.key").unlink()
    code, out, _ = certs("renew", "--days", 60)
    after = x509.load_pem_x509_certificate(path.read_bytes())
    assert code == 0
    assert after.public_key() == before.public_key()
    assert after.serial_number != before.serial_number
    assert [e.value for e in after.extensions] == [e.value for e in before.extensions]
    alice, paris, authority = out.splitlines()
    assert "client alice" in alice
    assert "host paris at 10.8.0.1, paris.example.org, until" in paris
    assert "60 days" in paris
    assert "100 days" in authority


def test_an_authority_certifies_roles_only(certs: Run, tmp_path: Path) -> None:
    certs("init")
    authority = x509.load_pem_x509_certificate((tmp_path / "certs" / "ca.pem").read_bytes())
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert [name.value for name in constraints.value.permitted_subtrees] == [*ROLES]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["init"], "ca.pem already exists"),
        (["init", "--days", "0"], "--days must be 1 to 7300, not 0"),
        (["host", "paris", "--address", "10.8.0.1"], "paris.pem already exists: renew it, or replace it"),
        (["host", "tokyo"], "a host is dialled by its address: give --address"),
        (["router", "router"], "a router is dialled by its address: give --address"),
        (["client", "bob", "--address", "10.8.0.1"], "nothing connects to a client: omit --address"),
        (["host", "tokyo", "--address", "10.8.0.2:7701"], "omit port and scheme"),
        (["host", "tokyo", "--address", ""], "'' is neither an IP address nor a DNS name"),
        (["host", "tokyo", "--address", "10.8.0.256"], "is neither an IP address nor a DNS name"),
        (["host", "ca", "--address", "10.8.0.1"], "a certificate cannot be named 'ca'"),
        (["host", "x" * 41, "--address", "10.8.0.1"], "of at most 40 characters"),
        (["host", "a/b", "--address", "10.8.0.1"], "name 'a/b' must be"),
        (["host", "tokyo", "--address", "10.8.0.1", "--days", "99999"], "--days must be 1 to 7300, not 99999"),
        (["renew", "tokyo"], "tokyo.pem does not exist, so it cannot be renewed: make it with `onesweep certs issue`"),
        (["renew", "../x"], "name '../x' must be"),
    ],
)
def test_a_wrong_argument_is_explained(certs: Run, arguments: list[str], says: str) -> None:
    certs("init")
    certs("host", "paris", "--address", "10.8.0.1")
    code, _, err = certs(*arguments)
    assert (code, says in err) == (2, True), err


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ca.pem", lambda path: path.write_bytes(b"x"), "ca.pem is not a certificate (PEM)"),
        ("ca.key", lambda path: path.write_bytes(b"x"), "ca.key is not a private key without a password (PEM)"),
        ("ca.key", lambda path: path.chmod(0o644), "others can read or change it: chmod 600"),
        ("ca.key", Path.unlink, "ca.key is missing: make an authority with"),
    ],
)
def test_a_damaged_authority_is_refused(
    certs: Run, tmp_path: Path, name: str, change: Callable[[Path], object], says: str
) -> None:
    certs("init")
    change(tmp_path / "certs" / name)
    code, _, err = certs("host", "paris", "--address", "10.8.0.1")
    assert (code, says in err) == (2, True), err


def test_a_signature_is_of_one_release_and_one_key(certs: Run, onesweep: Run, bundles: Path, tmp_path: Path) -> None:
    assert certs("signer", "ada")[0] == certs("signer", "ben")[0] == certs("init")[0] == 0
    directory, bundle = tmp_path / "certs", tmp_path / "bundle"
    assert [mode(directory / name) for name in ("ada.key", "ada.pub")] == [0o600, 0o644]
    shutil.copytree(bundles / "own", bundle)
    name = read_release_manifest(bundle).name
    for signers in (("ada",), ("ada", "ben"), ("ada", "ben")):
        code, out, _ = onesweep("sign", bundle, "--key", directory / f"{signers[-1]}.key")
        assert (code, out) == (0, f"release {name}, {len(signers)} signature{'s' * (len(signers) > 1)}\n")
    release = read_release_manifest(bundle)
    ada, ben = (read_signers(directory / f"{name}.pub") for name in ("ada", "ben"))
    assert is_signed(release.signed, release.signatures, ada)
    assert is_signed(release.signed, release.signatures[1:], ben)
    assert not is_signed(release.signed, release.signatures[1:], ada)
    assert not is_signed(release.signed + b"0", release.signatures, [*ada, *ben])
    (key, signature), _ = release.signatures
    for bad in (b"", signature[:-1], bytes(64)):
        assert not is_signed(release.signed, [(key, bad), (b"short", signature)])


def test_invalid_signing_keys_are_refused(certs: Run, onesweep: Run, bundles: Path, tmp_path: Path) -> None:
    assert certs("signer", "ada")[0] == certs("init")[0] == 0
    directory, bundle = tmp_path / "certs", tmp_path / "bundle"
    assert "replace it with --force (everyone who trusts the old key" in certs("signer", "ada")[2]
    shutil.copytree(bundles / "own", bundle)
    for key, says in (("ca.key", "not an Ed25519 key"), ("ada.pub", "not a private key"), ("none.key", "cannot read")):
        code, _, err = onesweep("sign", bundle, "--key", directory / key)
        assert (code, says in err) == (2, True), err
    for content, says in (
        (b"", "must hold Ed25519 public keys"),
        (b"-----END PUBLIC KEY-----", "not a file of public keys"),
    ):
        (tmp_path / "signers").write_bytes(content)
        with pytest.raises(InputError, match=says):
            ReleaseStore(tmp_path / "releases", tmp_path / "signers")
    (bundle / SIGNATURES_NAME).write_text('{"signatures": [["zz", "00"]]}')
    with pytest.raises(CheckpointError, match="holds no signatures"):
        read_release_manifest(bundle)

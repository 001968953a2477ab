"""A private certificate authority, and the certificates of hosts, routers and clients: `onesweep certs`.

One directory holds everything: `ca.pem` and `ca.key`, and a NAME.pem and NAME.key each. Keys are EC P-256.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stages.errors import InputError
from stages.wire.auth import CLIENT, ROLES, Identity
from stages.wire.channel import check_name, ip_of
from stages.wire.secret_files import PUBLIC, check_secret, make_private_directory, read_file, write_file

AUTHORITY = "ca"
MAX_DAYS = 20 * 365
MAX_CERTIFIED_NAME = 40  # routers listen on hosts as NAME.16-HEX-DIGITS, which must be a valid name, too
SKEW = timedelta(minutes=5)  # certificates are valid from a little before their creation: clocks differ

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Leaf:
    """A certificate in the directory, as written."""

    path: Path
    identity: Identity
    addresses: tuple[str, ...]
    until: datetime


class Authority:
    """A certificate and key that sign others."""

    def __init__(self, directory: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.directory, self.certificate, self.key = directory, certificate, key

    @classmethod
    def create(cls, directory: Path, days: int, force: bool = False) -> Self:
        """Create an authority in a directory that nobody else can enter. Raises InputError if one exists and not
        `force`."""
        _check_days(days)
        make_private_directory(directory)
        pem, secret = _files(directory, AUTHORITY)
        _check_new((pem, secret), force, "every certificate must then be made again")
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        # each authority has its own name, to tell a certificate by another authority from a forged one
        name = _common_name(f"onesweep authority {identifier.digest.hex()[:8]}")
        permitted = x509.NameConstraints([x509.UniformResourceIdentifier(role) for role in ROLES], None)
        certificate = (
            _begin(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(permitted, critical=True)
            .add_extension(_usage(signs_others=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        _write_secret(secret, key)
        write_file(pem, certificate.public_bytes(Encoding.PEM), PUBLIC)
        return cls(directory, certificate, key)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a directory's authority. Raises InputError if it is missing, damaged or expired."""
        pem, secret = _files(directory, AUTHORITY)
        if not pem.exists() or not secret.exists():
            missing = secret if pem.exists() else pem
            raise InputError(f"{missing} is missing: make an authority with `onesweep certs init --dir {directory}`")
        certificate, key = _parsed(pem, "certificate", x509.load_pem_x509_certificate), _read_key(secret)
        if certificate.public_key() != key.public_key():
            raise InputError(f"{secret} is not the key of {pem}: restore the two that were made together")
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            raise InputError(
                f"the authority {pem} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: "
                f"make a new one with `onesweep certs init --force --dir {directory}`, then every certificate"
            )
        return cls(directory, certificate, key)

    @property
    def until(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def issue(self, identity: Identity, addresses: Sequence[str], days: int, force: bool = False) -> Leaf:
        """Create a key and its certificate.

        :param addresses: IP addresses and DNS names at which others dial it; clients have none.

        Raises InputError if that name already has one and not `force`.
        """
        check_certified_name(identity.name)
        if (identity.role == CLIENT) == bool(addresses):
            raise InputError(
                "nothing connects to a client: omit --address"
                if addresses
                else f"a {identity.role} is dialled by its address: give --address, an IP address or DNS name"
            )
        pem, secret = _files(self.directory, identity.name)
        _check_new((pem, secret), force, "a new key then replaces the old one")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(identity, addresses, key.public_key(), days)
        _write_secret(secret, key)
        write_file(pem, certificate.public_bytes(Encoding.PEM), PUBLIC)
        return _leaf(pem, certificate)

    def certify(self, request: bytes, identity: Identity, addresses: Sequence[str], days: int) -> bytes:
        """Certify a key that stays on the machine that made it. Returns the certificate (PEM).

        :param request: from `make_request`; its names are ignored. Raises InputError.
        """
        check_certified_name(identity.name)
        try:
            asked = x509.load_der_x509_csr(request)
            public = asked.public_key()
            if not asked.is_signature_valid or not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise InputError("the request for a certificate is damaged, or its key is not an EC key") from None
        return self._sign(identity, addresses, public, days).public_bytes(Encoding.PEM)

    def renew(self, name: str, days: int) -> Leaf:
        """Renew the certificate of `name`: same key, same addresses. The key need not be here.

        Raises InputError if the certificate is missing, or from another authority.
        """
        # The key stays, so only one file changes: key and certificate always match, and no key has to travel again.
        pem, _ = _files(self.directory, check_certified_name(name))
        if not pem.exists():
            raise InputError(f"{pem} does not exist, so it cannot be renewed: make it with `onesweep certs issue`")
        before = _parsed(pem, "certificate", x509.load_pem_x509_certificate)
        try:
            before.verify_directly_issued_by(self.certificate)
        except (InvalidSignature, ValueError, TypeError):
            raise InputError(f"{pem} was issued by another authority: make it again with --force") from None
        leaf, public = _leaf(pem, before), before.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        certificate = self._sign(leaf.identity, leaf.addresses, public, days)
        write_file(pem, certificate.public_bytes(Encoding.PEM), PUBLIC)
        return _leaf(pem, certificate)

    def names(self) -> list[str]:
        """The names that have a certificate in the directory."""
        return sorted(path.stem for path in self.directory.glob("*.pem") if path.stem != AUTHORITY)

    def _sign(
        self, identity: Identity, addresses: Sequence[str], public: ec.EllipticCurvePublicKey, days: int
    ) -> x509.Certificate:
        _check_days(days)
        until = min(datetime.now(UTC) + timedelta(days=days), self.until)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]  # hosts and routers dial, too
        if identity.role != CLIENT:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = [x509.UniformResourceIdentifier(identity.uri), *map(_general_name, addresses)]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            _begin(_common_name(identity.name), self.certificate.subject, public, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_usage(signs_others=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )


def make_request(secret: Path, name: str) -> bytes:
    """A certificate request (DER) for the key in `secret`, which is created if missing. Raises InputError."""
    if secret.exists():
        key = _read_key(secret)
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        _write_secret(secret, key)
    made = x509.CertificateSigningRequestBuilder().subject_name(_common_name(name)).sign(key, hashes.SHA256())
    return made.public_bytes(Encoding.DER)


def key_fingerprint(certificate: bytes) -> str:
    """SHA-256, in hexadecimal digits, of the public key in a certificate (PEM). Renewals do not change it."""
    public = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def check_certified_name(name: str) -> str:
    """Return `name` if a certificate can contain it. Raises InputError."""
    check_name(name)
    if name == AUTHORITY or len(name) > MAX_CERTIFIED_NAME:
        raise InputError(
            f"a certificate cannot be named {name!r}: choose another name of at most {MAX_CERTIFIED_NAME} characters"
        )
    return name


def _files(directory: Path, name: str) -> tuple[Path, Path]:
    """The certificate of `name`, and its key."""
    return directory / f"{name}.pem", directory / f"{name}.key"


def expiry(until: datetime) -> str:
    """ "until 2030-01-31, 30 days", for people."""
    left = until - datetime.now(UTC)
    return f"until {until:%Y-%m-%d}, {max(round(left / timedelta(days=1)), 0)} days"


def _begin(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - SKEW)
        .not_valid_after(until)
    )


def _usage(signs_others: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(
        digital_signature=not signs_others, key_cert_sign=signs_others, crl_sign=signs_others, **unused
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _leaf(path: Path, certificate: x509.Certificate) -> Leaf:
    names = x509.SubjectAlternativeName([])
    with suppress(x509.ExtensionNotFound):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    identity = Identity.of(names.get_values_for_type(x509.UniformResourceIdentifier))
    if identity is None:
        raise InputError(f"{path} was not made by `onesweep certs`: it names no host, router or client")
    addresses = [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]
    return Leaf(path, identity, tuple(addresses), certificate.not_valid_after_utc)


def _general_name(address: str) -> x509.GeneralName:
    if (ip := ip_of(address)) is not None:
        return x509.IPAddress(ip)
    labels = address.split(".")
    named = all(len(each) <= 63 and each.isascii() and each.replace("-", "").isalnum() for each in labels)
    if len(address) > 253 or not named or labels[-1].isdigit():  # a numeric last label means a mistyped IP address
        raise InputError(f"{address!r} is neither an IP address nor a DNS name: omit port and scheme")
    return x509.DNSName(address.lower())


def _check_days(days: int) -> None:
    if not 0 < days <= MAX_DAYS:
        raise InputError(f"--days must be 1 to {MAX_DAYS}, not {days}")


def _check_new(paths: Sequence[Path], force: bool, consequence: str) -> None:
    for path in paths:
        if path.exists() and not force:
            raise InputError(f"{path} already exists: renew it, or replace it with --force ({consequence})")


# Keys that sign releases of weights: Ed25519, no authority. Servers that take releases have a file of trusted keys.


def make_signer(directory: Path, name: str, force: bool = False) -> Path:
    """Write NAME.key and NAME.pub, and return the latter's path. Raises InputError if they exist and not `force`."""
    check_name(name)
    make_private_directory(directory)
    secret, public = directory / f"{name}.key", directory / f"{name}.pub"
    _check_new((secret, public), force, "everyone who trusts the old key will refuse what the new one signs")
    key = Ed25519PrivateKey.generate()
    _write_secret(secret, key)
    write_file(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), PUBLIC)
    return public


def sign(content: bytes, secret: Path) -> tuple[bytes, bytes]:
    """The public key and the signature. Raises InputError for a file without such a key."""
    key = _parsed(secret, "private key without a password", lambda raw: load_pem_private_key(raw, None))
    check_secret(secret)
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{secret} is not an Ed25519 key: `onesweep certs issue signer NAME` makes one")
    return key.public_key().public_bytes_raw(), key.sign(content)


def read_signers(path: Path) -> list[Ed25519PublicKey]:
    """The public keys in a file, one PEM block after another. Raises InputError if it has none, or other kinds."""
    end = b"-----END PUBLIC KEY-----"
    blocks = [block + end for block in read_file(path).split(end)[:-1]]
    keys = [_parsed(path, "file of public keys", load_pem_public_key, block) for block in blocks]
    signers = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if not keys or len(signers) < len(keys):
        raise InputError(f"{path} must hold Ed25519 public keys: the .pub files of `onesweep certs issue signer NAME`")
    return signers


def is_signed(
    content: bytes, signatures: Sequence[tuple[bytes, bytes]], signers: Sequence[Ed25519PublicKey] | None = None
) -> bool:
    """True if one of `signers`, or anybody, made one of the signatures: pairs of a public key and its signature."""
    trusted = None if signers is None else {signer.public_bytes_raw() for signer in signers}
    for key, signature in signatures:
        if trusted is None or key in trusted:
            with suppress(InvalidSignature, ValueError):
                Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
                return True
    return False


def _write_secret(path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> None:
    write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    check_secret(path)
    key = _parsed(path, "private key without a password", lambda raw: load_pem_private_key(raw, None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} is not an EC key: `onesweep certs` makes only those")
    return key


def _parsed(path: Path, what: str, parse: Callable[[bytes], Parsed], raw: bytes | None = None) -> Parsed:
    try:
        return parse(read_file(path) if raw is None else raw)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a {what} (PEM)") from None

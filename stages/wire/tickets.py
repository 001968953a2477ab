"""Tickets, with which a machine joins a run; the invitations behind them, and the places in a run that they give.

A ticket is text for a chat message: the router's addresses, the fingerprint of its key, so that the first connection is
already secure, and a secret. The router keeps a hash of the secret, its remaining uses, and its expiry.
"""

import asyncio
import base64
import binascii
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import ssl
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import grpc
import psutil

from stages.errors import InputError, ServiceError
from stages.progress import ticking
from stages.v1 import join_pb2, join_pb2_grpc
from stages.wire.certificates import key_fingerprint, make_request
from stages.wire.channel import parse_address
from stages.wire.links import ROUTER_NAME, link_name
from stages.wire.messages import PROTOCOL
from stages.wire.secret_files import PUBLIC, file_lock, read_file, write_file
from stages.wire.tls import LOOPBACK_ONLY, Tls, handshake_problem
from stages.wire.tokens import token_hash, token_metadata

PREFIX = "onesweep-"
MAX_CHARACTERS, MAX_ADDRESSES, MAX_USES, MAX_DAYS = 2000, 8, 1000, 365
SECRET_BYTES, ID_DIGITS = 16, 8
DAY_S = 86400.0


@dataclass(frozen=True)
class Ticket:
    """The text given to an invited machine, parsed."""

    addresses: tuple[str, ...]  # of the rendezvous, in the order of trying them
    fingerprint: str  # SHA-256 of the router's public key, 64 hexadecimal digits
    secret: str

    def text(self) -> str:
        """One word of letters, digits, dashes and underscores."""
        raw = json.dumps([[*self.addresses], self.fingerprint, self.secret], separators=(",", ":")).encode()
        packed = zlib.crc32(raw).to_bytes(4, "big") + raw
        return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a ticket. Raises InputError, which does not quote the ticket."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InputError(f"this is not a ticket: a ticket begins with {PREFIX}; `onesweep serve` prints one")
        try:
            packed = text.removeprefix(PREFIX).encode("ascii")
            packed = base64.b64decode(packed + b"=" * (-len(packed) % 4), b"-_", validate=True)
            is_whole = len(text) <= MAX_CHARACTERS and zlib.crc32(packed[4:]) == int.from_bytes(packed[:4], "big")
            addresses, fingerprint, secret = json.loads(packed[4:] if is_whole else b"")
            if not all(isinstance(each, str) for each in (*addresses, fingerprint, secret)):
                raise ValueError
            # the beginning of the fingerprint names a folder
            if not 1 <= len(addresses) <= MAX_ADDRESSES or not re.fullmatch("[0-9a-f]{64}", fingerprint):
                raise ValueError
        except (ValueError, TypeError, RecursionError, binascii.Error):
            raise InputError("the ticket is damaged: copy it again, from the first character to the last") from None
        for address in addresses:
            parse_address(address, "the ticket's address")
        return cls(tuple(addresses), fingerprint, secret)


@dataclass(frozen=True)
class Invitation:
    """The router's record of a ticket."""

    id: str  # with which people revoke it
    sha256: str  # of the ticket's secret
    uses: int  # uses left
    until: float  # Unix time
    name: str = ""  # name that the machine gets; empty: the machine chooses
    revoked: bool = False

    @property
    def ends(self) -> str:
        """Its expiry, to the minute, for people."""
        return f"{time.strftime('%Y-%m-%d at %H:%M', time.gmtime(self.until))} UTC"

    def problem(self, now: float) -> str:
        """Why it no longer admits anyone; empty if it does."""
        if self.revoked:
            return "this ticket was revoked"
        if now > self.until:
            return f"this ticket expired on {self.ends}"
        return "" if self.uses > 0 else "this ticket was already used as often as it allows"


class Invitations:
    """A file of invitations, which commands and a router change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Invitation]:
        """All invitations. Raises InputError for a damaged file."""
        if not self.path.exists():
            return []
        try:
            return [Invitation(**each) for each in json.loads(read_file(self.path))]
        except (ValueError, TypeError):
            raise InputError(f"{self.path} is damaged: remove it, and invite again") from None

    def add(self, uses: int, days: float, name: str = "") -> tuple[Invitation, str]:
        """Create an invitation. Returns it and its secret. Raises InputError."""
        if not 1 <= uses <= MAX_USES:
            raise InputError(f"--uses must be 1 to {MAX_USES}, not {uses}")
        if not 0 < days <= MAX_DAYS:
            raise InputError(f"--days must be above 0 and at most {MAX_DAYS}, not {days:g}")
        if name and uses > 1:
            raise InputError("a ticket with a name is for one machine: omit --uses")
        secret = secrets.token_urlsafe(SECRET_BYTES)
        digest = token_hash(secret)
        made = Invitation(digest[:ID_DIGITS], digest, uses, time.time() + days * DAY_S, name)
        with file_lock(self.path):
            self._write([*(each for each in self.all() if time.time() < each.until + MAX_DAYS * DAY_S), made])
        return made, secret

    def revoke(self, id: str) -> None:
        with file_lock(self.path):
            self._write([replace(each, revoked=each.revoked or each.id == id) for each in self.all()])

    def find(self, secret: str) -> Invitation | None:
        """The invitation of a ticket's secret."""
        digest = token_hash(secret)
        return next((each for each in self.all() if hmac.compare_digest(each.sha256, digest)), None)

    def use(self, used: Invitation) -> None:
        """Book a use of an invitation."""
        with file_lock(self.path):
            self._write([replace(each, uses=each.uses - (each.id == used.id)) for each in self.all()])

    def _write(self, all_: Sequence[Invitation]) -> None:
        write_file(self.path, json.dumps([asdict(each) for each in all_], indent=1).encode())


def own_addresses(port: int) -> tuple[str, ...]:
    """Addresses of this machine that others may be able to dial, without loopback."""
    found = list[str]()
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(each.address.partition("%")[0])
                if not ip.is_loopback and not ip.is_link_local:
                    found.append(f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}")
    return tuple(found)


# A machine's side: it enrols with a ticket, and keeps its place.

MACHINE_NAME = "machine.json"
DIAL_S, ENROL_S = 5.0, 20.0
RENEWED_DAYS, CHECK_S = 15, 3600.0  # validity left when a machine asks for the next certificate; time between checks


@dataclass(frozen=True)
class JoinedMachine:
    """A machine's place in a run, in a directory of its own."""

    directory: Path
    name: str
    secret: str
    rendezvous: tuple[str, ...]

    @property
    def tls(self) -> Tls:
        return Tls(self.directory / "ca.pem", self.directory / "machine.pem", self.directory / "machine.key")

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the place; None if no machine joined. Raises InputError for a damaged record."""
        path = directory / MACHINE_NAME
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls(directory, str(record["name"]), str(record["secret"]), tuple(map(str, record["rendezvous"])))
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} is damaged: remove {directory}, and join with another ticket") from None


def is_known(place: JoinedMachine) -> bool:
    """False if the router removed this machine: it may rejoin with a new ticket."""
    request = join_pb2.EnrolRequest(name=place.name)
    try:
        asyncio.run(_enrol(place.rendezvous[0], read_file(place.tls.authority), request, place.secret))
    except grpc.RpcError as error:
        return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True


def enrolled(ticket: Ticket, directory: Path, name: str, is_given: bool) -> JoinedMachine | None:
    """Join, and keep the certificate; None if another machine has a name that was not given. Raises OnesweepError."""
    address, certificate = _found(ticket)
    key = make_request(directory / "machine.key", name)
    request = join_pb2.EnrolRequest(name=name, request=key, insists=is_given)
    try:
        response = asyncio.run(_enrol(address, certificate, request, ticket.secret))
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ALREADY_EXISTS and not is_given and f" {name} " in details:  # a ticket may name it
            return None
        explained = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}
        if code in explained:
            raise InputError(details) from None
        problem = handshake_problem(details, LOOPBACK_ONLY) or f"refused this machine: {details}"
        raise ServiceError(f"the router at {address} {problem}") from None
    write_file(directory / "ca.pem", response.authority, PUBLIC)
    write_file(directory / "machine.pem", response.certificate, PUBLIC)
    rendezvous = [address, *(each for each in ticket.addresses if each != address)]
    record = {"name": response.name, "secret": response.secret, "rendezvous": rendezvous}
    write_file(directory / MACHINE_NAME, json.dumps(record).encode())
    return JoinedMachine.read(directory)


def _found(ticket: Ticket) -> tuple[str, bytes]:
    """The first address where the ticket's router answers, and its certificate (PEM). Raises ServiceError."""
    problems = []
    for address in ticket.addresses:
        try:
            shown = ssl.get_server_certificate(parse_address(address), timeout=DIAL_S).encode()
        except (OSError, ValueError) as error:
            problems.append(f"{address} does not answer ({getattr(error, 'strerror', None) or error})")
            continue
        if secrets.compare_digest(key_fingerprint(shown), ticket.fingerprint):
            return address, shown
        problems.append(f"the server at {address} is not the ticket's")
    raise ServiceError(
        f"cannot reach the router: {'; '.join(problems)}. Check that `onesweep serve` is running there and that this "
        "machine can reach it; nothing of the ticket was sent"
    )


async def _enrol(
    address: str, certificate: bytes, request: join_pb2.EnrolRequest, secret: str
) -> join_pb2.EnrolResponse:
    request.protocol, request.unix_s = PROTOCOL, int(time.time())
    options = (("grpc.ssl_target_name_override", link_name(ROUTER_NAME)), ("grpc.enable_http_proxy", 0))
    with ticking(f"waiting for the router at {address}"):
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options) as channel:
            stub: join_pb2_grpc.JoinServiceAsyncStub = join_pb2_grpc.JoinServiceStub(channel)
            return await stub.Enrol(request, timeout=ENROL_S, metadata=token_metadata(secret))


async def renew(place: JoinedMachine) -> None:
    """Renew the certificate, with the same key, before it ends; servers read it from its file. Runs forever."""
    while True:
        certificate = place.tls.read().certificate
        if certificate is not None and certificate.until - datetime.now(UTC) < timedelta(days=RENEWED_DAYS):
            request = join_pb2.EnrolRequest(
                name=place.name, request=make_request(place.directory / "machine.key", place.name)
            )
            for address in place.rendezvous:
                with contextlib.suppress(grpc.RpcError):
                    response = await _enrol(address, read_file(place.tls.authority), request, place.secret)
                    write_file(place.directory / "machine.pem", response.certificate, PUBLIC)
                    break
        await asyncio.sleep(CHECK_S)

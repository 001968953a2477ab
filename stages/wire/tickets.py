"""Tickets, with which a machine joins a run, and the invitations that they stand for.

A ticket is text for a chat message: where the router is, the fingerprint of its key, so that the first connection is
sure already, and a secret. The router keeps a hash of the secret, how often it may be used, and until when.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from stages.errors import InputError
from stages.wire.channel import parse_address
from stages.wire.secret_files import lock_beside, read_file, write_file

PREFIX = "onesweep-"
MOST_CHARACTERS, MOST_ADDRESSES, MOST_USES, MOST_DAYS = 2000, 8, 1000, 365
SECRET_BYTES, ID_DIGITS = 16, 8
DAY_S = 86400.0
DAMAGED = "the ticket is damaged: copy it again, from the first letter to the last"


@dataclass(frozen=True)
class Ticket:
    """The text that an invited machine is given, taken apart."""

    addresses: tuple[str, ...]  # of the rendezvous, in the order in which they are tried
    fingerprint: str  # SHA-256 of its public key, 64 hexadecimal digits
    secret: str

    def text(self) -> str:
        """One word of letters, digits, dashes and underscores."""
        raw = json.dumps([[*self.addresses], self.fingerprint, self.secret], separators=(",", ":")).encode()
        packed = zlib.crc32(raw).to_bytes(4, "big") + raw
        return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InputError, which does not quote the ticket."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InputError(f"this is no ticket: one begins with {PREFIX}, and `onesweep serve` prints it")
        try:
            packed = text.removeprefix(PREFIX).encode("ascii")
            packed = base64.b64decode(packed + b"=" * (-len(packed) % 4), b"-_", validate=True)
            is_whole = len(text) <= MOST_CHARACTERS and zlib.crc32(packed[4:]) == int.from_bytes(packed[:4], "big")
            addresses, fingerprint, secret = json.loads(packed[4:] if is_whole else b"")
            if not all(isinstance(each, str) for each in (*addresses, fingerprint, secret)):
                raise ValueError
            # a folder is called by the beginning of the fingerprint
            if not 1 <= len(addresses) <= MOST_ADDRESSES or not re.fullmatch("[0-9a-f]{64}", fingerprint):
                raise ValueError
        except (ValueError, TypeError, RecursionError, binascii.Error):
            raise InputError(DAMAGED) from None
        for address in addresses:
            parse_address(address, "the ticket's address")
        return cls(tuple(addresses), fingerprint, secret)


@dataclass(frozen=True)
class Invitation:
    """A ticket as the router knows it."""

    id: str  # by which people revoke it
    sha256: str  # of its secret
    uses: int  # that are left
    until: float  # Unix time
    name: str = ""  # that the machine gets; empty: it says its own
    revoked: bool = False

    @property
    def ends(self) -> str:
        """The last minute of it, for people."""
        return f"{time.strftime('%Y-%m-%d at %H:%M', time.gmtime(self.until))} UTC"

    def problem(self, now: float) -> str:
        """Why it lets nobody in; empty where it does."""
        if self.revoked:
            return "this ticket was revoked"
        if now > self.until:
            return f"this ticket expired on {self.ends}"
        return "" if self.uses > 0 else "this ticket was used already, as often as it may be"


class Invitations:
    """A file of invitations, which commands and a router change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Invitation]:
        """Raises InputError for a file that is damaged."""
        if not self.path.exists():
            return []
        try:
            return [Invitation(**each) for each in json.loads(read_file(self.path))]
        except (ValueError, TypeError):
            raise InputError(f"{self.path} is damaged: remove it, and invite again") from None

    def add(self, uses: int, days: float, name: str = "") -> tuple[Invitation, str]:
        """A new one, and its secret. Raises InputError."""
        if not 1 <= uses <= MOST_USES:
            raise InputError(f"--uses must be 1 to {MOST_USES}, not {uses}")
        if not 0 < days <= MOST_DAYS:
            raise InputError(f"--days must be above 0 and at most {MOST_DAYS}, not {days:g}")
        if name and uses > 1:
            raise InputError("a ticket with a name is for one machine: leave --uses out")
        secret = secrets.token_urlsafe(SECRET_BYTES)
        digest = secret_hash(secret)
        made = Invitation(digest[:ID_DIGITS], digest, uses, time.time() + days * DAY_S, name)
        with lock_beside(self.path):
            self._write([*(each for each in self.all() if time.time() < each.until + MOST_DAYS * DAY_S), made])
        return made, secret

    def revoke(self, id: str) -> None:
        """Let nobody in with one any more."""
        with lock_beside(self.path):
            self._write([replace(each, revoked=each.revoked or each.id == id) for each in self.all()])

    def find(self, secret: str) -> Invitation | None:
        """The invitation of a ticket's secret."""
        digest = secret_hash(secret)
        return next((each for each in self.all() if hmac.compare_digest(each.sha256, digest)), None)

    def use(self, used: Invitation) -> None:
        """Book that a machine joined with one."""
        with lock_beside(self.path):
            self._write([replace(each, uses=each.uses - (each.id == used.id)) for each in self.all()])

    def _write(self, all_: Sequence[Invitation]) -> None:
        write_file(self.path, json.dumps([asdict(each) for each in all_], indent=1).encode())


def secret_hash(secret: str) -> str:
    """SHA-256 in hexadecimal digits: secrets have 128 random bits, so no slower hash is needed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def own_addresses(port: int) -> tuple[str, ...]:
    """Addresses of this machine that others may be able to dial, without its own loopback."""
    found = list[str]()
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(each.address.partition("%")[0])
                if not ip.is_loopback and not ip.is_link_local:
                    found.append(f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}")
    return tuple(found)

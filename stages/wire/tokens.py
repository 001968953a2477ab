"""Tokens of a router's users and of a coordinator's workers: a file of hashes, each with scopes and limits.

A token is 256 random bits, so a plain SHA-256 keeps it secret: a slow hash only helps secrets that can be guessed.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stages.errors import InputError, one_of, quoted
from stages.settings import from_toml, read_toml
from stages.wire.channel import check_name, is_loopback
from stages.wire.secret_files import (
    TOKEN_VARIABLE,
    check_secret,
    make_state_directory,
    read_file,
    stamp_of,
    state_directory,
    write_file,
)
from stages.wire.status import Metadata, permission_denied, unauthenticated
from stages.wire.tls import Tls

log = logging.getLogger(__name__)

GENERATE, STATUS, WORK, ADMIN = "generate", "status", "work", "admin"
SCOPES = (GENERATE, STATUS, WORK, ADMIN)  # `admin` includes the others
PREFIX = "onesweep_"  # makes a token recognizable, for scanners for leaked secrets too
HEADER, SCHEME = "authorization", "Bearer "
OWNER = "owner"  # the only key of a server with `make_own_token`


@dataclass(frozen=True)
class Key:
    """The owner of a token, with scopes and limits (None: no limit)."""

    name: str
    sha256: str = ""
    scopes: tuple[str, ...] = SCOPES
    rate: float | None = None  # requests a second
    concurrent: int | None = None  # requests at once
    bytes_per_day: int | None = None  # bytes of prompts and texts, from midnight to midnight, UTC
    # not kept over a restart: this protects hosts from a runaway client, and is not for billing

    def __post_init__(self) -> None:
        check_name(self.name, "key name")
        for scope in self.scopes:
            if scope not in SCOPES:
                raise InputError(f"key {self.name}: unknown scope {quoted(scope)}{one_of(scope, SCOPES)}")
        if not self.scopes:
            raise InputError(f"key {self.name} has no scope; choose from {', '.join(SCOPES)}")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise InputError(f"key {self.name}: rate must be above 0, not {self.rate}")
        for name, value in (("concurrent", self.concurrent), ("bytes_per_day", self.bytes_per_day)):
            if value is not None and value < 1:
                raise InputError(f"key {self.name}: {name} must be 1 or more for each router, not {value}")

    def share(self, routers: int) -> "Key":
        """The limits at one of `routers` routers. Raises InputError for a limit that cannot be divided."""
        concurrent, a_day = (limit and limit // routers for limit in (self.concurrent, self.bytes_per_day))
        return replace(self, rate=self.rate and self.rate / routers, concurrent=concurrent, bytes_per_day=a_day)

    def space(self, router: str) -> bytes:
        """Space of the owner's texts in the hosts' prefix cache, 16 bytes, which nobody can guess without the token.

        Without tokens, all callers of a router share one. router: its name in its certificate.
        """
        owner = self.sha256 or f"anybody at {router}"
        return hashlib.sha256(f"onesweep prefix space of {owner}".encode()).digest()[:16]

    def may(self, scope: str) -> bool:
        return scope in self.scopes or ADMIN in self.scopes


ANONYMOUS = Key("anybody")  # the caller of a server without tokens


class Keyring:
    """The tokens that a server accepts, from a file that is reread when it changes. Without a file it accepts any."""

    def __init__(self, path: Path | None = None, routers: int = 1) -> None:
        """:param routers: routers that share these tokens and their limits. Raises InputError for a bad file."""
        self.path, self.routers = path, routers
        self._stamp = stamp_of(path) if path else None
        self._keys = self._shares(path) if path else {}

    @property
    def open(self) -> bool:
        """True if no token is needed."""
        return self.path is None

    @property
    def shared(self) -> bool:
        """True if several people may hold a token."""
        return self.path is not None and {key.name for key in self._keys.values()} != {OWNER}

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None, scope: str) -> Key:
        """The owner of the token in a call's metadata.

        Raises StatusError: UNAUTHENTICATED, or PERMISSION_DENIED without the scope.
        """
        if self.path is None:
            return ANONYMOUS
        self._reload(self.path)
        shown = next((value for name, value in metadata or () if name == HEADER), None)
        if shown is None:
            raise unauthenticated(
                "a token is required: give --token-file, set ONESWEEP_TOKEN, or send Authorization: Bearer TOKEN"
            )
        text = shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown
        if not text.startswith(SCHEME):
            raise unauthenticated(f"the metadata `{HEADER}` must be `{SCHEME}TOKEN`")
        found = self._keys.get(token_hash(text.removeprefix(SCHEME)))  # by its hash, so the time taken reveals nothing
        if found is None:
            raise unauthenticated("unknown token: it was mistyped or removed; ask the operator of this server for one")
        if not found.may(scope):
            message = f"key {found.name} lacks scope {scope}: it has only {', '.join(found.scopes)}"
            raise permission_denied(message)
        return found

    def _shares(self, path: Path) -> dict[str, Key]:
        if not (keys := read_tokens(path)):
            log.warning("%s has no keys: no one has access until `onesweep token add` writes one", path)
        return {key.sha256: key.share(self.routers) for key in keys}

    def _reload(self, path: Path) -> None:
        stamp = stamp_of(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._shares(path)
            log.info("%s: %d keys", path, len(self._keys))
        except InputError as error:
            log.warning("keeping the previous tokens: %s", error)


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def token_metadata(token: str) -> Metadata:
    """The metadata of a call with a token; none for an empty token. Raises InputError for an invalid token."""
    if not token:
        return ()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InputError("the token has invalid characters: give the line that `onesweep token add` printed")
    return ((HEADER, SCHEME + token),)


def read_tokens(path: Path) -> tuple[Key, ...]:
    """Read a file of tokens. Raises InputError that names the file and the necessary change."""
    table = read_toml(path)
    check_secret(path)
    entries = table.get("keys", [])
    if table.keys() - {"keys"} or not isinstance(entries, list):
        raise InputError(f"{path}: it must have only [[keys]] sections")
    keys = tuple(_key(path, entry) for entry in entries)
    for what, values in (("name", {key.name for key in keys}), ("token", {key.sha256 for key in keys})):
        if len(values) < len(keys):
            raise InputError(f"{path}: two keys have the same {what}")
    return keys


def write_tokens(path: Path, keys: Sequence[Key]) -> None:
    """Replace the file atomically; only its owner can read it. Raises InputError."""
    parts = ["# Written by `onesweep token`. It is read again when it changes.\n"]
    for key in keys:
        lines = ["[[keys]]"]
        for field in fields(Key):
            value = getattr(key, field.name)
            if value is not None:
                # JSON's numbers, strings and lists of these are valid TOML
                lines.append(f"{field.name} = {json.dumps(value)}")
        parts.append("\n".join(lines) + "\n")
    write_file(path, "\n".join(parts).encode())


def _key(path: Path, entry: object) -> Key:
    name = entry.get("name", "(unnamed)") if isinstance(entry, dict) else entry
    given = {"scopes": [], **entry} if isinstance(entry, dict) else entry  # an entry without scopes grants none
    key = from_toml(Key, given, f"{path}: key {name!r}")
    if not re.fullmatch("[0-9a-f]{64}", key.sha256):
        raise InputError(f"{path}: key {name!r} needs the sha256 of its token, 64 hex digits")
    return key


def token_of(options: argparse.Namespace, address: str, tls: Tls | None) -> str:
    """The token for a server from the options or the environment; empty for none. Raises InputError."""
    if options.token_file is None:
        return token_for(address, tls)
    raw = read_file(options.token_file)
    check_secret(options.token_file)
    token = raw.decode(errors="replace").strip()
    if not token:
        raise InputError(f"{options.token_file} is empty: it must hold a token")
    return token


def token_for(address: str, tls: Tls | None = None) -> str:
    """`own_token`, else $ONESWEEP_TOKEN; empty if there is none, or if it would travel in plain text."""
    if own := own_token(address):  # first: the variable may be exported for another router
        return own
    return os.environ.get(TOKEN_VARIABLE, "") if tls or all(map(is_loopback, address.split(","))) else ""


# Tokens of servers that a deployment started on this machine: each server has its own, in a file that only its user can
# read. A process that listens in place of a dead server is shown a token that opens nothing.


def make_own_token(path: Path, *addresses: str) -> None:
    """Make the token of a server on this machine: its SHA-256 in `path`, the token where `own_token` looks.

    Raises OnesweepError.
    """
    token = new_token()
    write_tokens(path, [Key(OWNER, token_hash(token), (ADMIN,))])
    make_state_directory(state_directory())
    for path in own_token_paths(*addresses):
        write_file(path, token.encode())


def own_token(address: str) -> str:
    """The token that this user's deployment made for a server, or for several; empty if there is none.

    Raises OnesweepError as `state_directory` does.
    """
    addresses = address.split(",")
    if not all(map(is_loopback, addresses)):
        return ""
    try:
        found = {next(filter(Path.is_file, own_token_paths(each))).read_text(encoding="ascii") for each in addresses}
    except (OSError, StopIteration):
        return ""
    return found.pop() if len(found) == 1 else ""


def own_token_paths(*addresses: str) -> list[Path]:
    """The files of a server's token at its addresses; localhost has two."""
    dialled = [each.replace("localhost", ip) for each in addresses for ip in ("127.0.0.1", "[::1]")]
    return [state_directory() / f"{each}.token" for each in dict.fromkeys(dialled)]

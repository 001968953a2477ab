"""Host registries: the entry of a host, the settings and flags, and the next hosts of a sweep."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from stages.errors import InputError
from stages.limits import MAX_ADDRESS
from stages.wire.channel import check_name, ip_of, is_loopback, parse_address

if TYPE_CHECKING:
    from stages.wire.etcd import EtcdRegistry

log = logging.getLogger(__name__)

MAX_BLOCKS = 4096
MAX_ENTRY_BYTES = 16 << 10
SCHEME = "etcd://"
MAX_ENDPOINTS = 16
MAX_PREFIX = 128
TLS_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class Registration:
    """One host of the ring. Raises InputError for a name or an address that cannot be."""

    name: str
    address: str  # the address that others dial
    blocks: tuple[int, ...]  # neighbours, in order

    def __post_init__(self) -> None:
        if check_name(self.name, "host name") == "router":
            raise InputError("a host cannot be called 'router': give it another name")
        check_dialled(self.address)


@dataclass(frozen=True)
class RegistrySettings:
    """The parts of a URL `etcd://HOST:PORT[,HOST:PORT]/PREFIX[?ca=FILE&cert=FILE&key=FILE]`."""

    endpoints: tuple[str, ...]  # members of one etcd cluster, any of which is asked
    prefix: str  # the path of the entries: `PREFIX/NAME`
    ca: Path | None = None  # authority of etcd's certificate; this, or `cert`, means TLS
    cert: Path | None = None
    key: Path | None = None

    @property
    def url(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}{self.prefix}"

    @property
    def tls(self) -> bool:
        return self.ca is not None or self.cert is not None


def check_dialled(address: str, what: str = "address") -> str:
    """Return an address that another machine can dial. Raises InputError."""
    if len(address) > MAX_ADDRESS:
        raise InputError(f"{what} must be at most {MAX_ADDRESS} characters, not {len(address)}")
    host, port = parse_address(address, what)
    if not port:
        raise InputError(f"{what} {address!r} must have the port that others dial, not 0")
    ip = ip_of(host)
    if ip is not None and ip.is_unspecified:
        raise InputError(f"{what} {address!r} cannot be dialled: give the address that others reach (--advertise)")
    return address


def parse_url(url: str) -> tuple[tuple[str, ...], str]:
    """Endpoints and prefix of a registry's URL. Raises InputError."""
    shape = f"--registry {url[:MAX_PREFIX]!r} must be {SCHEME}HOST:PORT[,HOST:PORT]/PREFIX"
    where, slash, prefix = url.removeprefix(SCHEME).partition("/")
    if not url.startswith(SCHEME) or not where or not slash:
        raise InputError(shape)
    endpoints = tuple(check_dialled(endpoint, "registry address") for endpoint in where.split(","))
    if len(endpoints) > MAX_ENDPOINTS:
        raise InputError(f"--registry names {len(endpoints)} addresses, at most {MAX_ENDPOINTS} are used")
    if len(prefix) > MAX_PREFIX or not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", prefix):
        raise InputError(f"{shape}, and PREFIX at most {MAX_PREFIX} letters, digits, dots, dashes and slashes")
    return endpoints, f"/{prefix}"


def registry_settings(options: argparse.Namespace) -> RegistrySettings | None:
    """The settings of the flags; None without --registry. Raises InputError."""
    if options.registry is None:
        return None
    url, _, query = options.registry.partition("?")
    files = {name: Path(path) for name, path in parse_qsl(query, keep_blank_values=True)}
    if unknown := files.keys() - {*TLS_FILES}:
        raise InputError(f"--registry: there is no {min(unknown)!r}, only ?ca=FILE&cert=FILE&key=FILE")
    if ("cert" in files) != ("key" in files):
        raise InputError("--registry: cert=FILE and key=FILE belong together: give both, or neither")
    for path in files.values():
        if not path.is_file():
            raise InputError(f"--registry: there is no file {path}")
    endpoints, prefix = parse_url(url)
    settings = RegistrySettings(endpoints, prefix, files.get("ca"), files.get("cert"), files.get("key"))
    for endpoint in endpoints:
        if not settings.tls and not options.insecure and not is_loopback(endpoint):
            raise InputError(
                f"registry {endpoint} is on another machine and traffic would not be encrypted: add ?ca=FILE to its "
                "URL, or accept it with --insecure"
            )
    return settings


def write_entry(registration: Registration) -> bytes:
    """A registration as JSON."""
    blocks = [registration.blocks[0], registration.blocks[-1]]
    return json.dumps({"name": registration.name, "address": registration.address, "blocks": blocks}).encode()


def read_entry(name: str, data: bytes) -> Registration:
    """The registration of the host called `name`; unknown keys are ignored. Raises InputError."""
    if len(data) > MAX_ENTRY_BYTES:
        raise InputError(f"it takes {len(data)} bytes, the limit is {MAX_ENTRY_BYTES}")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError("it is not JSON") from None
    if not isinstance(record, dict):
        raise InputError("it is not a JSON object")
    if record.get("name") != name:
        raise InputError("it names another host than its key")
    address = record.get("address")
    if not isinstance(address, str):
        raise InputError("address is not text")
    match record.get("blocks"):
        case [int(first), int(last)] if not isinstance(first, bool) and 0 <= first <= last < MAX_BLOCKS:
            return Registration(name, address, tuple(range(first, last + 1)))
    raise InputError(f"blocks is not [FIRST, LAST], from 0 to {MAX_BLOCKS - 1}")


def successors(registrations: Iterable[Registration], own: Registration, parts: int) -> list[str]:
    """Addresses of the hosts whose blocks begin where those of `own` end; none for a host with all `parts` blocks."""
    # checkpoints are not compared: they may be exchanged meanwhile, and each link checks them
    if len(own.blocks) == parts:
        return []
    due = (own.blocks[-1] + 1) % parts
    others = [other for other in registrations if other.name != own.name]
    return [other.address for other in others if other.blocks[0] == due]


async def follow_successors(
    registry: EtcdRegistry, own: Registration, parts: int, set_addresses: Callable[[Sequence[str]], None]
) -> None:
    """Call `set_addresses` with the next hosts of `own`, now and after each change, for ever."""
    known: list[str] | None = None
    async with aclosing(registry.follow()) as changes:
        async for registrations in changes:
            addresses = successors(registrations, own, parts)
            if addresses != known:
                log.info("%s: next hosts: %s", own.name, ", ".join(addresses) or "none")
                set_addresses(addresses)
                known = addresses

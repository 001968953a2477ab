"""Which registry, and how to reach it: the URL, TLS files and their flags."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from stages.errors import InputError
from stages.registry.base import check_dialled
from stages.transport import is_loopback

SCHEME = "etcd://"
MAX_ENDPOINTS = 16
MAX_PREFIX = 128
TLS_FLAGS = ("ca", "cert", "key")


@dataclass(frozen=True)
class RegistrySettings:
    """`etcd://HOST:PORT[,HOST:PORT]/PREFIX`, taken apart."""

    endpoints: tuple[str, ...]
    """Members of one etcd cluster: any of them will do."""
    prefix: str
    """Hosts stand under `PREFIX/NAME`."""
    ca: Path | None = None
    """Authority of etcd's certificate; with it, or with `cert`, etcd is spoken to over TLS."""
    cert: Path | None = None
    key: Path | None = None

    @property
    def url(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}{self.prefix}"

    @property
    def tls(self) -> bool:
        return self.ca is not None or self.cert is not None


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


def add_registry_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registry", metavar="URL", help="where hosts register: etcd://HOST:PORT[,HOST:PORT]/PREFIX")
    parser.add_argument("--registry-ca", type=Path, metavar="FILE", help="authority of etcd's certificate: speak TLS")
    parser.add_argument("--registry-cert", type=Path, metavar="FILE", help="this process's certificate for etcd")
    parser.add_argument("--registry-key", type=Path, metavar="FILE", help="and its key")


def registry_settings(options: argparse.Namespace) -> RegistrySettings | None:
    """What the flags say; None without --registry. Raises InputError."""
    files: dict[str, Path | None] = {name: getattr(options, f"registry_{name}") for name in TLS_FLAGS}
    if options.registry is None:
        for name, path in files.items():
            if path is not None:
                raise InputError(f"--registry-{name} says how to reach a registry: name it with --registry")
        return None
    if (files["cert"] is None) != (files["key"] is None):
        raise InputError("--registry-cert and --registry-key belong together: give both, or neither")
    for name, path in files.items():
        if path is not None and not path.is_file():
            raise InputError(f"--registry-{name}: there is no file {path}")
    endpoints, prefix = parse_url(options.registry)
    settings = RegistrySettings(endpoints, prefix, **files)
    for endpoint in endpoints:
        if not settings.tls and not options.insecure and not is_loopback(endpoint):
            raise InputError(
                f"registry {endpoint} is on another machine and traffic would not be encrypted: give --registry-ca, "
                "or accept it with --insecure"
            )
    return settings

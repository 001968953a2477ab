"""Options of every command that listens or dials: certificates, and whether plain text may leave the machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from stages.errors import InputError
from stages.security import Security, Tls

INSECURE = "accept plain text to and from other machines"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-cert`, `--tls-key`, `--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate to show, from `onesweep certs`")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    add_client_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority whose certificates are believed")
    parser.add_argument("--insecure", action="store_true", help=INSECURE)


def tls_arguments(tls: Tls | None) -> list[str]:
    """The options that say so."""
    pairs = (("--tls-ca", tls.authority), ("--tls-cert", tls.certificate), ("--tls-key", tls.key)) if tls else ()
    return [word for flag, path in pairs if path for word in (flag, str(path))]


def security_of(options: argparse.Namespace, default: Tls | None = None) -> Security:
    """What the options say; `default` where they name no certificates. Raises InputError for half of a set."""
    certificate, key = getattr(options, "tls_cert", None), getattr(options, "tls_key", None)
    if options.tls_ca is not None:
        return Security(Tls(options.tls_ca, certificate, key), options.insecure)
    if certificate or key:
        raise InputError("--tls-cert and --tls-key go with --tls-ca, the authority that the other side is checked by")
    return Security(default, options.insecure)

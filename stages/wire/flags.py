"""Flags of connections, without what makes the connections: a command's help does not wait for gRPC."""

from __future__ import annotations

import argparse
from pathlib import Path

TOKEN_VARIABLE = "ONESWEEP_TOKEN"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-cert`, `--tls-key`, `--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate to show, from `onesweep certs`")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    add_client_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """`--tls-ca`, `--insecure`."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority whose certificates are believed")
    parser.add_argument("--insecure", action="store_true", help="accept plain text to and from other machines")


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """`--token-file`."""
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"holds the token (${TOKEN_VARIABLE})")

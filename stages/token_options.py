"""Options of every command that shows a token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from stages.errors import InputError
from stages.security import Tls, check_secret, read_file
from stages.transport import is_loopback

TOKEN_VARIABLE = "ONESWEEP_TOKEN"


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """`--token-file`, `--token`."""
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="FILE", help=f"holds the token (default: ${TOKEN_VARIABLE})")
    token.add_argument("--token", metavar="TOKEN", help="the token itself: others on this machine can see it")


def token_of(options: argparse.Namespace, address: str, tls: Tls | None) -> str:
    """The token that the options, or the environment, name for a server; empty for none. Raises InputError."""
    if options.token_file is None:
        return options.token or token_for(address, tls)
    raw = read_file(options.token_file)
    check_secret(options.token_file)
    token = raw.decode(errors="replace").strip()
    if not token:
        raise InputError(f"{options.token_file} is empty: it must hold a token")
    return token


def token_for(address: str, tls: Tls | None = None) -> str:
    """The token of $ONESWEEP_TOKEN; empty where there is none, or where it would travel in plain text."""
    return os.environ.get(TOKEN_VARIABLE, "") if tls or is_loopback(address) else ""

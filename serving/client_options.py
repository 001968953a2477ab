"""Options of the commands that ask a router: where it is, whom to believe, and who asks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from serving.topology import DEFAULT_ROUTER
from stages.errors import InputError
from stages.security import check_secret, read_file
from stages.security_options import add_client_options, security_of
from stages.transport import is_loopback

if TYPE_CHECKING:
    from serving.client import AsyncClient, Client
    from stages.security import Tls

TOKEN_VARIABLE = "ONESWEEP_TOKEN"


class Who(TypedDict):
    """Settings of a client."""

    tls: Tls | None
    token: str
    insecure: bool


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="HOST:PORT", help="default: what is up here, else " + DEFAULT_ROUTER)
    add_client_options(parser)
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="FILE", help=f"holds the token (default: ${TOKEN_VARIABLE})")
    token.add_argument("--token", metavar="TOKEN", help="the token itself: others on this machine can see it")


def client_of(options: argparse.Namespace) -> Client:
    """A client of the router that the options name. Raises InputError."""
    from serving.client import Client

    address, who = _connection(options)
    return Client(address, **who)


def async_client_of(options: argparse.Namespace) -> AsyncClient:
    """Like `client_of`, where an event loop runs."""
    from serving.client import AsyncClient

    address, who = _connection(options)
    return AsyncClient(address, **who)


def _connection(options: argparse.Namespace) -> tuple[str, Who]:
    from serving.deployment import find_deployment, state_directory

    deployment = None if options.router else find_deployment(state_directory())
    topology = deployment.topology if deployment else None
    security = security_of(options, topology.client_tls if topology else None)
    address = options.router or (topology.router if topology else DEFAULT_ROUTER)
    token = _token(options) or token_for(address, security.tls)
    return address, {"tls": security.tls, "token": token, "insecure": security.insecure}


def token_for(address: str, tls: Tls | None = None) -> str:
    """The token of $ONESWEEP_TOKEN; empty where there is none, or where it would travel in plain text."""
    return os.environ.get(TOKEN_VARIABLE, "") if tls or is_loopback(address) else ""


def _token(options: argparse.Namespace) -> str:
    if options.token_file is None:
        return options.token or ""
    raw = read_file(options.token_file)
    check_secret(options.token_file)
    token = raw.decode(errors="replace").strip()
    if not token:
        raise InputError(f"{options.token_file} is empty: it must hold a token")
    return token

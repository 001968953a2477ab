"""Options of the commands that ask a router: where it is, whom to believe, and who asks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypedDict

from serving.topology import DEFAULT_ROUTER
from stages.security_options import add_client_options, security_of
from stages.token_options import add_token_options, token_of

if TYPE_CHECKING:
    from serving.client import AsyncClient, Client
    from stages.security import Tls


class Who(TypedDict):
    """Settings of a client."""

    tls: Tls | None
    token: str
    insecure: bool


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="HOST:PORT", help="default: what is up here, else " + DEFAULT_ROUTER)
    add_client_options(parser)
    add_token_options(parser)


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
    token = token_of(options, address, security.tls)
    return address, {"tls": security.tls, "token": token, "insecure": security.insecure}

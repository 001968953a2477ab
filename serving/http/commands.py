"""The command `http`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from serving.http.settings import DEFAULT_LISTEN, DEFAULT_TIMEOUT_S, HttpSettings
from stages.commands import add_drain_flag, check_positive
from stages.log import start_log
from stages.security import Tls
from stages.seeing import add_seeing, seeing_of
from stages.web import check_framework

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    http = subparsers.add_parser("http", help="an OpenAI-compatible API and a page, in front of a router")
    http.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"({DEFAULT_LISTEN})")
    http.add_argument("--router", metavar="HOST:PORT", help="default: what is up here, else 127.0.0.1:7700")
    http.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve https: certificate chain, PEM")
    http.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    http.add_argument("--tls-ca", type=Path, metavar="FILE", help="whose certificate of the router is believed")
    http.add_argument("--insecure", action="store_true", help="accept an address that others can reach, unencrypted")
    http.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name that this server is called by; repeat"
    )
    http.add_argument(
        "--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="of requests that name none (120)"
    )
    add_seeing(http, traces=False)
    add_drain_flag(http)
    http.set_defaults(run=run_http)


def run_http(options: argparse.Namespace) -> int:
    from serving.deployment import router_address

    check_framework("`onesweep http`")
    check_positive(options, "drain_s")
    from serving.http.server import serve

    seeing = seeing_of(options)
    settings = HttpSettings(
        options.listen,
        router_address(options.router),
        options.insecure,
        options.tls_cert,
        options.tls_key,
        tuple(options.allow_host),
        options.timeout_s,
        None if options.tls_ca is None else Tls(options.tls_ca),
        seeing,
        options.drain_s,
    )
    start_log(seeing.log_format, "http")
    serve(settings)
    return 0

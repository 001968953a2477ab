"""The command line: the front door, and the commands of serving."""

from __future__ import annotations

from onesweep.stages.settings import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the commands, in the order in which `onesweep --help` lists them."""
    from onesweep.serving.cli import admin, generate, serve
    from onesweep.serving.gateway.commands import register as register_http

    serve.register_servers(subparsers)
    generate.register_generate(subparsers)
    serve.register_doctor(subparsers)
    serve.register_up(subparsers)
    serve.register_deploy(subparsers)
    admin.register_certs(subparsers)
    admin.register_token(subparsers)
    admin.register_ngram(subparsers)
    serve.register_demo(subparsers)
    register_http(subparsers)

"""The command line: the front door, and the commands of serving."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def register(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands, in the order in which `onesweep --help` lists them."""
    from serving.cli.admin import register_certs, register_token
    from serving.cli.generate import register_generate
    from serving.cli.serve import register_demo, register_deploy, register_doctor, register_servers, register_up
    from serving.gateway.commands import register as register_http
    from serving.modes.drafters.ngram_command import register_ngram

    for add in (
        register_servers,
        register_generate,
        register_doctor,
        register_up,
        register_deploy,
        register_certs,
        register_token,
        register_ngram,
        register_demo,
        register_http,
    ):
        add(subparsers)

"""`onesweep token`: who may ask a router."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

DEFAULT_SCOPES = "generate,status"


def register_token(subparsers: Subparsers) -> None:
    token = subparsers.add_parser("token", help="tokens of those who may ask a router, or work for a coordinator")
    actions = token.add_subparsers(title="actions", metavar="ACTION", required=True)

    add = actions.add_parser("add", help="make a token, and print it once")
    add.add_argument("name", metavar="NAME")
    add.add_argument(
        "--scope", default=DEFAULT_SCOPES, metavar="S[,S]", help=f"generate, status, work, admin ({DEFAULT_SCOPES})"
    )
    add.add_argument("--rate", type=float, metavar="R", help="requests a second (any)")
    add.add_argument("--concurrent", type=int, metavar="N", help="requests at once (any)")
    add.add_argument("--bytes-per-day", type=int, metavar="B", help="bytes generated a day (any)")
    _add_file(add)
    add.set_defaults(run=run_add)

    show = actions.add_parser("list", help="who has one, and what each may do")
    _add_file(show)
    show.set_defaults(run=run_list)

    remove = actions.add_parser("remove", help="take it back: it is forgotten at the next request")
    remove.add_argument("name", metavar="NAME")
    _add_file(remove)
    remove.set_defaults(run=run_remove)


def run_add(options: argparse.Namespace) -> int:
    from stages.private_files import lock_beside
    from stages.tokens import Key, new_token, read_tokens, token_hash, write_tokens

    scopes = tuple(dict.fromkeys(part.strip() for part in options.scope.split(",") if part.strip()))
    key = Key(options.name, "", scopes, options.rate, options.concurrent, options.bytes_per_day)
    token = new_token()
    with lock_beside(options.tokens):
        keys = read_tokens(options.tokens) if options.tokens.exists() else ()
        if any(other.name == key.name for other in keys):
            raise InputError(f"{options.tokens} has a key {key.name} already: remove it first, or take another name")
        write_tokens(options.tokens, [*keys, replace(key, sha256=token_hash(token))])
    print(token)
    return 0


def run_list(options: argparse.Namespace) -> int:
    from stages.tokens import read_tokens

    for key in read_tokens(options.tokens):
        limits = [
            f"{key.rate:g} a second" if key.rate else "",
            f"{key.concurrent} at once" if key.concurrent else "",
            f"{key.bytes_per_day} bytes a day" if key.bytes_per_day else "",
        ]
        said = ", ".join(limit for limit in limits if limit) or "no limits"
        print(f"{key.name:16} {','.join(key.scopes):24} {said}")
    return 0


def run_remove(options: argparse.Namespace) -> int:
    from stages.private_files import lock_beside
    from stages.tokens import read_tokens, write_tokens

    with lock_beside(options.tokens):
        keys = read_tokens(options.tokens)
        left = [key for key in keys if key.name != options.name]
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise InputError(f"{options.tokens} has no key {options.name!r}; there are: {names}")
        write_tokens(options.tokens, left)
    print(f"removed {options.name}; {len(left)} left")
    return 0


def _add_file(parser: argparse.ArgumentParser) -> None:
    what = "what `onesweep router` or `onesweep coordinate` is given"
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help=what)

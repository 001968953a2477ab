"""Commands on files: `certs` makes certificates and keys, `sign` signatures, `token` tokens."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError, OnesweepError, file_errors
from stages.progress import counted
from stages.wire.auth import CLIENT, HOST, ROUTER, Identity
from stages.wire.secret_files import file_lock, write_file
from stages.wire.tokens import Key, new_token, read_tokens, token_hash, write_tokens

if TYPE_CHECKING:
    from stages.wire.certificates import Leaf

AUTHORITY_DAYS, LEAF_DAYS = 5 * 365, 30
SIGNER = "signer"  # signs releases with a key, and has no certificate


def add_certs_init(init: argparse.ArgumentParser) -> None:
    _add_common(init, AUTHORITY_DAYS)
    init.add_argument("--force", action="store_true", help="replace an existing one")


def add_certs_issue(action: argparse.ArgumentParser) -> None:
    roles = (HOST, ROUTER, CLIENT, SIGNER)
    action.add_argument("role", metavar="ROLE", choices=roles, help=f"one of {', '.join(roles)}")
    action.add_argument("name", metavar="NAME")
    _add_common(action, LEAF_DAYS)
    action.add_argument("--address", action="append", default=[], metavar="HOST", help="IP or name to connect to")
    action.add_argument("--force", action="store_true", help="replace an existing one, with a new key")


def add_certs_renew(renew: argparse.ArgumentParser) -> None:
    renew.add_argument("names", metavar="NAME", nargs="*", help="default: all in --dir")
    _add_common(renew, LEAF_DAYS)


def run_certs_init(options: argparse.Namespace) -> int:
    from stages.wire.certificates import Authority, expiry

    authority = Authority.create(options.dir, options.days, options.force)
    print(f"{options.dir / 'ca.pem'}: {expiry(authority.until)}; copy it to every machine")
    print(f"{options.dir / 'ca.key'}: signs certificates; keep it on this machine only")
    return 0


def run_certs_issue(options: argparse.Namespace) -> int:
    from stages.wire.certificates import Authority, make_signer

    if options.role == SIGNER:
        public = make_signer(options.dir, options.name, options.force)
        print(f"{public.with_suffix('.key')}: signs releases (`onesweep sign`); keep it on this machine only")
        print(f"{public}: its public key; add it to the `signers` file of routers and hosts")
        return 0
    leaf = Authority.open(options.dir).issue(
        Identity(options.role, options.name), options.address, options.days, options.force
    )
    _print_leaf(leaf)
    print(f"{leaf.path.with_suffix('.key')}: its key; copy both, and ca.pem, to where {options.name} runs")
    return 0


def run_certs_renew(options: argparse.Namespace) -> int:
    from stages.wire.certificates import Authority, expiry

    authority = Authority.open(options.dir)
    names = options.names or authority.names()
    if not names:
        raise InputError(f"nothing to renew in {options.dir}")
    failed = 0
    for name in names:
        try:
            _print_leaf(authority.renew(name, options.days))
        except OnesweepError as error:
            if len(names) == 1:
                raise
            print(f"{name}: not renewed: {error}")
            failed += 1
    print(f"authority: {expiry(authority.until)}")
    return 1 if failed else 0


def add_sign(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "checkpoint", type=Path, metavar="DIR", help="bundle or checkpoint that `onesweep deploy` sends"
    )
    action.add_argument("--key", type=Path, required=True, metavar="FILE", help="key of `onesweep certs issue signer`")


def run_sign(options: argparse.Namespace) -> int:
    from stages.checkpoint.release_store import MAX_SIGNATURES, read_release_manifest, write_signatures
    from stages.wire.certificates import is_signed, sign

    release = read_release_manifest(options.checkpoint)
    key, signature = sign(release.signed, options.key)
    # Drop signatures of an earlier state of the files; keep those of other keys, so that keys can change one by one.
    others = [pair for pair in release.signatures if pair[0] != key and is_signed(release.signed, [pair])]
    signatures = [*others, (key, signature)][-MAX_SIGNATURES:]
    with file_errors(InputError, f"cannot write signatures into {options.checkpoint}"):
        write_signatures(options.checkpoint, signatures)
    print(f"release {release.name}, {counted(len(signatures), 'signature')}")
    return 0


def _print_leaf(leaf: Leaf) -> None:
    from stages.wire.certificates import expiry

    addresses = f" at {', '.join(leaf.addresses)}" if leaf.addresses else ""
    print(f"{leaf.path}: {leaf.identity.role} {leaf.identity.name}{addresses}, {expiry(leaf.until)}")


def _add_common(parser: argparse.ArgumentParser, days: int) -> None:
    parser.add_argument("--dir", type=Path, default=Path("certs"), metavar="DIR", help="certificate directory (certs)")
    parser.add_argument("--days", type=int, default=days, metavar="N", help=f"days until it expires ({days})")


# `onesweep token`: the keys that may use a router.

DEFAULT_SCOPES = "generate,status"


def add_token_add(add: argparse.ArgumentParser) -> None:
    add.add_argument("name", metavar="NAME")
    add.add_argument(
        "--scope", default=DEFAULT_SCOPES, metavar="S[,S]", help=f"generate, status, work, admin ({DEFAULT_SCOPES})"
    )
    add.add_argument("--rate", type=float, metavar="R", help="requests per second (unlimited)")
    add.add_argument("--concurrent", type=int, metavar="N", help="concurrent requests (unlimited)")
    add.add_argument("--bytes-per-day", type=int, metavar="B", help="bytes of prompts and texts per day (unlimited)")
    add.add_argument("--out", type=Path, metavar="FILE", help="private file for the token (prints it)")
    add_token_list(add)


def add_token_remove(remove: argparse.ArgumentParser) -> None:
    remove.add_argument("name", metavar="NAME")
    add_token_list(remove)


def run_token_add(options: argparse.Namespace) -> int:
    scopes = tuple(dict.fromkeys(part.strip() for part in options.scope.split(",") if part.strip()))
    key = Key(options.name, "", scopes, options.rate, options.concurrent, options.bytes_per_day)
    token = new_token()
    with file_lock(options.tokens):
        keys = read_tokens(options.tokens) if options.tokens.exists() else ()
        if any(other.name == key.name for other in keys):
            raise InputError(f"{options.tokens} already has a key {key.name}: remove it first, or choose another name")
        if options.out is not None:
            if options.out.exists():
                raise InputError(f"{options.out} already exists: name another file, or remove it")
            write_file(options.out, f"{token}\n".encode())
        write_tokens(options.tokens, [*keys, replace(key, sha256=token_hash(token))])
    if options.out is None:
        print(token)
        return 0
    print(f"{options.out}: the token of {options.name}; pass it to commands with --token-file {options.out}")
    return 0


def run_token_list(options: argparse.Namespace) -> int:
    for key in read_tokens(options.tokens):
        limits = [
            f"{key.rate:g} requests/s" if key.rate else "",
            f"{key.concurrent} concurrent" if key.concurrent else "",
            f"{key.bytes_per_day} bytes/day" if key.bytes_per_day else "",
        ]
        shown = ", ".join(limit for limit in limits if limit) or "no limits"
        print(f"{key.name:16} {','.join(key.scopes):24} {shown}")
    return 0


def run_token_remove(options: argparse.Namespace) -> int:
    with file_lock(options.tokens):
        keys = read_tokens(options.tokens)
        left = [key for key in keys if key.name != options.name]
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise InputError(f"{options.tokens} has no key {options.name!r}; it has: {names}")
        write_tokens(options.tokens, left)
    print(f"removed {options.name}; {len(left)} left")
    return 0


def add_token_list(parser: argparse.ArgumentParser) -> None:
    what = "token file of a router or coordinator"
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help=what)

"""`onesweep certs`: an authority, and the certificates that it gives."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError, OnesweepError
from stages.identity import CLIENT, HOST, ROUTER, Identity

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from serving.certs import Leaf

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

DEFAULT_DIRECTORY = Path("certs")
AUTHORITY_DAYS, LEAF_DAYS = 5 * 365, 30


def register_certs(subparsers: Subparsers) -> None:
    certs = subparsers.add_parser(
        "certs", help="certificates of hosts, routers and clients, from an authority of yours"
    )
    actions = certs.add_subparsers(title="actions", metavar="ACTION", required=True)

    init = actions.add_parser("init", help="make the authority")
    _add_common(init, AUTHORITY_DAYS)
    init.add_argument("--domain", action="append", default=[], metavar="D", help="certify names in D only (any)")
    init.add_argument("--force", action="store_true", help="replace the one that is there")
    init.set_defaults(run=run_init)

    for role, default in ((HOST, None), (ROUTER, ROUTER), (CLIENT, None)):
        action = actions.add_parser(role, help=f"make the certificate of a {role}")
        action.add_argument("name", metavar="NAME", nargs="?" if default else None, default=default)
        _add_common(action, LEAF_DAYS)
        action.add_argument(
            "--address", action="append", default=[], metavar="HOST", help="IP address or name that others dial"
        )
        action.add_argument("--force", action="store_true", help="replace the one that is there, with a new key")
        action.set_defaults(run=run_issue, role=role)

    renew = actions.add_parser("renew", help="certificates for another while, with the same keys and addresses")
    renew.add_argument("names", metavar="NAME", nargs="*", help="default: all that are there")
    _add_common(renew, LEAF_DAYS)
    renew.set_defaults(run=run_renew)


def run_init(options: argparse.Namespace) -> int:
    _check_installed()
    from serving.certs import Authority, expiry

    authority = Authority.create(options.dir, options.days, options.domain, options.force)
    print(f"{options.dir / 'ca.pem'}: {expiry(authority.until)}; give it to everybody")
    print(f"{options.dir / 'ca.key'}: signs certificates; keep it here, and nowhere else")
    return 0


def run_issue(options: argparse.Namespace) -> int:
    _check_installed()
    from serving.certs import Authority

    authority = Authority.open(options.dir)
    identity = Identity(options.role, options.name)
    leaf = authority.issue(identity, options.address, options.days, options.force)
    _print_leaf(leaf)
    print(f"{leaf.path.with_suffix('.key')}: its key; take both, and ca.pem, to where {options.name} runs")
    return 0


def run_renew(options: argparse.Namespace) -> int:
    _check_installed()
    from serving.certs import Authority, expiry

    authority = Authority.open(options.dir)
    names = options.names or authority.names()
    if not names:
        raise InputError(f"there is nothing to renew in {options.dir}")
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


def _print_leaf(leaf: Leaf) -> None:
    from serving.certs import expiry

    addresses = f" at {', '.join(leaf.addresses)}" if leaf.addresses else ""
    print(f"{leaf.path}: {leaf.identity.role} {leaf.identity.name}{addresses}, {expiry(leaf.until)}")


def _add_common(parser: argparse.ArgumentParser, days: int) -> None:
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="where they are (certs)")
    parser.add_argument("--days", type=int, default=days, metavar="N", help=f"how long it is valid ({days})")


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise InputError("`onesweep certs` needs cryptography: pip install 'onesweep[tls]'") from None

"""Commands on files: `certs` certificates and keys, `sign` signatures, `token` tokens, `receipt`, `ngram` a drafter."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from onesweep.stages.errors import CheckpointError, InputError, OnesweepError, ServiceError, printable
from onesweep.stages.wire.auth import CLIENT, HOST, ROUTER, Identity
from onesweep.stages.wire.flags import add_token_options
from onesweep.stages.wire.secret_files import read_file

if TYPE_CHECKING:
    from onesweep.serving.v1 import router_pb2
    from onesweep.stages.v1 import stage_pb2
    from onesweep.stages.wire.certificates import Leaf

DEFAULT_DIRECTORY = Path("certs")
AUTHORITY_DAYS, LEAF_DAYS = 5 * 365, 30


def add_certs_init(init: argparse.ArgumentParser) -> None:
    _add_common(init, AUTHORITY_DAYS)
    init.add_argument("--domain", action="append", default=[], metavar="D", help="certify names in D only (any)")
    init.add_argument("--force", action="store_true", help="replace the one that is there")


def _add_issue(action: argparse.ArgumentParser, default: str | None = None) -> None:
    action.add_argument("name", metavar="NAME", nargs="?" if default else None, default=default)
    _add_common(action, LEAF_DAYS)
    action.add_argument(
        "--address", action="append", default=[], metavar="HOST", help="IP address or name that others dial"
    )
    action.add_argument("--force", action="store_true", help="replace the one that is there, with a new key")


add_certs_host = add_certs_client = _add_issue
add_certs_router = partial(_add_issue, default=ROUTER)


def add_certs_renew(renew: argparse.ArgumentParser) -> None:
    renew.add_argument("names", metavar="NAME", nargs="*", help="default: all that are there")
    _add_common(renew, LEAF_DAYS)


def run_certs_init(options: argparse.Namespace) -> int:
    _check_installed()
    from onesweep.stages.wire.certificates import Authority, expiry

    authority = Authority.create(options.dir, options.days, options.domain, options.force)
    print(f"{options.dir / 'ca.pem'}: {expiry(authority.until)}; give it to everybody")
    print(f"{options.dir / 'ca.key'}: signs certificates; keep it here, and nowhere else")
    return 0


def _issue(role: str, options: argparse.Namespace) -> int:
    _check_installed()
    from onesweep.stages.wire.certificates import Authority

    authority = Authority.open(options.dir)
    identity = Identity(role, options.name)
    leaf = authority.issue(identity, options.address, options.days, options.force)
    _print_leaf(leaf)
    print(f"{leaf.path.with_suffix('.key')}: its key; take both, and ca.pem, to where {options.name} runs")
    return 0


run_certs_host, run_certs_router, run_certs_client = (partial(_issue, role) for role in (HOST, ROUTER, CLIENT))


def run_certs_renew(options: argparse.Namespace) -> int:
    _check_installed()
    from onesweep.stages.wire.certificates import Authority, expiry

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


def add_certs_signer(action: argparse.ArgumentParser) -> None:
    action.add_argument("name", metavar="NAME")
    action.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="where it goes (certs)")
    action.add_argument("--force", action="store_true", help="replace the one that is there")


def run_certs_signer(options: argparse.Namespace) -> int:
    _check_installed()
    from onesweep.stages.wire.certificates import make_signer

    public = make_signer(options.dir, options.name, options.force)
    print(f"{public.with_suffix('.key')}: signs releases (`onesweep sign`); keep it here, and nowhere else")
    print(f"{public}: its public key; add it to the file that routers and hosts have as --signers")
    return 0


def add_sign(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "checkpoint", type=Path, metavar="DIR", help="bundle or checkpoint, as `onesweep deploy` sends it"
    )
    action.add_argument("--key", type=Path, required=True, metavar="FILE", help="a key of `onesweep certs signer`")


def run_sign(options: argparse.Namespace) -> int:
    _check_installed()
    from onesweep.stages.checkpoint.release_store import MOST_SIGNATURES, read_release_manifest, write_signatures
    from onesweep.stages.wire.certificates import is_signed, sign

    release = read_release_manifest(options.checkpoint)
    key, signature = sign(release.signed, options.key)
    # Those of an earlier state of the files go; those of other keys stay, so that keys can change one by one.
    others = [pair for pair in release.signatures if pair[0] != key and is_signed(release.signed, [pair])]
    try:
        write_signatures(options.checkpoint, [*others, (key, signature)][-MOST_SIGNATURES:])
    except OSError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from None
    print(f"release {release.name}, {len(others) + 1} signatures")
    return 0


def _print_leaf(leaf: Leaf) -> None:
    from onesweep.stages.wire.certificates import expiry

    addresses = f" at {', '.join(leaf.addresses)}" if leaf.addresses else ""
    print(f"{leaf.path}: {leaf.identity.role} {leaf.identity.name}{addresses}, {expiry(leaf.until)}")


def _add_common(parser: argparse.ArgumentParser, days: int) -> None:
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="where they are (certs)")
    parser.add_argument("--days", type=int, default=days, metavar="N", help=f"how long it is valid ({days})")


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise InputError("this command needs cryptography: pip install 'onesweep[tls]'") from None


# `onesweep receipt`: what hosts signed of a text.

# Their steps depend on how long links took: the same text comes by other states.
ADAPTIVE = ("ar-speculative", "verified")


def add_receipt_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--ca", type=Path, required=True, metavar="FILE", help="authority of the hosts' certificates")
    check.add_argument("--against", metavar="HOST:PORT", help="a router of that authority, to run the request again")
    add_token_options(check)


def run_receipt_check(options: argparse.Namespace) -> int:
    _check_installed()
    from google.protobuf.json_format import Parse, ParseError
    from google.protobuf.message import DecodeError

    from onesweep.serving.v1 import router_pb2

    try:
        receipt = Parse(read_file(options.file), router_pb2.Receipt())
        claim = router_pb2.Claim.FromString(receipt.claim)
    except (ParseError, DecodeError, ValueError, RecursionError):
        raise InputError(f"{options.file} is no receipt: `onesweep generate --receipt FILE` writes one") from None
    signed, asked = _signed(receipt, options.ca), claim.request
    print(printable(f"{claim.mode}, seed {asked.seed}, {asked.prompt.decode(errors='replace')!r}"))
    for each in signed:
        print(printable(f"{each.host}: blocks {', '.join(map(str, each.blocks))} of {each.digest[:12]}"))
    print(f"{len(receipt.text)} bytes: signed by all hosts, and each received what the one before it sent")
    if options.against:
        print(printable(_asked_again(receipt.text, claim, signed, options)))
    return 0


def _signed(receipt: router_pb2.Receipt, authorities: Path) -> list[stage_pb2.Stated]:
    """The hosts' statements, in the order of a session's path. Raises ServiceError where they do not fit together."""
    from onesweep.serving.v1 import router_pb2
    from onesweep.stages.wire.certificates import checked_statement

    if hashlib.sha256(receipt.text).digest() != router_pb2.Claim.FromString(receipt.claim).text:
        raise ServiceError("the text is not the one that the hosts signed")
    if receipt.missing or not receipt.statements:
        raise ServiceError(printable("; ".join(receipt.missing)) or "no host signed anything")
    signed, claim = [checked_statement(each, authorities) for each in receipt.statements], hashlib.sha256(receipt.claim)
    signed.sort(key=lambda each: (each.session, each.place))
    for _, session in groupby(signed, lambda each: each.session):
        first, *others = chain = list(session)
        blocks = sorted(block for each in chain for block in each.blocks)
        if {each.claim for each in chain} != {claim.digest()}:
            raise ServiceError("the hosts signed this for another request or text")
        if {(each.digest, each.step, each.parts) for each in others} - {(first.digest, first.step, first.parts)}:
            raise ServiceError("the hosts signed different weights or steps")
        whole = [first.parts, *blocks] == [len(blocks), *range(len(blocks))] and not first.place
        if not whole or len({each.host for each in chain}) < len(chain):
            raise ServiceError("not every host of the path signed, once and for all blocks of the model")
        for one, after in pairwise(chain):
            if one.sent != after.received or one.place + 1 != after.place:
                said = f"what host {one.host} signed that it sent is not what host {after.host} signed that it received"
                raise ServiceError(f"{said}: one of them is faulty")
    return signed


def _asked_again(
    text: bytes, claim: router_pb2.Claim, signed: list[stage_pb2.Stated], options: argparse.Namespace
) -> str:
    """A sentence about a second run, by other hosts. Raises OnesweepError where its text, or its states, are others."""
    from onesweep.serving.client.client import Client
    from onesweep.stages.wire.tls import Tls
    from onesweep.stages.wire.tokens import token_of

    if "," in claim.mode:
        raise InputError(f"mode auto went from one mode to another ({claim.mode}): no run is alike")
    tls, claim.request.mode = Tls(options.ca), claim.mode
    claim.request.ClearField("budget_ms")
    with Client(options.against, tls=tls, token=token_of(options, options.against, tls)) as client:
        result = client.repeat(claim.request)
    if result.output != text or result.receipt is None:
        raise ServiceError("run again, the request gives another text: weights differ, or a host or router is faulty")
    again = _signed(result.receipt, options.ca)
    names = sorted({each.host for each in signed} & {each.host for each in again})
    same = f"; {', '.join(names)} had a part in both" if names else ""
    if [(each.received, each.sent) for each in signed] == [(each.received, each.sent) for each in again]:
        return f"run again: the same text by the same states{same}"
    places = [[(each.machine, *each.blocks, each.step) for each in run] for run in (signed, again)]
    if places[0] == places[1] and not (claim.replays or result.replays) and claim.mode not in ADAPTIVE:
        raise ServiceError("run again, the text is the same, and the states are not: a host computes otherwise")
    return f"run again: the same text; its states cannot be compared, on other machines, cuts or steps{same}"


# `onesweep token`: who may ask a router.

DEFAULT_SCOPES = "generate,status"


def add_token_add(add: argparse.ArgumentParser) -> None:
    add.add_argument("name", metavar="NAME")
    add.add_argument(
        "--scope", default=DEFAULT_SCOPES, metavar="S[,S]", help=f"generate, status, work, admin ({DEFAULT_SCOPES})"
    )
    add.add_argument("--rate", type=float, metavar="R", help="requests a second (any)")
    add.add_argument("--concurrent", type=int, metavar="N", help="requests at once (any)")
    add.add_argument("--bytes-per-day", type=int, metavar="B", help="bytes generated a day (any)")
    _add_file(add)


def add_token_list(show: argparse.ArgumentParser) -> None:
    _add_file(show)


def add_token_remove(remove: argparse.ArgumentParser) -> None:
    remove.add_argument("name", metavar="NAME")
    _add_file(remove)


def run_token_add(options: argparse.Namespace) -> int:
    from onesweep.stages.wire.secret_files import lock_beside
    from onesweep.stages.wire.tokens import Key, new_token, read_tokens, token_hash, write_tokens

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


def run_token_list(options: argparse.Namespace) -> int:
    from onesweep.stages.wire.tokens import read_tokens

    for key in read_tokens(options.tokens):
        limits = [
            f"{key.rate:g} a second" if key.rate else "",
            f"{key.concurrent} at once" if key.concurrent else "",
            f"{key.bytes_per_day} bytes a day" if key.bytes_per_day else "",
        ]
        said = ", ".join(limit for limit in limits if limit) or "no limits"
        print(f"{key.name:16} {','.join(key.scopes):24} {said}")
    return 0


def run_token_remove(options: argparse.Namespace) -> int:
    from onesweep.stages.wire.secret_files import lock_beside
    from onesweep.stages.wire.tokens import read_tokens, write_tokens

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
    what = "what `onesweep router` or `onesweep train coordinate` is given"
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help=what)


# `onesweep ngram`: a drafter fitted to a user's text.

TOKEN_ORDER, BYTE_ORDER = 4, 6
HELD_OUT_SHARE = 20
# Symbols at the text's end that are not fitted to: a twentieth, at most so many.
MAX_HELD_OUT = 20_000


def add_ngram(ngram: argparse.ArgumentParser) -> None:
    ngram.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="gets DIR/ngram.safetensors")
    ngram.add_argument(
        "--text", type=Path, nargs="+", action="extend", required=True, metavar="FILE", help="UTF-8 text to fit it to"
    )
    ngram.add_argument(
        "--order",
        type=int,
        metavar="N",
        help=f"symbols of the longest n-gram ({TOKEN_ORDER} tokens, {BYTE_ORDER} bytes)",
    )


def run_ngram(options: argparse.Namespace) -> int:
    from onesweep.serving.modes.drafters.ngram import NgramModel, fit, symbols_of, write_ngrams
    from onesweep.serving.modes.tokenizer import BYTE_TOKENIZER, read_tokenizers, tokenizer_id
    from onesweep.stages.checkpoint.bundle import NGRAM_NAME, find_bundle
    from onesweep.stages.checkpoint.manifest import read_manifest

    bundle = find_bundle(options.checkpoint)
    model = bundle.ar or bundle.scorer
    if model is None:
        raise CheckpointError(f"{options.checkpoint} has no pipeline (ar/ or scorer/) that a drafter could guess for")
    manifest = read_manifest(model)
    tokenizer = read_tokenizers(options.checkpoint).named(manifest.digest())
    order = options.order or (BYTE_ORDER if tokenizer is BYTE_TOKENIZER else TOKEN_ORDER)
    symbols = symbols_of(options.text, tokenizer)
    held_out = min(len(symbols) // HELD_OUT_SHARE, MAX_HELD_OUT)
    if not held_out:
        raise InputError(f"{len(symbols)} {tokenizer.noun} are too few to fit an n-gram model to: give more text")
    ngrams = fit(symbols[:-held_out], tokenizer.alphabet.size, order, tokenizer_id(manifest))
    nats = NgramModel(ngrams).cross_entropy(symbols[-held_out:].tolist())
    path = options.checkpoint / NGRAM_NAME
    write_ngrams(path, ngrams)
    said = f"{ngrams.count} n-grams of up to {order} {tokenizer.noun} from {len(symbols) - held_out}"
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    print(f"{path}: {said}, {size}; {nats:.2f} nats for each of the last {held_out}, which it was not fitted to")
    return 0

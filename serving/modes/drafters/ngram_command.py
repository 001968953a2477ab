"""`onesweep ngram`: a drafter fitted to a user's text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

TOKEN_ORDER, BYTE_ORDER = 4, 6
HELD_OUT_SHARE = 20
# Symbols at the text's end that are not fitted to: a twentieth, at most so many.
MAX_HELD_OUT = 20_000


def register_ngram(subparsers: Subparsers) -> None:
    ngram = subparsers.add_parser("ngram", help="fit a drafter of n-grams to your text, for a checkpoint's symbols")
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
    ngram.set_defaults(run=run_ngram)


def run_ngram(options: argparse.Namespace) -> int:
    from serving.modes.drafters.ngram import NgramModel, fit, symbols_of, write_ngrams
    from serving.modes.tokenizer import BYTE_TOKENIZER, read_tokenizers, tokenizer_id
    from stages.checkpoint.bundle import NGRAM_NAME, find_bundle
    from stages.checkpoint.manifest import read_manifest

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

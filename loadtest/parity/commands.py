"""The command `bench parity`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_parity(benches: Subparsers) -> None:
    parity = benches.add_parser(
        "parity",
        help="an imported model over hosts against transformers in one process",
        description="Greedy texts of an imported model over hosts on loopback, and its logits, against transformers.",
    )
    parity.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="what was imported")
    parity.add_argument("--source", type=Path, required=True, metavar="SOURCE", help="what it was imported from")
    parity.add_argument("--prompts", type=int, default=20, metavar="N", help="prompts (20)")
    parity.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to generate (64)")
    parity.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parity.set_defaults(run=run_parity)


def run_parity(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from loadtest.parity.run import ParitySettings, measure_parity, parity_record, parity_sentence
    from serving.deployment import ends_cleanly

    if options.json:
        check_destination(options.json)
    settings = ParitySettings(options.checkpoint.resolve(), options.source, options.prompts, options.tokens)
    with ends_cleanly():
        figures = measure_parity(settings, lambda text: print(text, flush=True))
    print(parity_sentence(figures))
    if options.json:
        write_json(options.json, parity_record(settings, figures))
    return 0 if all(f.holds for f in figures) else 1

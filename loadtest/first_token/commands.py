"""The command `bench first-token`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_first_token(benches: Subparsers) -> None:
    first = benches.add_parser("first-token", help="a long prompt over far links: in pieces, and in one hop")
    first.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="with an AR model")
    first.add_argument("--profile", default="links-60", metavar="P", help="network (links-60)")
    first.add_argument("--prompt-tokens", type=int, default=1000, metavar="N", help="bytes for models of bytes (1000)")
    first.add_argument("--text", type=Path, metavar="FILE", help="where the prompt is from (text that Python brings)")
    first.add_argument("--requests", type=int, default=5, metavar="R", help="of each arm (5)")
    first.add_argument("--codec", default="fp32,int8", metavar="C[,C]", help="of hidden states (fp32,int8)")
    first.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    first.set_defaults(run=run_first_token)


def run_first_token(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from loadtest.first_token.bench import first_token_record, first_token_table, measure_first_token
    from loadtest.first_token.settings import FirstTokenSettings, prompt_for
    from loadtest.wan.profile import profile_named
    from serving.deployment import ends_cleanly

    settings = FirstTokenSettings(
        profile_named(options.profile),
        options.checkpoint.resolve(),
        options.prompt_tokens,
        options.text,
        options.requests,
        tuple(dict.fromkeys(options.codec.split(","))),
    )
    if options.json:
        check_destination(options.json)
    prompt, alphabet = prompt_for(settings)
    with ends_cleanly():
        rows = measure_first_token(settings, prompt, alphabet, lambda text: print(text, flush=True))
    print(first_token_table(rows))
    if options.json:
        write_json(options.json, first_token_record(settings, rows, shlex.join(["onesweep", *sys.argv[1:]])))
    return 0 if not any(row["failed"] for row in rows) else 1

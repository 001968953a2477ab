"""The command `bench wan`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import OnesweepError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_wan(benches: Subparsers) -> None:
    from serving.shipped import SHIPPED

    wan = benches.add_parser(
        "wan",
        help="every mode over emulated far links, against a computed floor",
        description="Latency of every mode over emulated far links, held against what the links and hosts must take.",
    )
    wan.add_argument("--profile", required=True, metavar="P[,P]", help="networks, such as links-60; loopback: no lab")
    wan.add_argument("--profiles", type=Path, metavar="FILE", help="a file with more profiles")
    wan.add_argument(
        "--modes",
        default="sweep,chunked,ar,ar-speculative",
        metavar="M[,M]",
        help="with settings after a colon: sweep:fp32, ar-speculative:lookup+int8, resample:ngram "
        "(sweep,chunked,ar,ar-speculative)",
    )
    lengths = wan.add_mutually_exclusive_group()
    lengths.add_argument("--bytes", default="32,128", metavar="N[,N]", help="bytes to generate (32,128)")
    lengths.add_argument("--tokens", metavar="N[,N]", help="tokens to generate, in place of --bytes")
    wan.add_argument("--text", default="", metavar="T[,T]", help="prompts: novel, copying (novel)")
    wan.add_argument(
        "--prompt",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="prompts of your own, one a file",
    )
    wan.add_argument("--temperature", type=float, metavar="T", help="of every request (the router's default)")
    wan.add_argument("--requests", type=int, default=10, metavar="R", help="turns of each arm (10)")
    wan.add_argument("--at-once", type=int, default=1, metavar="N", help="requests in a turn (1)")
    wan.add_argument("--seed", type=int, default=0, metavar="S", help="of the first request (0)")
    wan.add_argument("--hosts", type=int, metavar="N", help="hosts that share the blocks (3)")
    wan.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    wan.add_argument("--backend", default="torch", metavar="B", help="what the hosts compute with (torch)")
    wan.add_argument("--idle-s", type=float, default=0.0, metavar="S", help="measure after idle seconds, too (0: no)")
    wan.add_argument("--no-control", action="store_true", help="do not hold the lab against plain loopback")
    wan.add_argument("--ablate", action="store_true", help="what each measure is worth, on the first profile")
    wan.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    wan.add_argument("--html", type=Path, metavar="FILE", help="write a report with pictures there")
    wan.set_defaults(run=run_wan)


def run_wan(options: argparse.Namespace) -> int:
    from loadtest.destination import write_json
    from loadtest.wan_bench.ablation import ablation_table
    from loadtest.wan_bench.arms import BYTES, TOKENS, parse_choices, parse_lengths, parse_names
    from loadtest.wan_bench.bench import measure_wan, wan_record
    from loadtest.wan_bench.links import links_table
    from loadtest.wan_bench.prompts import parse_prompts
    from loadtest.wan_bench.report import report
    from loadtest.wan_bench.rows import wan_table
    from loadtest.wan_bench.settings import WanSettings, check_settings
    from serving.deployment import ends_cleanly
    from serving.modes import MODES

    settings = WanSettings(
        parse_names(options.profile),
        parse_choices(options.modes, MODES),
        parse_lengths(options.tokens, TOKENS) if options.tokens else parse_lengths(options.bytes, BYTES),
        options.checkpoint.resolve(),
        options.requests,
        options.seed,
        options.profiles,
        options.hosts,
        options.idle_s,
        options.ablate,
        parse_prompts(options.text, options.prompt),
        options.temperature,
        options.at_once,
        control=not options.no_control,
        backend=options.backend,
    )
    _check_files(options)
    profiles = check_settings(settings)
    with ends_cleanly():
        figures = measure_wan(settings, profiles, lambda text: print(text, flush=True))
    print(wan_table(figures.rows))
    if figures.ablation:
        print("\nwhat each measure is worth:\n" + ablation_table(figures.ablation))
    if figures.links:
        print("\nthe lab's links, plain sockets:\n" + links_table(figures.links))
    if figures.control:
        print("\nthe lab against plain loopback:\n" + wan_table(figures.control))
    record = wan_record(settings, figures, shlex.join(["onesweep", *sys.argv[1:]]))
    if options.json:
        write_json(options.json, record)
    if options.html:
        try:
            options.html.write_text(report(record), encoding="utf-8")
        except OSError as error:
            raise OnesweepError(f"cannot write {options.html}: {error.strerror}") from None
    return 0 if not any(row["failures"] for row in figures.rows) else 1


def _check_files(options: argparse.Namespace) -> None:
    """Raises InputError before anything is measured for a file that could not be written after it."""
    from loadtest.destination import check_destination
    from loadtest.wan_bench.pictures import check_plotting

    if options.json:
        check_destination(options.json)
    if options.html:
        check_plotting()
        check_destination(options.html, "--html")

"""The commands `bench wan`, `bench warm` and `bench first-token`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.report.record import add_report_options, check_report_options, write_report

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_latency(benches: Subparsers) -> None:
    _register_wan(benches)
    _register_warm(benches)
    _register_first_token(benches)


def _register_wan(benches: Subparsers) -> None:
    from serving.cli.deployment import SHIPPED

    wan = benches.add_parser(
        "wan",
        help="every mode over emulated far links, against a computed floor",
        description="Latency of every mode over emulated far links, compared with the least time that the links and "
        "hosts allow.",
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
    wan.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the first request (0)")
    wan.add_argument("--hosts", type=int, metavar="N", help="hosts that share the blocks (3)")
    wan.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    wan.add_argument("--backend", default="torch", metavar="B", help="backend of the hosts (torch)")
    wan.add_argument("--idle-s", type=float, default=0.0, metavar="S", help="also measure after idle seconds (0: no)")
    wan.add_argument("--no-control", action="store_true", help="do not compare the lab with plain loopback")
    add_report_options(wan, html=True)
    wan.set_defaults(run=run_wan)


def _register_warm(benches: Subparsers) -> None:
    from serving.cli.deployment import SHIPPED

    warm = benches.add_parser("warm", help="first requests: after the start, a pause, a reconnect")
    warm.add_argument("--profile", default="links-60", metavar="P", help="network (links-60)")
    warm.add_argument("--modes", default="sweep,ar", metavar="M[,M]", help="as in bench wan (sweep,ar)")
    warm.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    warm.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    warm.add_argument("--rounds", type=int, default=5, metavar="R", help="deployments started (5)")
    warm.add_argument("--idle-s", type=float, default=5.0, metavar="S", help="length of the pause (5)")
    warm.add_argument("--no-keep-warm", action="store_true", help="without the messages that keep idle links warm")
    add_report_options(warm)
    warm.set_defaults(run=run_warm)


def _register_first_token(benches: Subparsers) -> None:
    first = benches.add_parser("first-token", help="a long prompt over far links: in pieces, and in one hop")
    first.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="with an AR model")
    first.add_argument("--profile", default="links-60", metavar="P", help="network (links-60)")
    first.add_argument("--prompt-tokens", type=int, default=1000, metavar="N", help="bytes for models of bytes (1000)")
    first.add_argument("--text", type=Path, metavar="FILE", help="source of the prompt (text that ships with Python)")
    first.add_argument("--requests", type=int, default=5, metavar="R", help="requests of each arm (5)")
    first.add_argument("--codec", default="fp32,int8", metavar="C[,C]", help="codecs of hidden states (fp32,int8)")
    add_report_options(first)
    first.set_defaults(run=run_first_token)


def run_wan(options: argparse.Namespace) -> int:
    from loadtest.latency.links import links_table
    from loadtest.latency.report import report
    from loadtest.latency.rows import wan_table
    from loadtest.latency.run import measure_wan, wan_record
    from loadtest.latency.settings import WanSettings, check_settings
    from loadtest.workload.arms import BYTES, TOKENS, parse_choices, parse_lengths, parse_names
    from loadtest.workload.prompts import parse_prompts
    from serving.cli.deployment import ends_cleanly
    from serving.modes import MODES

    settings = WanSettings(
        profiles=parse_names(options.profile),
        choices=parse_choices(options.modes, MODES),
        lengths=parse_lengths(options.tokens, TOKENS) if options.tokens else parse_lengths(options.bytes, BYTES),
        checkpoint=options.checkpoint.resolve(),
        requests=options.requests,
        seed=options.seed,
        profiles_file=options.profiles,
        hosts=options.hosts,
        idle_s=options.idle_s,
        prompts=parse_prompts(options.text, options.prompt),
        temperature=options.temperature,
        at_once=options.at_once,
        control=not options.no_control,
        backend=options.backend,
    )
    check_report_options(options)
    profiles = check_settings(settings)
    with ends_cleanly():
        figures = measure_wan(settings, profiles, _say)
    print(wan_table(figures.rows))
    if figures.links:
        print("\nthe lab's links, plain sockets:\n" + links_table(figures.links))
    if figures.control:
        print("\nthe lab against plain loopback:\n" + wan_table(figures.control))
    record = wan_record(settings, figures)
    write_report(options, record, lambda: report(record))
    return 0 if not any(row["failures"] for row in figures.rows) else 1


def run_warm(options: argparse.Namespace) -> int:
    from loadtest.lab.profile import profile_named
    from loadtest.latency.warm import WarmSettings, check_warm, measure_warm, warm_table
    from loadtest.report.record import origin
    from loadtest.workload.arms import parse_choices
    from serving.cli.deployment import ends_cleanly
    from serving.modes import MODES

    settings = WarmSettings(
        profile_named(options.profile),
        parse_choices(options.modes, MODES),
        options.checkpoint.resolve(),
        max_bytes=options.bytes,
        rounds=options.rounds,
        idle_s=options.idle_s,
        keep_warm=not options.no_keep_warm,
    )
    check_warm(settings)
    check_report_options(options)
    _say(f"{settings.profile.name}: {settings.rounds} deployments for each mode ...")
    with ends_cleanly():
        rows = measure_warm(settings)
    print(warm_table(rows))
    write_report(options, {"bench": "warm", "profile": settings.profile.name, "rows": rows, **origin()})
    return 0


def run_first_token(options: argparse.Namespace) -> int:
    from loadtest.lab.profile import profile_named
    from loadtest.latency.first_token import (
        FirstTokenSettings,
        first_token_record,
        first_token_table,
        measure_first_token,
        prompt_for,
    )
    from serving.cli.deployment import ends_cleanly

    settings = FirstTokenSettings(
        profile_named(options.profile),
        options.checkpoint.resolve(),
        options.prompt_tokens,
        options.text,
        options.requests,
        tuple(dict.fromkeys(options.codec.split(","))),
    )
    check_report_options(options)
    prompt, alphabet = prompt_for(settings)
    with ends_cleanly():
        rows = measure_first_token(settings, prompt, alphabet, _say)
    print(first_token_table(rows))
    write_report(options, first_token_record(settings, rows))
    return 0 if not any(row["failed"] for row in rows) else 1


def _say(text: str) -> None:
    print(text, flush=True)

"""Commands for users: `router`, `host`, `generate`, `compare`, `doctor`, `demo`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.certs_commands import register_certs
from serving.client_options import add_router_options, client_of
from serving.http.commands import register as register_http
from serving.ngram.commands import register_ngram
from serving.service_commands import register_service
from serving.shipped import SHIPPED
from serving.token_commands import register_token
from serving.topology import DEFAULT_ROUTER
from stages.commands import (
    add_drain_flag,
    add_health_flag,
    add_host_options,
    add_shelf,
    check_positive,
    host_settings,
    keep_warm_s,
)
from stages.errors import InputError
from stages.log import start_log
from stages.registry.settings import add_registry_flags, registry_settings
from stages.security_options import add_server_options, security_of
from stages.seeing import add_seeing, seeing_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from serving.client import Result
    from serving.topology import Topology

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

DEMO_PROMPT = "The old man looked at the sea and said that "
DEMO_BYTES = 128
REGISTERED_S = 10.0
"""How long the doctor waits for hosts to register."""
MODE_NAMES = ("sweep", "chunked", "resample", "verified", "infill", "ar", "ar-speculative", "local", "auto")


def register(subparsers: Subparsers) -> None:
    router = subparsers.add_parser("router", help="run the router of a topology")
    router.add_argument("--topology", type=Path, metavar="FILE", help="the hosts; or where they register: --registry")
    add_registry_flags(router)
    router.add_argument("--listen", metavar="HOST:PORT", help=f"default: the topology's, else {DEFAULT_ROUTER}")
    router.add_argument("--checkpoint", type=Path, metavar="DIR", help="bundle with the local model, for mode `local`")
    router.add_argument(
        "--frontier", type=Path, metavar="FILE", help="what mode `auto` chooses from (the bundle's frontier.json)"
    )
    add_shelf(router)
    router.add_argument("--threads", type=int, metavar="N", help="processor threads (default: all cores)")
    router.add_argument("--max-requests", type=int, default=64, metavar="N", help="requests in flight (64)")
    router.add_argument("--max-rate", type=int, default=1000, metavar="R", help="requests started a second (1000)")
    router.add_argument("--hop-timeout-s", type=float, default=5.0, metavar="S", help="wait for a host (5)")
    router.add_argument("--keep-warm-ms", type=int, default=150, metavar="MS", help="pace on idle links, 0 = off (150)")
    router.add_argument(
        "--audit", type=float, default=0.0, metavar="SHARE", help="sweeps that replicas compute again, 0 to 1 (0)"
    )
    router.add_argument("--route", default="ring", metavar="R", help="ring, or to compare: nested, router (ring)")
    router.add_argument("--max-waiting", type=int, default=16, metavar="N", help="requests that wait for a place (16)")
    router.add_argument("--max-wait-s", type=float, default=2.0, metavar="S", help="longest wait for a place (2)")
    router.add_argument("--tokens", type=Path, metavar="FILE", help="who may ask, from `onesweep token`")
    add_server_options(router)
    add_health_flag(router)
    add_drain_flag(router)
    add_seeing(router, share=True)
    router.set_defaults(run=run_router_command)

    host = subparsers.add_parser("host", help="run one host of a topology on this machine")
    host.add_argument("name", metavar="NAME")
    host.add_argument("--topology", type=Path, required=True, metavar="FILE")
    host.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the topology's")
    add_host_options(host)
    host.set_defaults(run=run_host)

    generate = subparsers.add_parser("generate", help="generate text")
    _add_request(generate)
    generate.add_argument("--mode", default="sweep", metavar="M", help=", ".join(MODE_NAMES) + " (sweep)")
    generate.add_argument("--stream", action="store_true", help="print pieces as they arrive")
    generate.add_argument("--json", action="store_true")
    generate.set_defaults(run=run_generate)

    compare = subparsers.add_parser("compare", help="run modes side by side on one prompt")
    _add_request(compare)
    compare.add_argument("--modes", metavar="M[,M]", help="such as ar,resample:chain (those that the router can serve)")
    compare.add_argument("--json", action="store_true")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write the texts and figures there, too")
    compare.set_defaults(run=run_compare)

    doctor = subparsers.add_parser("doctor", help="measure every hop, and say what to do about those that are bad")
    doctor.add_argument("--topology", type=Path, metavar="FILE", help="the hosts; or where they register: --registry")
    add_registry_flags(doctor)
    doctor.add_argument("--json", action="store_true")
    add_server_options(doctor)
    doctor.set_defaults(run=run_doctor_command)

    register_service(subparsers)
    register_certs(subparsers)
    register_token(subparsers)
    register_ngram(subparsers)

    demo = subparsers.add_parser("demo", help="three hosts here, one prompt in every mode, then stop")
    demo.add_argument("--prompt", default=DEMO_PROMPT)
    demo.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR")
    demo.set_defaults(run=run_demo)

    register_http(subparsers)


def run_doctor_command(options: argparse.Namespace) -> int:
    from serving.doctor import report_text, run_doctor

    topology = _topology_of(options, within_s=REGISTERED_S)
    report = run_doctor(topology, security_of(options, topology.tls_of("router")))
    print(json.dumps(report.as_json()) if options.json else report_text(report))
    return 0 if report.healthy else 1


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    add_router_options(parser)
    parser.add_argument("--max-bytes", type=int, metavar="N", help="most bytes to generate (128)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens; a byte model's tokens are bytes")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--chunk",
        type=int,
        metavar="C",
        help="tokens a sweep, modes chunked, infill (32 bytes, 8 tokens), resample (32 bytes, 12 tokens, then adapted)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = most likely (0.8)")
    parser.add_argument("--steps", type=int, metavar="K", help="Euler steps in each block (8)")
    parser.add_argument("--codec", metavar="NAME", help="what travels: fp32, int8, int4 (int8; AR modes: fp32, int8)")
    parser.add_argument("--sampler", metavar="NAME", help="modes sweep, chunked: stochastic, ode (stochastic)")
    parser.add_argument("--drafter", metavar="D", help="who guesses, ar-speculative: both, model, ngram, lookup (both)")
    parser.add_argument(
        "--draft", type=int, metavar="N", help="tokens guessed a sweep, ar-speculative, verified (what pays)"
    )
    parser.add_argument(
        "--branches", type=int, metavar="N", help="alternatives guessed at a place, ar-speculative (what pays)"
    )
    parser.add_argument(
        "--scorer", metavar="S", help="who scores, modes resample, verified, infill: chain, ar (what is there)"
    )
    parser.add_argument(
        "--candidates", type=int, metavar="M", help="scored in a sweep, modes resample (32, then adapted), infill (16)"
    )
    parser.add_argument("--suffix", default="", metavar="TEXT", help="what follows the text, mode infill")
    parser.add_argument("--budget-ms", type=int, metavar="MS", help="latency to keep to, mode auto (the best text)")
    parser.add_argument("--timeout-s", type=float, default=120.0, metavar="S")


def run_router_command(options: argparse.Namespace) -> int:
    from serving.quota import AdmissionSettings
    from serving.ring import RingSettings
    from serving.router import RouterSettings, serve
    from serving.routes import check_route

    check_positive(options, "threads", "max_requests", "max_rate", "max_wait_s", "hop_timeout_s", "drain_s")
    seeing = seeing_of(options)
    start_log(seeing.log_format, "router")
    topology = _topology_of(options)
    if options.max_waiting < 0:
        raise InputError(f"--max-waiting must be 0 or more, not {options.max_waiting}")
    settings = RouterSettings(
        topology,
        options.listen or topology.router,
        options.checkpoint or topology.checkpoint,
        AdmissionSettings(options.max_requests, options.max_rate, options.max_waiting, options.max_wait_s),
        RingSettings(
            options.hop_timeout_s,
            keep_warm_s(options.keep_warm_ms),
            check_route(options.route),
            _audit_share(options.audit),
        ),
        options.threads,
        security_of(options, topology.tls_of("router")),
        options.tokens,
        options.shelf,
        options.frontier,
        options.health,
        registry_settings(options),
        seeing,
        options.drain_s,
    )
    serve(settings)
    return 0


def _topology_of(options: argparse.Namespace, within_s: float | None = None) -> Topology:
    """The hosts that a file names, or those that are registered. Raises OnesweepError."""
    from serving.discovery import await_topology
    from serving.topology import read_topology

    registry = registry_settings(options)
    if (registry is None) == (options.topology is None):
        raise InputError("give either --topology FILE, or --registry URL where hosts register")
    return await_topology(registry, DEFAULT_ROUTER, within_s) if registry else read_topology(options.topology)


def _audit_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise InputError(f"--audit must be 0 (off) to 1 (every sweep), not {share}")
    return share


def run_host(options: argparse.Namespace) -> int:
    from serving.topology import read_topology
    from stages.server import StageSettings, serve

    topology = read_topology(options.topology)
    host = topology.host(options.name)
    checkpoint = options.checkpoint or topology.checkpoint
    if checkpoint is None:
        raise InputError(f"{options.topology} names no checkpoint: add one, or give --checkpoint")
    settings = host_settings(options, host.name)
    seeing = seeing_of(options)
    start_log(seeing.log_format, host.name)
    serve(
        StageSettings(
            checkpoint,
            host.blocks,
            host.listen,
            tuple(topology.successors(host)),
            settings,
            options.threads,
            security=security_of(options, topology.tls_of(host.name)),
            shelf=options.shelf,
            health=options.health,
            seeing=seeing,
            drain_s=options.drain_s,
        )
    )
    return 0


def run_generate(options: argparse.Namespace) -> int:
    from serving.client import Result, TextDecoder
    from serving.table import printable

    settings = _request_settings(options)
    with client_of(options) as client:
        if options.stream and not options.json:
            decoder = TextDecoder()
            for item in client.stream(options.prompt, mode=options.mode, **settings):
                if isinstance(item, Result):
                    print(printable(decoder.end(), newline="\n"), flush=True)
                    _print_cost(item)
                else:
                    print(printable(decoder.feed(item), newline="\n"), end="", flush=True)
            return 0
        result = client.generate(options.prompt, mode=options.mode, **settings)
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        print(printable(result.text, newline="\n"))
        _print_cost(result)
    return 0


def run_compare(options: argparse.Namespace) -> int:
    from serving.client import request_of
    from serving.destination import check_destination, write_destination
    from serving.lineup import all_entrants, named_entrants, run_entrants
    from serving.page import comparison_page

    entrants = None if options.modes is None else named_entrants(options.modes)
    settings = _request_settings(options)
    request_of(options.prompt, suffix=options.suffix)
    if options.html:
        check_destination(options.html, "--html")
    with client_of(options) as client:
        entrants = entrants or all_entrants(client.status().modes, options.scorer, options.suffix)
        outcomes = run_entrants(client, options.prompt, entrants, settings)
    _print_outcomes(options.prompt, options.suffix, outcomes, options.json)
    if options.html:
        write_destination(options.html, comparison_page(options.prompt, options.suffix, outcomes, settings))
    return 0 if all(not isinstance(outcome, str) for outcome in outcomes.values()) else 1


def run_demo(options: argparse.Namespace) -> int:
    from serving.client import Client
    from serving.deployment import ends_cleanly, temporary_deployment
    from serving.lineup import all_entrants, run_entrants
    from serving.ports import free_port_block
    from serving.topology import local_topology
    from stages.parts import plan_host

    parts = plan_host(options.checkpoint, (0,)).parts
    topology = local_topology(min(3, parts), parts, options.checkpoint.resolve(), free_port_block(4) + 1)
    print(f"starting {len(topology.hosts)} hosts and a router on this machine ...", flush=True)
    with ends_cleanly(), temporary_deployment(topology, options.checkpoint.resolve()) as deployment:
        with Client(deployment.topology.router) as client:
            entrants = all_entrants(client.status().modes, scorer=None, suffix="")
            outcomes = run_entrants(client, options.prompt, entrants, {"max_bytes": DEMO_BYTES, "seed": 1})
        _print_outcomes(options.prompt, "", outcomes, as_json=False)
    print("\nstopped. `onesweep up --detach` keeps such hosts running; the README goes on from here.")
    return 0


def _request_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_bytes", "max_tokens", "seed", "chunk", "temperature", "steps", "codec", "sampler", "drafter", "draft")
    return {
        name: getattr(options, name)
        for name in (*names, "branches", "scorer", "candidates", "suffix", "budget_ms", "timeout_s")
    }


def _print_outcomes(prompt: str, suffix: str, outcomes: dict[str, Result | str], as_json: bool) -> None:
    from serving.table import comparison

    if as_json:
        rows = {m: {"mode": m, "error": o} if isinstance(o, str) else o.as_json() for m, o in outcomes.items()}
        print(json.dumps(list(rows.values())))
    else:
        print(comparison(prompt, outcomes, suffix))


def _tokens(result: Result) -> str:
    """Nothing where tokens are bytes."""
    return f" in {result.output_tokens} tokens" if result.output_tokens != result.output_bytes else ""


def _print_cost(result: Result) -> None:
    print(
        f"[{result.mode}, seed {result.seed}: {result.output_bytes} bytes{_tokens(result)}, "
        f"{result.sweeps} sweeps, {result.hops} hops, {result.wire_bytes_total} bytes on the wire, "
        f"{result.latency_ms:.0f} ms, {result.compute_ms:.0f} ms of compute]",
        file=sys.stderr,
    )
    if result.reason:
        print(f"[{result.reason}]", file=sys.stderr)

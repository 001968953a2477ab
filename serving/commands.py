"""Commands for users: `router`, `generate`, `compare`, `up`, `down`, `status`, `demo`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.certs_commands import register_certs
from serving.client_options import add_router_options, async_client_of, client_of
from serving.http.commands import check_framework
from serving.http.commands import register as register_http
from serving.http.settings import DEFAULT_LISTEN
from serving.token_commands import register_token
from serving.topology import DEFAULT_ROUTER
from stages.commands import add_health_flag, add_shelf, check_positive, keep_warm_s
from stages.errors import InputError
from stages.log import start_log
from stages.registry.settings import add_registry_flags, registry_settings
from stages.security_options import add_server_options, security_of
from stages.seeing import add_seeing, seeing_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from serving.client import Result
    from serving.deployment import Deployment

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

SHIPPED = Path(__file__).resolve().parent.parent / "weights"
DEMO_PROMPT = "The old man looked at the sea and said that "
DEMO_BYTES = 128
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
    add_seeing(router, share=True)
    router.set_defaults(run=run_router_command)

    host = subparsers.add_parser("host", help="run one host of a topology on this machine")
    host.add_argument("name", metavar="NAME")
    host.add_argument("--topology", type=Path, required=True, metavar="FILE")
    host.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the topology's")
    add_shelf(host)
    host.add_argument("--threads", type=int, metavar="N", help="processor threads (default: all cores)")
    host.add_argument("--backend", metavar="B", help="what computes: torch, onnxruntime (torch)")
    add_server_options(host)
    add_health_flag(host)
    add_seeing(host)
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
    doctor.add_argument("--topology", type=Path, required=True, metavar="FILE")
    doctor.add_argument("--json", action="store_true")
    add_server_options(doctor)
    doctor.set_defaults(run=run_doctor_command)

    up = subparsers.add_parser("up", help="start hosts and router on this machine")
    up.add_argument("--detach", action="store_true", help="return when ready, leave them running")
    where = up.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=int, metavar="N", help="hosts that share the blocks (3)")
    where.add_argument("--topology", type=Path, metavar="FILE")
    up.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="of each host: requests survive the loss of one (1)"
    )
    up.add_argument("--checkpoint", type=Path, metavar="DIR", help="bundle to serve (default: the shipped weights)")
    up.add_argument(
        "--port", type=int, default=7700, metavar="P", help="the router's; hosts take those after it (7700)"
    )
    up.add_argument(
        "--http",
        nargs="?",
        const=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"an API and a page, too ({DEFAULT_LISTEN})",
    )
    up.add_argument("--threads", type=int, default=1, metavar="N", help="processor threads of each process (1)")
    up.set_defaults(run=run_up)

    subparsers.add_parser("down", help="stop what `up --detach` started").set_defaults(run=run_down)

    deploy = subparsers.add_parser("deploy", help="exchange the weights under a running service, or take that back")
    deploy.add_argument("checkpoint", type=Path, nargs="?", metavar="DIR", help="bundle to serve from now on")
    deploy.add_argument("--rollback", action="store_true", help="go back to the release before")
    deploy.add_argument(
        "--without", default="", metavar="NAME[,NAME]", help="hosts that are down and need not take part"
    )
    add_router_options(deploy)
    deploy.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="give it up after (600)")
    deploy.add_argument("--json", action="store_true")
    deploy.set_defaults(run=run_deploy)

    status = subparsers.add_parser("status", help="hosts, readiness, sessions")
    add_router_options(status)
    status.add_argument("--json", action="store_true")
    status.set_defaults(run=run_status)

    register_certs(subparsers)
    register_token(subparsers)

    demo = subparsers.add_parser("demo", help="three hosts here, one prompt in every mode, then stop")
    demo.add_argument("--prompt", default=DEMO_PROMPT)
    demo.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR")
    demo.set_defaults(run=run_demo)

    register_http(subparsers)


def run_doctor_command(options: argparse.Namespace) -> int:
    from serving.doctor import report_text, run_doctor
    from serving.topology import read_topology

    topology = read_topology(options.topology)
    report = run_doctor(topology, security_of(options, topology.tls_of("router")))
    print(json.dumps(report.as_json()) if options.json else report_text(report))
    return 0 if report.healthy else 1


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    add_router_options(parser)
    parser.add_argument("--max-bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--chunk", type=int, metavar="C", help="bytes a sweep, modes chunked, infill (32), resample (32, then adapted)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = most likely (0.8)")
    parser.add_argument("--steps", type=int, metavar="K", help="Euler steps in each block (8)")
    parser.add_argument("--codec", metavar="NAME", help="what travels: fp32, int8, int4 (int8; AR modes: fp32, int8)")
    parser.add_argument("--sampler", metavar="NAME", help="modes sweep, chunked: stochastic, ode (stochastic)")
    parser.add_argument("--drafter", metavar="D", help="who guesses, mode ar-speculative: model, lookup, both (both)")
    parser.add_argument(
        "--draft", type=int, metavar="N", help="bytes guessed a sweep, ar-speculative, verified (what pays)"
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
    from serving.discovery import await_topology
    from serving.quota import AdmissionSettings
    from serving.ring import RingSettings
    from serving.router import RouterSettings, serve
    from serving.routes import check_route
    from serving.topology import read_topology

    check_positive(options, "threads", "max_requests", "max_rate", "max_wait_s", "hop_timeout_s")
    seeing = seeing_of(options)
    start_log(seeing.log_format, "router")
    registry = registry_settings(options)
    if (registry is None) == (options.topology is None):
        raise InputError("give either --topology FILE, or --registry URL where hosts register")
    topology = await_topology(registry, DEFAULT_ROUTER) if registry else read_topology(options.topology)
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
        registry,
        seeing,
    )
    serve(settings)
    return 0


def _audit_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise InputError(f"--audit must be 0 (off) to 1 (every sweep), not {share}")
    return share


def run_host(options: argparse.Namespace) -> int:
    from serving.topology import read_topology
    from stages.backends import DEFAULT_BACKEND
    from stages.host import HostSettings
    from stages.server import StageSettings, serve

    topology = read_topology(options.topology)
    host = topology.host(options.name)
    checkpoint = options.checkpoint or topology.checkpoint
    if checkpoint is None:
        raise InputError(f"{options.topology} names no checkpoint: add one, or give --checkpoint")
    if options.threads is not None and options.threads < 1:
        raise InputError(f"--threads must be above 0, not {options.threads}")
    seeing = seeing_of(options)
    start_log(seeing.log_format, host.name)
    serve(
        StageSettings(
            checkpoint,
            host.blocks,
            host.listen,
            tuple(topology.successors(host)),
            HostSettings(host.name, options.backend or DEFAULT_BACKEND),
            options.threads,
            security=security_of(options, topology.tls_of(host.name)),
            shelf=options.shelf,
            health=options.health,
            seeing=seeing,
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


def run_up(options: argparse.Namespace) -> int:
    from serving.deployment import Deployment, ends_cleanly, state_directory
    from serving.topology import local_topology, read_topology
    from stages.parts import plan_host

    if options.http:
        check_framework("--http")
    check_positive(options, "hosts", "threads")
    topology = read_topology(options.topology) if options.topology else None
    checkpoint = options.checkpoint or (topology.checkpoint if topology else None) or SHIPPED
    parts = plan_host(checkpoint, (0,)).parts
    if topology is None:
        topology = local_topology(
            options.hosts or min(3, parts), parts, checkpoint.resolve(), options.port + 1, options.replicas
        )
    elif options.replicas != 1:
        raise InputError("--replicas is for hosts that `up` lays out itself: name replicas in the topology")
    elif topology.blocks != parts:
        raise InputError(f"the topology has {topology.blocks} blocks, the checkpoint {parts}: make them agree")
    with ends_cleanly():
        deployment = Deployment.start(
            topology, checkpoint.resolve(), state_directory(), options.threads, http=options.http
        )
        try:
            deployment.wait_ready()
            for host in topology.hosts:
                print(f"{host.name:10} {host.address:22} blocks {host.span}")
            print(f"{'router':10} {topology.router:22} ready; logs in {deployment.directory}", flush=True)
            if options.http:
                deployment.wait_listening(options.http)
                print(f"{'http':10} http://{options.http}", flush=True)
            if not options.detach:
                _watch(deployment)
        except BaseException:
            deployment.stop()
            raise
    return 0


def _watch(deployment: Deployment) -> None:
    """Return at Ctrl-C, with everything stopped. A host that ends by itself is started again if others hold its blocks
    meanwhile; for any other process, raises ServiceError."""
    replicated = deployment.topology.replicated
    with contextlib.suppress(KeyboardInterrupt):
        print("Ctrl-C stops them.", flush=True)
        while True:
            time.sleep(1)
            for name in set(deployment.ended()) & replicated:
                print(f"{name} ended and is started again; see its log", flush=True)
                deployment.revive(name)
            deployment.check_alive()
    deployment.stop()


def run_down(options: argparse.Namespace) -> int:
    from serving.deployment import require_deployment, state_directory

    deployment = require_deployment(state_directory())
    deployment.stop()
    print(f"stopped {len(deployment.processes)} processes")
    return 0


def run_deploy(options: argparse.Namespace) -> int:
    from serving.deploying import deploy, lines_of, read_release, record_of, roll_back

    if options.rollback == (options.checkpoint is not None):
        raise InputError("give the directory of a checkpoint to deploy, or --rollback to go back to the one before")
    if options.rollback and options.without:
        raise InputError("--without is for a deployment: a rollback leaves hosts out that are down")
    check_positive(options, "timeout_s")
    show = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    client, without = partial(async_client_of, options), [name for name in options.without.split(",") if name]
    if options.rollback:
        switch = roll_back(client, show, options.timeout_s)
    else:
        switch = deploy(client, read_release(options.checkpoint), without, show, options.timeout_s)
    print(json.dumps(record_of(switch)) if options.json else "\n".join(lines_of(switch)))
    return 0


def run_status(options: argparse.Namespace) -> int:
    from google.protobuf.json_format import MessageToDict

    with client_of(options) as client:
        status = client.status()
    if options.json:
        print(
            json.dumps(
                MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            )
        )
        return 0
    state = "ready" if status.ready else "not ready"
    print(f"router {state}; modes {', '.join(status.modes)}; {status.requests} of {status.request_limit} requests")
    for host in status.hosts:
        blocks = ",".join(map(str, host.blocks))
        state = f"ready, {host.rtt_ms:.1f} ms, {host.sessions} sessions" if host.ready else host.reason
        if status.release and host.releases and status.release not in host.releases:
            state += f"; it has release {host.releases[-1]}"
        print(f"{host.name:10} {host.address:22} blocks {blocks:6} {state}")
    release = f"release {status.release}" if status.release else "no release yet"
    print(f"{release}; before: {status.previous}" if status.previous else release)
    if status.audits.audited:
        shown = f"{status.audits.audited} of {status.audits.sweeps} sweeps, {status.audits.liars} liars found"
        print(f"audits: {shown}, {status.audits.compute_ms / 1000:.1f} s of hosts' arithmetic")
    return 0 if status.ready else 1


def run_demo(options: argparse.Namespace) -> int:
    from serving.client import Client
    from serving.deployment import ends_cleanly, free_port_block, temporary_deployment
    from serving.lineup import all_entrants, run_entrants
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
    names = ("max_bytes", "seed", "chunk", "temperature", "steps", "codec", "sampler", "drafter", "draft", "scorer")
    return {name: getattr(options, name) for name in (*names, "candidates", "suffix", "budget_ms", "timeout_s")}


def _print_outcomes(prompt: str, suffix: str, outcomes: dict[str, Result | str], as_json: bool) -> None:
    from serving.table import comparison

    if as_json:
        rows = {m: {"mode": m, "error": o} if isinstance(o, str) else o.as_json() for m, o in outcomes.items()}
        print(json.dumps(list(rows.values())))
    else:
        print(comparison(prompt, outcomes, suffix))


def _print_cost(result: Result) -> None:
    print(
        f"[{result.mode}, seed {result.seed}: {result.output_bytes} bytes, "
        f"{result.sweeps} sweeps, {result.hops} hops, {result.wire_bytes_total} bytes on the wire, "
        f"{result.latency_ms:.0f} ms, {result.compute_ms:.0f} ms of compute]",
        file=sys.stderr,
    )
    if result.reason:
        print(f"[{result.reason}]", file=sys.stderr)

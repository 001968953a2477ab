"""Commands for who runs a service: `up`, `down`, `deploy`, `status`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from serving.client_options import add_router_options, async_client_of, client_of
from serving.http.settings import DEFAULT_LISTEN
from serving.shipped import SHIPPED
from stages.commands import check_positive
from stages.errors import InputError
from stages.web import check_framework

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from serving.deployment import Deployment

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_service(subparsers: Subparsers) -> None:
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

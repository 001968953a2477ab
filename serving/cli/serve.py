"""Operators' commands: `host`, `router`, `http`, `doctor`, `up`, `down`, `deploy` and `status`."""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from serving.cli.deployment import Deployment, NoDeployment, deployment_here, new_directory, present
from serving.cli.generate import add_router_options, async_client_of, client_of, router_here
from serving.cli.machines import served_here
from serving.cli.parser import check_positive
from serving.client.client import RouterError
from serving.gateway.settings import DEFAULT_LISTEN, HttpSettings, check_framework
from serving.router.request import DEFAULT_ROUTER
from serving.router.settings import RouterSettings
from serving.router.topology import SHIPPED, HostEntry, Topology, local_topology
from serving.router.topology_source import (
    TopologySource,
    add_topology_option,
    follow_topology,
    topology_at,
    topology_in_file,
)
from serving.v1 import router_pb2
from stages.device import AUTO
from stages.errors import InputError, Interrupted, OnesweepError
from stages.host.settings import FollowNext, HostSettings, StageSettings
from stages.progress import ProgressLine, counted, ticking
from stages.settings import add_flags, from_flags
from stages.signals import ends_at_once, ends_cleanly, run_until_signal
from stages.telemetry.observability import ObservabilitySettings, start_log
from stages.wire.channel import check_target, parse_address, use_link_proxy
from stages.wire.secret_files import add_server_options, file_lock, state_directory
from stages.wire.status import record_of
from stages.wire.tls import Security, ending, security_of
from stages.wire.tokens import read_tokens

log = logging.getLogger(__name__)


def add_router(router: argparse.ArgumentParser) -> None:
    add_topology_option(router)
    router.add_argument("--listen", metavar="HOST:PORT", help=f"default: the topology's, else {DEFAULT_ROUTER}")
    add_flags(router, RouterSettings)
    add_server_options(router)


def add_http(http: argparse.ArgumentParser) -> None:
    add_flags(http, HttpSettings)
    add_flags(http, ObservabilitySettings)


def add_doctor(doctor: argparse.ArgumentParser) -> None:
    add_topology_option(doctor, required=False)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    add_server_options(doctor)


def add_up(up: argparse.ArgumentParser) -> None:
    add = up.add_argument
    add("--detach", action="store_true", help="return when ready, and leave them running")
    where = up.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=int, metavar="N", help="hosts that share the blocks (3)")
    where.add_argument("--topology", metavar="FILE", help="the hosts")
    add("--replicas", type=int, default=1, metavar="N", help="of each host: requests survive the loss of one (1)")
    add("--checkpoint", type=Path, metavar="DIR", help="bundle to serve (the shipped weights)")
    add("--port", type=int, default=7700, metavar="P", help="port of the router; hosts take the next ones (7700)")
    add(
        "--http",
        nargs="?",
        const=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"serve an API and a web page, too ({DEFAULT_LISTEN})",
    )
    add("--threads", type=int, metavar="N", help="of each host (all cores; 1 for chains, pictures and bfloat16)")
    add_flags(up, HostSettings, only=("device",))  # not given: the topology may name it
    add("--tokens", type=Path, metavar="FILE", help="access tokens, from `onesweep token`")


def add_down(down: argparse.ArgumentParser) -> None:
    down.add_argument("--router", metavar="HOST:PORT", help="router of the deployment to stop (the only one)")


def add_deploy(deploy: argparse.ArgumentParser) -> None:
    deploy.add_argument("checkpoint", type=Path, nargs="?", metavar="DIR", help="bundle to serve from now on")
    deploy.add_argument("--rollback", action="store_true", help="go back to the previous release")
    deploy.add_argument("--without", default="", metavar="NAME[,NAME]", help="hosts that are down, to leave out")
    add_router_options(deploy)
    deploy.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="give up after (600)")
    deploy.add_argument("--json", action="store_true", help="print JSON")


def add_status(status: argparse.ArgumentParser) -> None:
    add_router_options(status)
    status.add_argument("--json", action="store_true", help="print JSON")


def run_router(options: argparse.Namespace) -> int:
    from serving.router.server import serve

    start_log(from_flags(ObservabilitySettings, options).log_format, "router")
    source = topology_at(options.topology, options.insecure)
    topology = source.read()
    settings = from_flags(
        RouterSettings,
        options,
        topology=topology,
        source=source,
        listen=options.listen or topology.router,
        checkpoint=options.checkpoint or topology.checkpoint,
        security=security_of(options, topology.tls_of("router")),
    )
    serve(settings)
    return 0


def run_http(options: argparse.Namespace) -> int:
    check_framework("`onesweep http`")
    from serving.gateway.app import run_gateway

    options.router, _ = router_here(options.router)
    settings = from_flags(HttpSettings, options, seeing=from_flags(ObservabilitySettings, options))
    start_log(settings.seeing.log_format, "http")
    run_until_signal(partial(run_gateway, settings))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from serving.router.doctor import examine, report_text
    from stages.wire.link_quality import LinkRecord

    if options.topology is not None:
        topology = topology_at(options.topology, options.insecure).read()
    elif (here := deployment_here()) is not None:
        topology = here.topology
    else:
        raise NoDeployment("nothing is up here: name the hosts with --topology")
    if proxy := LinkRecord.read(topology.certificates).proxy:  # joined machines
        use_link_proxy(proxy)
    report = asyncio.run(examine(topology, security_of(options, topology.tls_of("router"))))
    print(json.dumps(report.as_json()) if options.json else report_text(report))
    return 0 if report.healthy else 1


def run_up(options: argparse.Namespace) -> int:
    check_positive(options, "hosts", "threads", "replicas", "port")
    if options.http:
        check_framework("--http")
        parse_address(options.http, "--http")
    topology = topology_in_file(options.topology) if options.topology is not None else None
    with ends_cleanly():
        deployment = _started(options, topology)
        present(deployment, options.http, ProgressLine(), supervise=None if options.detach else lambda _: None)
    return 0


def _started(options: argparse.Namespace, topology: Topology | None) -> Deployment:
    checkpoint = options.checkpoint or (topology.checkpoint if topology else None) or SHIPPED
    with ticking(f"reading {checkpoint}"):
        from stages.host.plan import check_blocks, device_for, plan_host

        plan = plan_host(checkpoint, (0,))
    parts = plan.parts
    if topology is None:
        topology = local_topology(
            options.hosts or min(3, parts), parts, checkpoint.resolve(), options.port + 1, options.replicas
        )
    elif options.replicas != 1:
        raise InputError("--replicas is for hosts that `up` lays out itself: name replicas in the topology")
    check_blocks(topology.blocks, parts)
    for name in ("router", *(host.name for host in topology.hosts)):
        if tls := topology.tls_of(name):
            tls.read()  # read here, where the user sees an error, not in a log
    if options.tokens is not None:
        read_tokens(options.tokens)
    # only a GPU needs a check by torch, which takes a second to import
    for device in {options.device or host.device or AUTO for host in topology.hosts} - {AUTO, "cpu"}:
        device_for(device, plan)
    with file_lock(new_directory(topology)):
        return Deployment.start(
            topology,
            checkpoint.resolve(),
            new_directory(topology),  # again, since another `up` may have been quicker
            threads=options.threads or plan.shared_threads,
            host_options=["--device", options.device] if options.device else (),
            router_options=["--tokens", str(options.tokens.resolve())] if options.tokens else (),
            http=options.http,
        )


def run_down(options: argparse.Namespace) -> int:
    if (deployment := deployment_here(options.router)) is None:
        if problem := served_here(options.router):
            raise NoDeployment(f"{problem}; Ctrl-C there stops it")
        raise NoDeployment(f"nothing is up at {options.router or 'any port'} (ONESWEEP_STATE is {state_directory()})")
    count = counted(len(deployment.processes) - len(deployment.ended()), "server")
    deployment.stop_visibly()
    print(f"stopped {count} of the router at {deployment.topology.router}")
    return 0


def run_deploy(options: argparse.Namespace) -> int:
    from serving.cli.deploy import deploying, line_of, read_release, roll_back

    if options.rollback == (options.checkpoint is not None):
        raise InputError("give either a checkpoint directory, to deploy it, or --rollback")
    if options.rollback and options.without:
        raise InputError("--without is for a deployment: a rollback itself leaves out hosts that are down")
    check_positive(options, "timeout_s")
    show = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    client, without = partial(async_client_of, options), [name for name in options.without.split(",") if name]
    try:
        if options.rollback:
            switch = asyncio.run(roll_back(client, show, options.timeout_s))
        else:
            switch = asyncio.run(deploying(client, read_release(options.checkpoint), without, show, options.timeout_s))
    except RouterError as error:
        raise _explained(error, options.router) from None
    except KeyboardInterrupt:
        state = "routers that had not switched keep their release: see `onesweep status`, and try again"
        raise Interrupted(f"interrupted: {state}") from None
    print(json.dumps(record_of(switch)) if options.json else line_of(switch))
    return 0


def _explained(error: RouterError, router: str | None) -> OnesweepError:
    """`error`, or why a router that was started on this machine does not answer."""
    problem = "" if error.reached else served_here(router)
    return NoDeployment(problem) if problem else error


def run_status(options: argparse.Namespace) -> int:
    try:
        with client_of(options) as client:
            status = client.status()
    except RouterError as error:
        raise _explained(error, options.router) from None
    if options.json:
        print(json.dumps(record_of(status)))
        return 0
    print("\n".join(status_lines(status)))
    return 0 if status.ready else 1


def status_lines(status: router_pb2.StatusResponse) -> Iterator[str]:
    """A router's status for a terminal."""
    state = "ready" if status.ready else "not ready"
    modes = ", ".join([*status.modes, *status.drawing_modes])
    about = f"router {state}", f"modes {modes}", f"{status.requests} of {status.request_limit} requests"
    yield "; ".join(filter(None, [*about, ending(status.certificate_until_s)]))
    if status.sampling:
        yield f"default sampling: {status.sampling}"
    for host in status.hosts:
        blocks = ",".join(map(str, host.blocks))
        state = f"ready, {host.rtt_ms:.1f} ms, {host.sessions} sessions" if host.ready else host.reason
        if status.release and host.releases and status.release not in host.releases:
            state += f"; it has release {host.releases[-1]}"
        state += f"; {host.warning}" if host.warning else ""
        yield f"{host.name:10} {host.address:22} blocks {blocks:6} {state}"
        # a host that does not answer keeps its last links
        for link in host.links if any(link.kind for link in host.links) and (host.ready or host.rtt_ms) else ():
            relayed = f", {link.relayed_bytes / 1e6:,.1f} MB so far" if link.relayed_bytes else ""
            kind = f"{link.kind or 'no link yet'}, {link.rtt_ms:.1f} ms{relayed}"
            yield f"{'':10} to {link.to:19} {link.problem or kind}"
    release = f"release {status.release}" if status.release else "no release yet"
    yield f"{release}; previous: {status.previous}" if status.previous else release
    if status.audits.audited:
        shown = f"{status.audits.audited} of {status.audits.sweeps} sweeps, {status.audits.faulty_hosts} found faulty"
        yield f"audits: {shown}, {status.audits.compute_ms / 1000:.1f} s of compute on hosts"
    yield from (f"advice: {line}" for line in status.advice)


# `onesweep host`: one block host at its place in a topology.


def add_host(host: argparse.ArgumentParser) -> None:
    host.add_argument("name", metavar="NAME", help="its name in the topology, accounts and errors")
    add_topology_option(host)
    host.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint or bundle (the topology's)")
    add_flags(host, HostSettings)
    add_flags(host, StageSettings)
    add_server_options(host)


def run_host(options: argparse.Namespace) -> int:
    with ends_at_once():
        from stages.host.server import serve

    settings = host_settings(options)
    start_log(settings.seeing.log_format, settings.host.name)
    serve(settings)
    return 0


def host_settings(options: argparse.Namespace) -> StageSettings:
    """Settings of a host at its place in the topology, which it follows. Raises OnesweepError."""
    source = topology_at(options.topology, options.insecure)
    topology = source.read()
    host = topology.host(options.name)
    checkpoint = options.checkpoint or topology.checkpoint
    if checkpoint is None:
        raise InputError(f"{source} names no checkpoint: add one, or give --checkpoint")
    options.device = options.device or host.device or None  # empty if a script names none
    security = security_of(options, topology.tls_of(host.name))
    return from_flags(
        StageSettings,
        options,
        checkpoint=checkpoint,
        blocks=host.blocks,
        parts=topology.blocks,
        listen=host.listen,
        next=tuple(topology.successors(host)),
        host=from_flags(HostSettings, options, name=host.name),
        security=security,
        follow_next=_next_hosts(source, topology, host, security),
    )


def _next_hosts(source: TopologySource, topology: Topology, host: HostEntry, security: Security) -> FollowNext:
    """Follow the topology for the hosts that may come after `host`, while `host` keeps its place in it."""
    own = topology.blocks, host.blocks, host.listen

    async def follow(set_addresses: Callable[[Sequence[str]], None]) -> None:
        def use(changed: Topology) -> None:
            places = [each for each in changed.hosts if each.name == host.name]
            if [(changed.blocks, place.blocks, place.listen) for place in places] != [own]:
                raise InputError(
                    f"{source} no longer has {host.name} with blocks {host.span} of {topology.blocks} at {host.listen} "
                    "as this process has it: restart it, or stop it if another replaced it"
                )
            addresses = changed.successors(places[0])
            for address in addresses:
                check_target(address, security)
            log.info("%s: next hosts: %s", host.name, ", ".join(addresses) or "none")
            set_addresses(addresses)

        await follow_topology(source, topology, use)

    return follow

"""The router: takes requests and sends them round the ring."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.router.active_release import ActiveRelease, RouterParts
from serving.router.admission import Admission
from serving.router.audit import FINDINGS_NAME
from serving.router.records import ROUTER_METRICS
from serving.router.ring import Ring
from serving.router.rollout import Rollout, find_release
from serving.router.service import RouterService
from serving.router.settings import RouterSettings
from serving.router.topology import Topology
from serving.router.topology_source import follow_topology
from serving.v1 import router_pb2, router_pb2_grpc
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.release_store import ReleaseStore
from stages.errors import InputError, OnesweepError, ServiceError
from stages.host.plan import check_blocks, plan_host
from stages.memory import keep_trimmed, return_large_buffers
from stages.signals import drained, run_until_signal
from stages.telemetry.observability import Telemetry
from stages.wire.auth import ROUTER
from stages.wire.channel import MAX_STREAMS, CallBounds, HealthChecks, bind, is_loopback, new_server, serve_health
from stages.wire.status import StatusError
from stages.wire.tokens import ADMIN, GENERATE, STATUS, Keyring

log = logging.getLogger(__name__)

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
HEALTH_S = 0.5
_SCOPES = {GENERATE: ("Generate", "Draw", "Tokenize"), STATUS: ("Status",), ADMIN: ("Deploy", "Rollback")}
_PATHS = {f"/{SERVICE}/{method}": scope for scope, methods in _SCOPES.items() for method in methods}
# Time for ended requests to flush their last messages.
FLUSH_S = 1.0


async def run_router(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; running requests end first.

    Raises OnesweepError, also when a job that must not end does.
    """
    if settings.threads:
        import torch

        torch.set_num_threads(settings.threads)
    keyring = Keyring(settings.tokens, settings.routers)
    name = _own_name(settings)
    security = settings.security
    verifier = None
    if settings.ring.audit_share and settings.checkpoint:
        from serving.router.own_models import ReferenceVerifier  # imports torch: later that would hold up requests

        verifier = ReferenceVerifier(settings.checkpoint)
    store = ReleaseStore(settings.releases, settings.signers) if settings.releases else None
    findings = store.directory / FINDINGS_NAME if store else None
    ring = Ring(settings.ring, verifier, security, name, findings, settings.topology.certificates)
    ring.patience.most_waiting = (settings.admission.request_limit + 1) // 2
    read = partial(RouterParts.read, settings.checkpoint, settings.frontier)
    first = first_release(ring, store, settings.checkpoint, read)
    if first.directory and find_bundle(first.directory).for_hosts:
        check_blocks(settings.topology.blocks, plan_host(first.directory, (0,)).parts, first.directory)
    rollout = Rollout(ring, first, store, settings.checkpoint)
    lookout = Telemetry(settings.seeing, security.insecure)
    admission = Admission(settings.admission, reserves=keyring.shared)
    service = RouterService(rollout, keyring, admission)
    checks = Health(rollout)
    server = _server_of(service, checks)
    port = bind(server, settings.listen, security)
    lookout.serve(ROUTER_METRICS, lambda: service.counters.read(service.status()))
    ring.set_hosts(settings.topology.hosts)
    checks.look()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    vitals = await serve_health(checks, settings.health)
    await server.start()
    log.info("router: live on port %d", port)
    jobs = [ring.watch(), checks.watch(), rollout.keep_up_to_date(), keep_trimmed()]
    if settings.source is not None:
        blocks = settings.topology.blocks
        jobs.append(follow_topology(settings.source, settings.topology, partial(change_hosts, ring, blocks)))
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await _until_stopped(stop, tasks)
    finally:
        checks.stop()
        admission.stopping = True
        await drained(lambda: admission.requests or admission.waiting, settings.drain_s)
        for task in tasks:
            task.cancel()
        await server.stop(FLUSH_S)
        await vitals.stop(grace=0)
        await ring.close()
        if store:
            store.close()
        await lookout.close()


def change_hosts(ring: Ring, blocks: int, topology: Topology) -> None:
    """Give a ring the hosts of a topology. Raises InputError if it does not have `blocks` blocks."""
    if topology.blocks != blocks:
        raise InputError(f"the topology has {topology.blocks} blocks now, but this router serves {blocks}: restart it")
    ring.set_hosts(topology.hosts)


class Health(HealthChecks):
    """gRPC's health service, answering with the router's current status."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__()
        self._rollout = rollout
        self._last_problem: str | None = ""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self.look()
        return await super().Check(request, context)

    def look(self) -> None:
        """Copy the rollout's current status."""
        problem = self._rollout.current.view.problem
        if problem != self._last_problem:
            self._last_problem = problem
            log.info("router: %s", problem or "ready")
            status = health_pb2.HealthCheckResponse
            self.set(SERVICE, status.NOT_SERVING if problem else status.SERVING)

    async def watch(self) -> None:
        """Refresh the status now and then for `Watch` clients. Never ends."""
        while True:
            self.look()
            await asyncio.sleep(HEALTH_S)


def _server_of(service: RouterService, checks: Health) -> grpc.aio.Server:
    def caller(path: str, metadata: Any) -> str:  # noqa: ANN401 - the stubs do not export its type
        try:
            return service.keyring.identify(metadata, _PATHS[path]).name
        except (StatusError, KeyError):  # refused once the request has arrived, or open to all
            return ""

    limits = service.admission.settings
    most = limits.request_limit + limits.queue_limit
    large = [path for path, scope in _PATHS.items() if scope == GENERATE]
    server = new_server(interceptors=[CallBounds(caller, most, large)], streams=max(MAX_STREAMS, 2 * most))
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _own_name(settings: RouterSettings) -> str:
    """The router's name in its certificate; empty without one. Raises InputError for an unsafe way to serve."""
    security = settings.security
    if settings.tokens is None and not settings.anybody and not is_loopback(settings.listen):
        raise InputError(
            f"{settings.listen} can be reached from other machines, and anybody could send requests: "
            "give --tokens (`onesweep token add` makes them), or allow it with --anybody"
        )
    if security.tls is None:
        return ""
    identity = security.tls.own(ROUTER).identity
    return identity.name if identity else ""


def first_release(
    ring: Ring, store: ReleaseStore | None, checkpoint: Path | None, read: Callable[[], RouterParts]
) -> ActiveRelease:
    """The release served first: the last one deployed, or the checkpoint; without either, whatever the hosts hold.

    :param read: reads the router's parts of the checkpoint.
    """
    name = next(reversed(store.in_use), "") if store else ""
    directory = find_release(name, store, checkpoint) if name else None
    if directory is not None:
        try:
            own = read() if directory == checkpoint else RouterParts.read(directory)
        except OnesweepError as error:
            log.warning("the deployed release %s is damaged: serving another that the hosts hold (%s)", name, error)
        else:
            log.info("serving the deployed release %s", name)
            return ActiveRelease.over(ring, own, name)
    elif name:
        log.warning("release %s is no longer here: serving another that the hosts hold", name)
    return ActiveRelease.over(ring, read())


async def _until_stopped(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Return when `stop` is set. Raises ServiceError if one of `tasks` ends first: none of them should."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        log.critical("a job of the router ended unexpectedly", exc_info=task.exception())
        raise ServiceError("the router cannot continue: its log says what ended")


def serve(settings: RouterSettings) -> None:
    """Run a router until it stops. Raises OnesweepError."""
    return_large_buffers()
    run_until_signal(partial(run_router, settings))

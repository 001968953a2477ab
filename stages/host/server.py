"""A stage server: live at once, ready when its weights are loaded and warm and it has reached its next host."""

import asyncio
import gc
import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stages.backends import Backend
from stages.checkpoint.release_store import ReleaseStore
from stages.clock import monotonic
from stages.device import all_cores
from stages.errors import OnesweepError, ServiceError
from stages.host.host import Host
from stages.host.loading import Loader, Sources
from stages.host.metrics import STAGE_METRICS
from stages.host.next_hosts import NextHosts
from stages.host.plan import check_blocks, device_for, full_state_bytes, wiring_problem
from stages.host.service import StageSeat, StageService, WaitingService, read_assignment
from stages.host.settings import StageSettings
from stages.memory import free_memory, keep_trimmed, return_large_buffers, trim
from stages.signals import drained, run_until_signal
from stages.telemetry.observability import Telemetry
from stages.threads import cancelled
from stages.v1 import join_pb2_grpc, stage_pb2, stage_pb2_grpc
from stages.wire.auth import HOST, SERVICE, CallerGuard
from stages.wire.channel import KEEPALIVE, HealthChecks, bind, check_target, new_server, serve_health
from stages.wire.tokens import ADMIN, Keyring

log = logging.getLogger(__name__)

NO_NEXT_HOST = "no next host: the topology has none that begins with the block after this host's last"
RETRY_S = 0.2
HOUSEKEEPING_S = 0.5
STALL_DECAY = 0.97  # with each HOUSEKEEPING_S: half is left after eleven seconds
# A host that accepts releases accepts messages of this size, as the next release may need larger ones.
MESSAGE_BYTES = 64 << 20
ANSWER_S = 1.0  # time for the answer to the call that ends a waiting server
PRODUCT_SIDE, PRODUCTS = 4096, 8  # matrix that measures a host's speed: too large for the cache of a usual processor
WEIGHTS_SHARE = 0.9  # of the free memory without caches: a ready host holds 1.04 of its file, and briefly more


class StageServer:
    """One process of a deployment: health, reflection and the stage service on one port."""

    def __init__(self, settings: StageSettings, seat: StageSeat | None = None) -> None:
        """Check everything that can be checked without reading weights. Raises OnesweepError.

        :param seat: the seat of a host that was started without a checkpoint; its store stays open.
        """
        self.settings, self.seat = settings, seat
        own = ReleaseStore(settings.releases, settings.signers) if settings.releases and not seat else None
        self.store = seat.store if seat else own
        self.sources = Sources(settings.checkpoint, settings.blocks, self.store)
        self.first, *self.others = reversed(self.sources.start())
        if settings.parts is not None:
            check_blocks(settings.parts, self.first.plan.parts)
        self.message_bytes = max(self.first.plan.message_bytes(), MESSAGE_BYTES if self.store else 0)
        self.backend = Backend(device_for(settings.host.device, self.first.plan), self.settings.threads or all_cores())
        for address in settings.next:
            check_target(address, settings.security, "next address")
        if settings.security.tls is not None:
            settings.security.tls.own(HOST)
        self.failure: OnesweepError | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or until the weights turn out to be unusable (OnesweepError)."""
        torch.set_num_threads(1)  # except in products: see stages/backends/rows.py
        telemetry = Telemetry(self.settings.seeing, self.settings.security.insecure)
        host = self._host()
        loader = Loader(host, self.sources, self.backend, self.message_bytes)
        service = StageService(host, loader, self.seat, self.settings.security.tls)
        server, checks, port = _new_server(service, self.message_bytes, self.settings)
        telemetry.serve(STAGE_METRICS, lambda: host.counters.read(service.description()))
        health_server = await serve_health(checks, self.settings.health)
        await server.start()
        log.info("%s: live on port %d", host.settings.name, port)
        host.next_hosts.set_addresses(self.settings.next)
        jobs = [self._become_ready(host, loader, service, checks, stop), housekeeping(host), keep_trimmed()]
        if self.settings.follow_next is not None:
            jobs.append(self.settings.follow_next(host.next_hosts.set_addresses))
        tasks = [self._begin(job, stop) for job in jobs]
        if self.seat is not None:
            self.seat.relink = host.next_hosts.set_addresses
        await stop.wait()
        host.admission.stopping = True
        checks.stop()
        await drained(lambda: host.sessions.sessions, self.settings.drain_s)
        await asyncio.gather(server.stop(grace=0), health_server.stop(grace=0))
        await cancelled(tasks)
        host.close()
        await host.next_hosts.close()
        await telemetry.close()
        if self.store and not self.seat:
            self.store.close()
        if self.failure:
            raise self.failure

    def _begin(self, job: Coroutine[Any, Any, None], stop: asyncio.Event) -> asyncio.Task[None]:
        """Start a task that this server cannot do without: if it fails, the server ends, to be started again."""

        def ended(task: asyncio.Task[None]) -> None:
            if stop.is_set() or task.cancelled() or (error := task.exception()) is None:
                return
            log.critical("%s cannot continue", self.settings.host.name, exc_info=error)
            self.failure = ServiceError(f"internal error: {error!r}; please report it with the log above")
            stop.set()

        task = asyncio.create_task(job)
        task.add_done_callback(ended)
        return task

    def _host(self) -> Host:
        settings = self.settings.host
        links = NextHosts(
            lambda address, other: wiring_problem([release.plan for release in host.releases.all], address, other),
            full_state_bytes(self.first.plan),
            self.message_bytes,
            settings.hop_timeout_s,
            settings.keep_warm_s,
            self.settings.security,
        )
        host = Host(self.first, settings, links)
        host.releases.all[:0] = reversed(self.others)
        return host

    async def _become_ready(
        self, host: Host, loader: Loader, service: StageService, checks: HealthChecks, stop: asyncio.Event
    ) -> None:
        try:
            await loader.begin()
        except OnesweepError as error:
            self.failure = error
            stop.set()
            return
        gc.collect()
        gc.freeze()  # what loading allocated stays, too; a dropped release is freed without the collector
        worker, rest = self._begin(host.work(), stop), self._begin(loader.load_rest(), stop)
        try:
            while True:
                links, plan = host.next_hosts, self.first.plan
                reason = links.problem if links.relays or (plan.is_first and plan.is_last) else NO_NEXT_HOST
                if reason != service.not_ready_reason:
                    log.info("%s: %s", host.settings.name, reason or "ready")
                service.not_ready_reason = reason
                status = health_pb2.HealthCheckResponse
                checks.set(SERVICE, status.NOT_SERVING if reason else status.SERVING)
                await asyncio.sleep(HOUSEKEEPING_S if not reason else RETRY_S)
        finally:
            worker.cancel()
            rest.cancel()


class EmptyHost:
    """A process without a checkpoint: it waits for a stage, and serves the one that a router gave it last.

    A restart serves the stage that was given last."""

    def __init__(self, settings: StageSettings) -> None:
        """:param settings: must have `releases`, and a port to listen on. Raises OnesweepError."""
        assert settings.releases is not None
        if settings.security.tls is not None:
            settings.security.tls.own(HOST)
        self.settings, self.store, self.speed = settings, ReleaseStore(settings.releases, settings.signers), 0.0
        self._before = stage_pb2.Room()
        if settings.model is not None:
            from stages.importing.importing import open_source, write_own_part  # imported here, as few hosts need it

            open_source(settings.model)
            self.store.own_copy = partial(write_own_part, settings.model)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises OnesweepError if it cannot even wait."""
        torch.set_num_threads(self.settings.threads or all_cores())
        self.speed = await asyncio.to_thread(measured_speed)
        problem = ""
        while not stop.is_set():
            changed = asyncio.Event()
            stopping = asyncio.create_task(stop.wait())
            stopping.add_done_callback(lambda _, changed=changed: changed.set())  # type: ignore[misc]
            try:
                given = None if problem else read_assignment(self.store)
                if given is None or not self.store.in_use:
                    await self._wait(changed, problem)
                    problem = ""
                    continue
                place = self.store.directory / self.store.in_use[-1]
                self._before = self._room()  # measured now: once it serves, its weights use the memory
                settings = replace(self.settings, checkpoint=place, blocks=tuple(given.blocks), next=tuple(given.next))
                seat = StageSeat(self.store, self.settings.security, lambda: self._before, changed)
                await StageServer(settings, seat).run(changed)
            except OnesweepError as error:
                if given is None or problem:
                    raise
                problem = f"its stage cannot be served: {error}"
                log.error("%s: %s", self.settings.host.name, problem)
            finally:
                stopping.cancel()
                gc.collect()
                trim()
        self.store.close()

    async def _wait(self, changed: asyncio.Event, problem: str) -> None:
        """Answer calls until this host is given a stage."""
        seat = StageSeat(self.store, self.settings.security, self._room, changed)
        service = WaitingService(self.settings.host.name, seat, problem)
        server, checks, port = _new_server(service, MESSAGE_BYTES, self.settings)
        health_server = await serve_health(checks, self.settings.health)
        await server.start()
        log.info("%s: waiting for a stage on port %d", self.settings.host.name, port)
        await changed.wait()
        checks.stop()
        await asyncio.gather(server.stop(grace=ANSWER_S), health_server.stop(grace=0))

    def _room(self) -> stage_pb2.Room:
        caches = (self.settings.host.session_mb + self.settings.host.prefix_mb) << 20
        return stage_pb2.Room(memory_bytes=max(0, int(WEIGHTS_SHARE * (free_memory() - caches))), speed=self.speed)


def measured_speed() -> float:
    """Matrix elements that this machine's processor multiplies in a second, as in a step of one token."""
    matrix, row = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE), torch.ones(PRODUCT_SIDE)
    times_s = []
    for _ in range(PRODUCTS):
        begin = monotonic()
        matrix @ row
        times_s.append(monotonic() - begin)
    return matrix.numel() / min(times_s)


def _new_server(
    service: StageService | WaitingService, message_bytes: int, settings: StageSettings
) -> tuple[grpc.aio.Server, HealthChecks, int]:
    """A live server of the stage service, its health service, and its port. Raises OnesweepError."""
    guards = [CallerGuard()] if settings.security.tls else []
    if settings.tokens is not None:
        keyring = Keyring(settings.tokens)
        guards.append(CallerGuard(lambda _, __, call: keyring.identify(call.invocation_metadata(), ADMIN)))
    server = new_server(message_bytes, guards, options=KEEPALIVE if settings.pipes else ())
    stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
    if settings.pipes is not None:
        join_pb2_grpc.add_JoinServiceServicer_to_server(settings.pipes, server)
    checks = HealthChecks()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = bind(server, settings.listen, settings.security, mutual=True)
    checks.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)  # of readiness; the empty name is of liveness
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    return server, checks, port


async def housekeeping(host: Host) -> None:
    while True:
        begin = monotonic()
        await asyncio.sleep(HOUSEKEEPING_S)
        host.stall_s = max(monotonic() - begin - HOUSEKEEPING_S, STALL_DECAY * host.stall_s)
        host.sessions.expire(monotonic())


def serve(settings: StageSettings) -> None:
    """Run a stage server to its end. Raises OnesweepError."""
    return_large_buffers()
    run_until_signal(StageServer(settings).run)

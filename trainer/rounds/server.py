"""A coordinator as a process: one port with the rounds, health and reflection; it ends with the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from stages.errors import Interrupted
from stages.identity import HOST, ROUTER
from stages.security import LOOPBACK_ONLY, Security
from stages.tokens import Keyring
from stages.transport import bind, new_server, stop_on_signals
from stages.web import check_framework
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.access import Access, check_page
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.coordinator_settings import CoordinatorSettings
from trainer.rounds.disk import open_store
from trainer.rounds.ledger import Ledger
from trainer.rounds.plan import RunPlan
from trainer.rounds.publishing import Publisher
from trainer.rounds.service import RoundsService
from trainer.rounds.store import Store
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = rounds_pb2.DESCRIPTOR.services_by_name["RoundsService"].full_name
STORE = "rounds"
FAREWELL_S = 10.0
"""How long workers have to hear that the run is over."""
DRAIN_S = 5.0
"""How long calls that are under way have, when the coordinator is told to stop."""
POLL_S = 0.05


@dataclass(frozen=True)
class ServerSettings:
    """Where a coordinator listens, and to whom."""

    listen: str
    security: Security = LOOPBACK_ONLY
    tokens: Path | None = None
    page: str | None = None
    """Where the page of the run is; None = it has none."""


@dataclass(frozen=True)
class OpenPort:
    """A server that answers."""

    server: grpc.aio.Server
    checks: health.HealthServicer
    port: int

    async def close(self) -> None:
        """Take no more calls, and let those under way come to their end for a while."""
        await self.checks.enter_graceful_shutdown()
        await self.server.stop(DRAIN_S)


def coordinate(
    config: TrainingConfig,
    corpus: Corpus,
    out: Path,
    server: ServerSettings,
    settings: CoordinatorSettings,
    listening: Callable[[int], None] = lambda port: None,
) -> RunPlan:
    """Run a coordinator to the end of its run. Raises OnesweepError; Interrupted when it was told to stop.

    :param out: the checkpoint; what the rounds need lies in its folder `rounds`.

    :param listening: hears of the port.
    """
    keyring = Keyring(server.tokens)
    if server.page is not None:
        check_framework("--page")
        check_page(server.page, server.security, keyring)
    if server.security.tls is not None:
        server.security.tls.own(HOST, ROUTER)
    plan = RunPlan.begin(config, corpus, out)
    with open_store(out / STORE) as store:
        ledger = ledger_of(plan, store)

        async def serve() -> None:
            coordinator = Coordinator(plan, corpus, ledger, Publisher(plan, out, corpus), out / STORE, settings)
            await _serve(coordinator, server, keyring, listening)

        asyncio.run(serve())
    return plan


def ledger_of(plan: RunPlan, store: Store) -> Ledger:
    """The ledger of a run whose open rounds begin now, by the clock that a Coordinator has."""
    return Ledger(plan.config.rounds, plan.cutting.pieces(plan.frame.initial()), store, plan.run, time.monotonic())


async def open_port(coordinator: Coordinator, settings: ServerSettings, keyring: Keyring) -> OpenPort:
    """Answer calls. Raises InputError, ServiceError where it cannot be listened on."""
    mutual = settings.security.tls is not None and keyring.open
    server, checks = new_server(), health.HealthServicer()
    rounds_pb2_grpc.add_RoundsServiceServicer_to_server(RoundsService(coordinator, Access(keyring, mutual)), server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    port = bind(server, settings.listen, settings.security, mutual)
    await server.start()
    return OpenPort(server, checks, port)


async def _serve(
    coordinator: Coordinator, settings: ServerSettings, keyring: Keyring, listening: Callable[[int], None]
) -> None:
    async with AsyncExitStack() as stack:
        if settings.page is not None:
            from trainer.rounds.page import page_served  # what serves it is optional

            page = page_served(coordinator, settings.page, settings.security, keyring)
            await stack.enter_async_context(page)
        await _run(coordinator, settings, keyring, listening)


async def _run(
    coordinator: Coordinator, settings: ServerSettings, keyring: Keyring, listening: Callable[[int], None]
) -> None:
    stop = stop_on_signals()
    open_ = await open_port(coordinator, settings, keyring)
    log.info("run %s: %d rounds, live on port %d", coordinator.plan.run[:12], coordinator.plan.rounds, open_.port)
    listening(open_.port)
    rounds, told = asyncio.create_task(coordinator.run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((rounds, told), return_when=asyncio.FIRST_COMPLETED)
        if rounds.done() and not rounds.exception():
            await _farewell(coordinator)
    finally:
        coordinator.stop()
        if not rounds.done():
            rounds.cancel()  # a merge that is under way comes to its end
        told.cancel()
        await asyncio.gather(rounds, told, return_exceptions=True)
        await open_.close()
    if rounds.cancelled():
        raise Interrupted("stopped: everything is stored; start it again to go on")
    rounds.result()


async def _farewell(coordinator: Coordinator) -> None:
    """Let the workers that are here hear of the end."""
    loop = asyncio.get_running_loop()
    end = loop.time() + FAREWELL_S
    while loop.time() < end and any(coordinator.members.is_here(m, coordinator.clock()) for m in coordinator.members):
        await asyncio.sleep(POLL_S)

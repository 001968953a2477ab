"""A coordinator as a process: one port with the rounds; it ends with the run."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from stages.descriptors import raise_descriptor_limit
from stages.errors import InputError, Interrupted
from stages.signals import stop_on_signals
from stages.wire.auth import HOST, ROUTER
from stages.wire.channel import bind, is_loopback, new_server, parse_address
from stages.wire.tls import Security
from stages.wire.tokens import Keyring
from stages.wire.web_access import check_framework
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.ledger import Ledger
from trainer.rounds.publishing import Publisher
from trainer.rounds.service import RoundsService, WorkerAccess
from trainer.rounds.settings import CoordinatorSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Store, open_store
from trainer.v1 import rounds_pb2_grpc

log = logging.getLogger(__name__)

STORE = "rounds"
FAREWELL_S = 10.0  # time in which workers learn that the run is over
DRAIN_S = 5.0  # time for calls that are under way, when the coordinator stops
POLL_S = 0.05


def coordinate(
    config: TrainingConfig,
    corpus: Corpus,
    settings: CoordinatorSettings,
    listening: Callable[[int], None] = lambda port: None,
) -> RunSpec:
    """Run a coordinator to the end of its run. Raises OnesweepError; Interrupted when it was told to stop.

    What the rounds need lies in the checkpoint's folder `rounds`. :param listening: called with the port.
    """
    raise_descriptor_limit()
    keyring, out = Keyring(settings.tokens), settings.out
    if settings.page is not None:
        check_framework("--page")
        check_page(settings.page, settings.security, keyring)
    if settings.security.tls is not None:
        settings.security.tls.own(HOST, ROUTER)
    spec = RunSpec.begin(config, corpus, out)
    with open_store(out / STORE) as store:
        ledger = ledger_of(spec, store)

        async def serve() -> None:
            coordinator = Coordinator(spec, corpus, ledger, Publisher(spec, out, corpus), out / STORE, settings)
            await _serve(coordinator, keyring, listening)

        asyncio.run(serve())
    return spec


def ledger_of(spec: RunSpec, store: Store) -> Ledger:
    """The ledger of a run whose open rounds begin now, by the clock that a Coordinator has."""
    return Ledger(spec.config.rounds, spec.fragments.split(spec.initial()), store, spec.run, time.monotonic())


@asynccontextmanager
async def open_port(coordinator: Coordinator, keyring: Keyring) -> AsyncIterator[int]:
    """Answers calls inside the block, on this port; at its end those under way have a while to come to theirs.

    Raises InputError, ServiceError where it cannot be listened on.
    """
    settings = coordinator.settings
    mutual = settings.security.tls is not None and keyring.open
    server, service = new_server(), RoundsService(coordinator, WorkerAccess(keyring, mutual))
    rounds_pb2_grpc.add_RoundsServiceServicer_to_server(service, server)
    port = bind(server, settings.listen, settings.security, mutual)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(DRAIN_S)


async def _serve(coordinator: Coordinator, keyring: Keyring, listening: Callable[[int], None]) -> None:
    async with AsyncExitStack() as stack:
        if coordinator.settings.page is not None:
            from trainer.rounds.page import page_served  # what serves it is optional

            page = page_served(coordinator, coordinator.settings.page, coordinator.settings.security, keyring)
            await stack.enter_async_context(page)
        stop, port = stop_on_signals(), await stack.enter_async_context(open_port(coordinator, keyring))
        log.info("run %s: %d rounds, live on port %d", coordinator.spec.run[:12], coordinator.spec.rounds, port)
        listening(port)
        await _run(coordinator, stop)


async def _run(coordinator: Coordinator, stop: asyncio.Event) -> None:
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
    if rounds.cancelled():
        raise Interrupted("stopped: everything is stored; start it again to go on")
    rounds.result()


async def _farewell(coordinator: Coordinator) -> None:
    """Wait until the workers that are here know of the end."""
    loop = asyncio.get_running_loop()
    end = loop.time() + FAREWELL_S
    while loop.time() < end and any(coordinator.members.is_here(m, coordinator.clock()) for m in coordinator.members):
        await asyncio.sleep(POLL_S)


def check_page(listen: str, security: Security, keyring: Keyring) -> None:
    """Raise InputError unless the page may be served there: on loopback, else over TLS and to those with tokens."""
    parse_address(listen, "--page")
    if is_loopback(listen):
        return
    if security.tls is None and not security.insecure:
        raise InputError(
            f"--page {listen} can be reached from other machines and traffic is not encrypted: give --tls-ca, "
            "--tls-cert and --tls-key, serve it on loopback, or accept it with --insecure"
        )
    if security.tls is not None and keyring.open:
        raise InputError(
            f"--page {listen} can be looked at from other machines by anybody: give --tokens, or serve it on loopback"
        )
